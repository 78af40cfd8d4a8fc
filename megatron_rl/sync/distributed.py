"""Transport by broadcast from the trainer to all engines, in separate torch process groups: NCCL with CUDA, else gloo."""

from __future__ import annotations

import contextlib
import threading
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, override
from urllib.parse import urlsplit

from megatron_rl.sync.transport import Bucket, Transport, WeightSyncError

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]: documented there

    from megatron_rl.sync.engines import Engines


class DistributedTransport(Transport):
    """Sends weights by `/update_weights_from_distributed`. Trainer rank 0 is rank 0 of each group, before the servers' ranks.

    NCCL has one group with all servers, because its broadcast passes the data on from server to server. Gloo has one group for
    each server: if a member of a gloo group is dead, a broadcast fails before it has reached the other members. The other
    members would then wait until their timeout, because `abort` does not close gloo's connections (torch 2.14).

    A group is a bare backend object, outside torch.distributed's registry of groups. No other group depends on it, so a
    failed group can be discarded and replaced.
    """

    not_on_one_gpu = "NCCL takes no two processes of a group on one GPU"

    def __init__(self, engines: Engines, tensor_parallel: int, folder: Path | None = None):
        import torch

        super().__init__(engines, tensor_parallel, folder)
        self.backend = "nccl" if self.device.type == "cuda" else "gloo"
        self.timeout = timedelta(seconds=engines.timeout_s)
        self._name = ""
        self._groups: list[Any] = []  # backends, of which torch declares no broadcast
        self._stores: list[TCPStore] = []
        # A separate stream, so that waiting for the broadcast does not wait for the kernels of the next bucket.
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    @override
    def connect(self) -> None:
        from megatron_rl.distributed.processes import listening_store

        self.close()
        name = f"weights-{uuid.uuid4().hex[:8]}"
        addresses = self.engines.addresses
        host = _own_address(addresses[0])
        together = len(addresses) if self.backend == "nccl" else 1
        size = 1 + self.tensor_parallel * together
        ports = []
        for _ in range(len(addresses) // together):
            self._stores.append(listening_store(host, 0, size, self.timeout, wait=False))
            ports.append(self._stores[-1].port)
        # The servers join at the same time as this side: all sides block until every rank has joined.
        calls = self.engines.start(
            "/init_weights_update_group",
            [
                {
                    "master_address": host,
                    "master_port": ports[index // together],
                    "rank_offset": 1 + self.tensor_parallel * (index % together),
                    "world_size": size,
                    "group_name": name,
                    "backend": self.backend,
                }
                for index in range(len(addresses))
            ],
        )
        # In separate threads, so that a server's refusal ends the wait at once, and not after the store's timeout.
        joined = [_in_thread(partial(self._join, host, port, name, size)) for port in ports]
        try:
            self.engines.wait(calls)
            self._name, self._groups = name, [group.result(self.engines.timeout_s) for group in joined]
        except (RuntimeError, TimeoutError) as error:
            reason = str(error) or f"not within {self.engines.timeout_s:g} s (sync.timeout_s)"
            servers = ", ".join(addresses)
            raise WeightSyncError(f"weight sync: no {self.backend} group with {servers}: {reason}") from None
        finally:
            if not self._groups:  # without the stores, joined ranks stop waiting for a rank that died
                self._stores.clear()

    def _join(self, host: str, port: int, name: str, size: int) -> dist.ProcessGroupGloo | dist.ProcessGroupNCCL:
        """Join the group in the same way as SGLang's init_custom_process_group, with the same nested prefixes in the store.

        The group opens its own connection to the store, so that the store's owner can close the store at any time.
        """
        import torch
        import torch.distributed as dist
        from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]: documented there

        tcp = TCPStore(host, port, size, is_master=False, timeout=self.timeout, wait_for_workers=False)
        store = PrefixStore(f"{self.device.type}/", PrefixStore(f"{name}/", PrefixStore(name, tcp)))
        if self.backend == "gloo":
            return dist.ProcessGroupGloo(store, 0, size, timeout=self.timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self.timeout
        with torch.cuda.device(self.device):
            return dist.ProcessGroupNCCL(store, 0, size, options)

    @override
    def send(self, bucket: Bucket, version: str | None) -> None:
        import torch

        # The request comes first and stays open during the broadcast: a server that refuses never joins the broadcast, and
        # its answer ends the wait on this side.
        calls = self.engines.start(
            "/update_weights_from_distributed",
            {
                "names": [entry.name for entry in bucket.entries],
                "dtypes": [str(entry.dtype).removeprefix("torch.") for entry in bucket.entries],
                "shapes": [list(entry.shape) for entry in bucket.entries],
                "group_name": self._name,
                "load_format": "flattened_bucket",
                "flush_cache": version is not None,
                "weight_version": version,
            },
        )
        with torch.cuda.stream(self._stream):
            works = [group.broadcast([bucket.data], _broadcast_options(self.timeout)) for group in self._groups]
            self.engines.wait(calls)
            for work in works:
                work.wait(self.timeout)
        if self._stream is not None:
            self._stream.synchronize()  # NCCL's wait blocks only the stream, not this thread

    @override
    def abort(self) -> None:
        self.close()
        super().abort()

    @override
    def close(self) -> None:
        groups, self._groups = self._groups, []
        for group in groups:
            with contextlib.suppress(RuntimeError):
                group.abort()  # ends a broadcast that nobody receives
        if groups:
            self.engines.attempt("/destroy_weights_update_group", {"group_name": self._name})
        self._stores.clear()


def _in_thread(call: Callable[[], Any]) -> Future:
    result: Future = Future()

    def run() -> None:
        try:
            result.set_result(call())
        except BaseException as error:
            result.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return result


def _broadcast_options(timeout: timedelta) -> dist.BroadcastOptions:
    import torch.distributed as dist

    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    options.timeout = timeout
    options.asyncOp = True
    return options


def _own_address(server: str) -> str:
    from megatron_rl.distributed.processes import own_address

    parts = urlsplit(server)
    try:
        return own_address(parts.hostname or "", parts.port or 80)
    except OSError as error:
        raise WeightSyncError(f"weight sync: no route to {server}: {error.strerror or error}") from None
