"""Pushes the trainer's weights to the rollout engines, and verifies that they arrived.

    sync = WeightSync(config.sync, addresses, rollout_dtype=config.precision.rollout, folder=config.run_dir / "sync")
    sync.push(export_hf_weights(chunks), version="17")     # on every trainer rank

In a push, the engine first stops its running requests and pauses. It loads bucket after bucket into its parameters and flushes
its prefix cache. The trainer compares the engine's checksums with its own, and only then lets the engine continue. The stopped
requests continue with the new weights, and their replies say which weight version sampled which tokens. The trainer has two
buffers: it fills a bucket in one of them while the engines load the bucket in the other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_rl.config import SyncConfig
from megatron_rl.errors import UserError, together
from megatron_rl.models import fp8
from megatron_rl.models.precision import ROLLOUT_DTYPES, torch_dtype
from megatron_rl.sync.checksums import (
    PREDICTOR_WEIGHT,
    EngineParameter,
    ExpectedChecksums,
    Slot,
    keep_together,
    locate,
    parse,
)
from megatron_rl.sync.engines import Engines, owner_of
from megatron_rl.sync.transport import Bucket, Transport, WeightSyncError, fill_buckets
from megatron_rl.sync.transports import transport_class

T = TypeVar("T")


@dataclass(frozen=True)
class SyncStats:
    """Size and duration of a push."""

    bytes: int
    seconds: float
    buckets: int
    tensors: int


class WeightSync:
    """Weight sync of a run. Every trainer rank makes one, and all push together; only rank 0 talks to the servers."""

    def __init__(
        self,
        config: SyncConfig,
        addresses: list[str],
        *,
        rollout_dtype: Literal["bf16", "fp32", "fp8"],
        folder: Path | str | None = None,
        group: dist.ProcessGroup | None = None,
        stay_paused: bool = False,
        key: str = "",
    ):
        """Prepare, without connecting.

        folder: folder that trainer and servers share, for transports that need one. group: the trainer's ranks (default: all).
        stay_paused: the servers stay paused after a push, until other code tells them to continue. key: API key of the servers.
        If rollout_dtype is fp8, weight matrices are sent in block FP8 with their scales. Without a GPU, they are only rounded
        to FP8 values, for an engine that serves bf16.
        """
        self._transport_class = transport_class(config.transport)
        if self._transport_class.needs_folder and folder is None:
            raise UserError(
                f"config: sync.transport = {config.transport} needs a folder that trainer and servers share"
            )
        self.config, self.addresses, self.group = config, list(addresses), group
        self.folder = Path(folder) if folder is not None else None
        self._stay_paused, self._key = stay_paused, key
        simulate = not torch.cuda.is_available()
        self.rollout_dtype = torch_dtype(ROLLOUT_DTYPES[rollout_dtype])
        self._as_served: Callable[[Iterator], Iterator] = iter
        if rollout_dtype == "fp8":
            self._as_served = partial(fp8.quantized, simulate=simulate)
            self.rollout_dtype = self.rollout_dtype if simulate else torch.float8_e4m3fn
        self.version: str | None = None
        """Version of the weights that were last pushed and verified; None after a failed push."""
        self._ranks = dist.get_world_size(group) if dist.is_initialized() else 1
        self._is_sender = self._ranks == 1 or dist.get_rank(group) == 0
        self._engines: Engines | None = None
        self._transport: Transport | None = None
        self._parameters: list[dict[str, EngineParameter]] = []
        self._slot_of: Callable[[str], Slot | None] = lambda name: None
        self._buffers: list[Tensor | None] = [None, None]
        self._expected: ExpectedChecksums | None = None
        self._paused: list[str] = []
        """Addresses of servers that stay paused because a failed push left them with incomplete weights."""

    # --- every rank -------------------------------------------------------------------------------------------------

    def connect(self, addresses: list[str] | None = None) -> None:
        """Connect to the servers. This is cheap if the connection still holds. A restarted server is connected again.

        `push` does this by itself. addresses: new addresses of the servers, if these have changed.
        """
        if addresses is not None:
            self.move(addresses)
        self._together(self._connect)

    def move(self, addresses: list[str]) -> None:
        """Replace the servers' addresses. The next push goes to the new servers. All ranks call this, without waiting."""
        if list(addresses) != self.addresses:
            self._disconnect()
            self.addresses = list(addresses)

    def push(self, named_tensors: Iterator[tuple[str, Tensor]], version: str) -> SyncStats:
        """Send all weights to all servers and compare checksums. Collective: all ranks iterate, and all get the result.

        named_tensors: (Hugging Face name, full tensor) of every weight of the model. Rank 0 reads the tensors; the
        other ranks only iterate. Errors (on every rank): WeightSyncError that names the server or the tensors. After an error
        the servers sample nothing until a push has reached them, or this object is closed.
        """
        if not self._is_sender:
            for _ in named_tensors:
                pass
        return self._together(lambda: self._push(named_tensors, str(version)))

    def verify(self) -> None:
        """Check that the servers still have the version and checksums of the last push.

        Errors (on every rank): WeightSyncError that names the servers, or one server and its tensors.
        """
        self._together(self._check_served)

    def close(self) -> None:
        """Close the connection. A later push connects again."""
        if self._paused:  # other clients may use them, and can check the version of the answers
            engines = Engines(self._paused, self.config.timeout_s, key=self._key)
            engines.attempt("/continue_generation", {})
            engines.close()
            self._paused = []
        self._disconnect()

    def _disconnect(self) -> None:
        if self._transport is not None:
            self._transport.close()
        if self._engines is not None:
            self._engines.close()
        self._engines = self._transport = None
        self._buffers = [None, None]
        self._parameters = []

    def __enter__(self) -> WeightSync:
        return self

    def __exit__(self, *_exception) -> None:
        self.close()

    def _together(self, work: Callable[[], T]) -> T:
        """Run `work` on rank 0. Every rank returns rank 0's result, or raises rank 0's error."""
        result = [together(work if self._is_sender else None, self.group)]
        if self._ranks > 1:
            dist.broadcast_object_list(result, group_src=0, group=self.group)
        return cast("T", result[0])

    # --- rank 0 -----------------------------------------------------------------------------------------------------

    def _connect(self) -> None:
        if self._engines is None:
            self._engines = Engines(self.addresses, self.config.timeout_s, key=self._key)
        if self._transport is not None:
            self._reconnect()
            return
        self._buffers = [None, None]  # a transport sends only its own buffers
        self._engines.attempt("/end_weight_update")  # may be open after a trainer died
        self._parameters = self._checksums()[0]
        self._check_dtype()
        shapes = {name: parameter.shape for name, parameter in self._parameters[0].items()}
        self._slot_of = cache(partial(locate, parameters=shapes))  # called for every tensor of every push
        ranks = len(self._parameters)
        self._transport = self._transport_class(self._engines, ranks, self.folder)
        self._transport.connect()

    def _reconnect(self) -> None:
        """Connect again if the connection no longer holds.

        Errors: WeightSyncError if a server was replaced by a different one.
        """
        if self._still_served():
            return
        if _layout(self._checksums()[0]) != _layout(self._parameters):
            raise WeightSyncError(
                f"weight sync: the server at {self.addresses[0]} was replaced by one of another model, dtype or parallelism"
            )
        _there(self._transport).connect()

    def _still_served(self) -> bool:
        """Return whether all servers have the version that was pushed last. A restarted server has another version."""
        if self.version is None:
            return True
        try:
            return all(served == self.version for served in self._served())
        except WeightSyncError:
            return False

    def _served(self) -> list[str | None]:
        return [reply.get("weight_version") for reply in _there(self._engines).get("/model_info")]

    def _check_served(self) -> None:
        served = zip(self.addresses, self._served(), strict=True)
        if wrong := [f"{address} has '{version}'" for address, version in served if version != self.version]:
            raise WeightSyncError(
                f"weight sync: version '{self.version}' was pushed last, and {', '.join(wrong)}: the server was"
                " restarted, or another program changed its weights"
            )
        self._verify()

    def _check_dtype(self) -> None:
        sizes: dict[torch.dtype, int] = {}
        for parameter in self._parameters[0].values():
            sizes[parameter.dtype] = sizes.get(parameter.dtype, 0) + torch.Size(parameter.shape).numel()
        served = max(sizes, key=lambda dtype: (dtype == torch.float8_e4m3fn, sizes[dtype]))
        if served != self.rollout_dtype:
            served, wanted = (str(dtype).removeprefix("torch.") for dtype in (served, self.rollout_dtype))
            raise WeightSyncError(
                f"weight sync: {self.addresses[0]} serves {served} weights, but precision.rollout is {wanted}:"
                " start it through tools/serve.py with this config, or change the config"
            )

    def _checksums(self) -> list[list[dict[str, EngineParameter]]]:
        """Return each parameter's fingerprint, dtype and local shape, as [server][tensor-parallel rank]{name: parameter}."""
        servers: list[list[dict[str, EngineParameter]]] = []
        replies = _there(self._engines).call("/weights_checker", {"action": "checksum", "selector": "target"})
        for address, reply in zip(self.addresses, replies, strict=True):
            ranks = [{k: parse(v) for k, v in rank["checksums"].items()} for rank in reply["ranks"]]
            if any(parameter is None for rank in ranks for parameter in rank.values()):
                raise WeightSyncError(
                    f"weight sync: {address} runs without the checksum plugin: install it into the server's environment"
                    " (pip install --no-deps ./sglang_plugin) and restart the server"
                )
            servers.append(cast("list[dict[str, EngineParameter]]", ranks))
        if any(_layout(ranks) != _layout(servers[0]) for ranks in servers):
            names = ", ".join(self.addresses)
            raise WeightSyncError(f"weight sync: the servers {names} differ in model, dtype or parallelism")
        return servers

    def _push(self, named_tensors: Iterator[tuple[str, Tensor]], version: str) -> SyncStats:
        started = time.perf_counter()
        named_tensors = iter(named_tensors)
        try:
            if self._transport is None:
                self._connect()
            stats = self._stream(named_tensors, version)
        except BaseException:
            for _ in named_tensors:  # other ranks are in the export's collectives
                pass
            self.version = None
            if self._transport is not None:
                self._transport.abort()
                self._transport = None
            # A request that continued now would get tokens of partly updated weights.
            if self._engines is not None and not self._stay_paused:
                self._paused = [*{*self._paused, *self.addresses}]
            raise
        self.version = version
        self._paused = [address for address in self._paused if address not in self.addresses]
        if not self._stay_paused:
            _there(self._engines).tell("/continue_generation", {})  # until then, requests wait in the server
        else:  # the GPU now belongs to the engines
            self._buffers = [None, None]
            if torch.cuda.is_available():
                torch.cuda.ipc_collect()
        return SyncStats(seconds=time.perf_counter() - started, **stats)

    def _open(self, version: str) -> None:
        engines = _there(self._engines)
        refuse_others(self.addresses, self._served(), version)
        pausing = engines.start("/pause_generation", {"mode": "retract"})  # a new server pauses meanwhile
        try:
            self._reconnect()
        finally:
            engines.wait(pausing)
        _there(self._transport).begin()

    def _stream(self, named_tensors: Iterator[tuple[str, Tensor]], version: str) -> dict[str, int]:
        """Fill buckets in this thread, and send them in order in another thread. After an error, no more buckets are sent."""
        expected = ExpectedChecksums(self._parameters, self._slot_of)
        sent = {"bytes": 0, "buckets": 0, "tensors": 0}
        transport = _there(self._transport)
        prepare = partial(torch.cuda.set_device, transport.device) if transport.device.type == "cuda" else None
        sender = ThreadPoolExecutor(1, "weight-sync-send", prepare)
        calls = [sender.submit(self._open, version)]  # the first bucket is filled meanwhile

        def buffer_of(nbytes: int) -> Tensor:
            """Return one of the two buffers in turn, after the engines have loaded the bucket that the buffer held before."""
            turn = sent["buckets"] % 2
            if sent["buckets"]:
                calls[sent["buckets"] - 1].result()
            buffer = self._buffers[turn]
            if buffer is None or buffer.numel() < nbytes:
                buffer = self._buffers[turn] = None  # freed before the larger buffer is allocated
                buffer = self._buffers[turn] = transport.allocate(nbytes)
            return buffer

        def send(previous: Future[None], bucket: Bucket, version: str | None) -> None:
            previous.result()
            transport.send(bucket, version)

        try:
            for bucket, last in fill_buckets(
                keep_together(self._as_served(named_tensors), self._slot_of),
                capacity=int(self.config.bucket_mb * 2**20),
                dtype_of=self._dtype_of,
                buffer_of=buffer_of,
                seen=expected.add,
            ):
                expected.collect()  # also waits until the GPU has filled the bucket
                calls.append(sender.submit(send, calls[-1], bucket, version if last else None))
                sent["bytes"] += bucket.used
                sent["buckets"] += 1
                sent["tensors"] += len(bucket.entries)
            calls[-1].result()
        finally:
            sender.shutdown(cancel_futures=True)
        if not sent["buckets"]:
            raise WeightSyncError("weight sync: there is no tensor to push")
        transport.finish(version)
        self._expected = expected
        self._verify(version)
        return sent

    def _verify(self, version: str | None = None) -> None:
        for address, ranks in zip(self.addresses, self._checksums(), strict=True):
            if wrong := _there(self._expected).mismatches(ranks):
                raise WeightSyncError(
                    f"weight sync: checksums differ after the push of version {version or self.version} to {address}: "
                    + "; ".join(wrong)
                )

    def _dtype_of(self, name: str) -> torch.dtype:
        """Return the dtype in which the engine holds a tensor. Some tensors, such as routing biases, may be in fp32."""
        slot = self._slot_of(name)
        if slot is None:
            remedy = ": start it through tools/serve.py with this config" if name.endswith(PREDICTOR_WEIGHT) else ""
            raise WeightSyncError(
                f"weight sync: the served model has no place for '{name}' ({self.addresses[0]}){remedy}"
            )
        return self._parameters[0][slot.parameter].dtype


def refuse_others(addresses: list[str], served: list[str | None], version: str) -> None:
    """Raise WeightSyncError if a server has weights of a run other than the run of `version`."""
    for address, found in zip(addresses, served, strict=True):
        if owner_of(found) not in ("", owner_of(version)):
            raise WeightSyncError(
                f"weight sync: another run pushes to {address} (its weights are {found!r:.80}): give each run its own"
                " servers; if that run was killed, restart the server"
            )


def _there[T](part: T | None) -> T:
    if part is None:
        raise WeightSyncError("weight sync: not connected to the servers, or nothing was pushed yet")
    return part


def _layout(ranks: list[dict[str, EngineParameter]]) -> list[dict]:
    return [{name: (parameter.dtype, parameter.shape) for name, parameter in rank.items()} for rank in ranks]
