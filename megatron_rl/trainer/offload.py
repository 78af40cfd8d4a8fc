"""Moves the trainer's memory off the device while the rollout engine needs the device, and back.

Tensor storages are emptied and refilled in place. So parameters stay views of Megatron's buffers, and the distributed
optimizer's shards stay views of parameters. Megatron's own `optimizer.offload_to_cpu` gives tensors new memory. This breaks the
views of fp32 parameters, and of bf16 parameters that a precision-aware optimizer updates in place. Gradient buffers are emptied
by Megatron's own methods, and gradients are not kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from megatron_rl.trainer.optimizer import gather_parameters, inner_optimizers

if TYPE_CHECKING:
    from megatron_rl.trainer.trainer import Trainer


PIECE_BYTES = 2**30
"""Size of a block of host memory in bytes, a power of two. torch rounds each allocation up to a power of two, so one allocation
per storage could take almost twice the storage's size (for example, the experts of gpt-oss-20b)."""


class HostCopy:
    """Copy of some device tensors' storages in (pinned) host memory. Each storage is copied once and in full."""

    def __init__(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        """Start the copies; `release` waits for them."""
        found = (t.untyped_storage() for t in tensors if t.device.type == device.type)
        # Without a GPU, numpy also owns memory that a checkpoint's writer has read as an array. Such memory stays.
        storages = {storage._cdata: storage for storage in found if storage.resizable()}
        self._device = device
        self._storages = [(storage, storage.nbytes()) for storage in storages.values()]
        total = sum(size for _, size in self._storages)
        sizes = [min(PIECE_BYTES, total - start) for start in range(0, total, PIECE_BYTES)]
        options = {"dtype": torch.uint8, "pin_memory": device.type == "cuda"}
        self.pieces = [torch.empty(size, **options) for size in sizes]
        for host, there in self._places():
            host.copy_(there, non_blocking=True)

    def release(self) -> None:
        """Free the storages' device memory."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        for storage, _ in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Allocate the storages again and copy their contents back."""
        for storage, size in self._storages:
            storage.resize_(size)
        for host, there in self._places():
            there.copy_(host, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _places(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield matching byte ranges (in host memory, on the device). A storage may extend over two blocks of host memory."""
        position = 0
        for storage, size in self._storages:
            there = torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage)
            start = 0
            while start < size:
                piece, at = divmod(position, PIECE_BYTES)
                count = min(PIECE_BYTES - at, size - start)
                yield self.pieces[piece][at : at + count], there[start : start + count]
                start, position = start + count, position + count


class Residence:
    """Controls which of the trainer's tensors are on the device: all of them, only the weights, or none."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.on_device: Literal["all", "weights", "nothing"] = "all"
        self._weights: HostCopy | None = None
        """Copy of the weights in host memory. The copy stays valid, because weights change only if everything is on the
        device."""
        self._rest: HostCopy | None = None

    def require(self, what: Literal["all", "weights"]) -> None:
        """Raise RuntimeError if `what` is not on the device."""
        if self.on_device not in (what, "all"):
            raise RuntimeError(
                f"the trainer sleeps: call wake({'weights_only=True' if what == 'weights' else ''}) first"
            )

    @torch.no_grad()
    def leave(self, *, keep_weights: bool = False) -> None:
        """Free the device memory. keep_weights: leave the weights on the device."""
        trainer, device = self._trainer, self._trainer.ranks.device
        if self.on_device == "all":
            gather_parameters(trainer.ddp)
            if trainer.trains:
                trainer.optimizer.zero_grad()  # they may be copies, or views of the buffers
            with _quiet():
                for ddp in trainer.ddp:
                    ddp.offload_grad_buffers(empty_cache=False)
            _drop_quantized([*trainer.chunks, *(trainer.reference or [])])
            self._rest = HostCopy(_rest(trainer), device)
            self._rest.release()
            self.on_device = "weights"
        if self.on_device == "weights" and not keep_weights:
            self._weights = self._weights or HostCopy(_tensors(trainer.chunks), device)
            self._weights.release()
            self.on_device = "nothing"
        if device.type == "cuda":
            torch.cuda.empty_cache()

    @torch.no_grad()
    def come_back(self, *, weights_only: bool = False) -> None:
        """Restore the contents of the device memory. weights_only: restore only the weights."""
        if self._weights and self.on_device == "nothing":
            self._weights.restore()
            self.on_device = "weights"
        if self._rest and self.on_device == "weights" and not weights_only:
            self._rest.restore()
            with _quiet():
                for ddp in self._trainer.ddp:
                    ddp.restore_grad_buffers(synchronize=False)
            self._weights = self._rest = None
            self.on_device = "all"


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress the warning about Megatron's use of a deprecated torch class."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")
        yield


def _drop_quantized(chunks: Sequence[torch.nn.Module]) -> None:
    """Drop the FP8 weight copies of Transformer Engine's layers. The next forward pass makes new copies."""
    for chunk in chunks:
        for module in chunk.modules():
            getattr(module, "_fp8_workspaces", {}).clear()


def _rest(trainer: Trainer) -> Iterator[Tensor]:
    weights = {t.untyped_storage()._cdata for t in _tensors(trainer.chunks)}
    others = [_tensors(trainer.reference or [])]
    others += [hook.tensors() for hook in trainer.hooks]
    if trainer.trains:
        others += [_state(inner) for inner in inner_optimizers(trainer.optimizer)]
    for tensors in others:
        yield from (t for t in tensors if t.untyped_storage()._cdata not in weights)


def _tensors(chunks: Sequence[torch.nn.Module]) -> Iterator[Tensor]:
    for chunk in chunks:
        yield from chunk.parameters()
        yield from chunk.buffers()


def _state(optimizer: Any) -> Iterator[Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]
    for state in optimizer.state.values():
        yield from (value for value in state.values() if torch.is_tensor(value))
