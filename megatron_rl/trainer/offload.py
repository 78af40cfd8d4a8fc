"""The trainer's memory: off the device while the rollout engine needs it, and back.

Storages are emptied and filled again in place, so that parameters stay views of Megatron's buffers and the distributed
optimizer's shards stay views of parameters. Megatron's own `optimizer.offload_to_cpu` gives tensors new memory, which cuts
such views: of fp32 parameters, and of the bf16 ones that a precision-aware optimizer steps in place. Its gradient buffers
are emptied by its own verbs; gradients are not kept.
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
"""Size of the pieces of host memory, a power of two: torch rounds each up to one, and storages by themselves would take up to
twice their size (gpt-oss-20b's experts do)."""


class HostCopy:
    """The memory of some tensors of a device, in (pinned) host memory: each storage once, whole, one behind another."""

    def __init__(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        """Starts the copies; `release` waits for them."""
        found = (t.untyped_storage() for t in tensors if t.device.type == device.type)
        # Without a GPU, memory that a checkpoint's writer has seen as an array belongs to numpy too, and stays.
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
        """Give the device's memory back to torch."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        for storage, _ in self._storages:
            storage.resize_(0)

    def restore(self) -> None:
        """Give the storages their memory and contents back."""
        for storage, size in self._storages:
            storage.resize_(size)
        for host, there in self._places():
            there.copy_(host, non_blocking=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _places(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Bytes of the host, and those of the device that lie there: a storage may go over the border of a piece."""
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
    """Where the trainer's memory is: all of it on the device, its weights alone, or nothing."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.on_device: Literal["all", "weights", "nothing"] = "all"
        self._weights: HostCopy | None = None
        """A copy that is up to date: weights do not change before all is back."""
        self._rest: HostCopy | None = None

    def require(self, what: Literal["all", "weights"]) -> None:
        """Errors: RuntimeError where it is not on the device."""
        if self.on_device not in (what, "all"):
            raise RuntimeError(
                f"the trainer sleeps: call wake({'weights_only=True' if what == 'weights' else ''}) first"
            )

    @torch.no_grad()
    def leave(self, *, keep_weights: bool = False) -> None:
        """Free the device, but for the weights with keep_weights."""
        trainer, device = self._trainer, self._trainer.ranks.device
        if self.on_device == "all":
            gather_parameters(trainer.ddp)
            if trainer.trains:
                trainer.optimizer.zero_grad()  # the optimizer's gradients may be copies, or views of the buffers
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
        """Fill the device again, with the weights alone if weights_only."""
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
    """Without the warning of what Megatron's buffers still use of torch."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TypedStorage is deprecated")
        yield


def _drop_quantized(chunks: Sequence[torch.nn.Module]) -> None:
    """Drop the FP8 copies of weights that Transformer Engine's layers keep: the next pass begins with making them anew."""
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
