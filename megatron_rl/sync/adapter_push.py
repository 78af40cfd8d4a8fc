"""Weight sync of LoRA adapters that are not merged: only megabytes travel, because the servers hold the base model.

With sync.adapters: unmerged, `AdapterSync` replaces `WeightSync`. Rank 0 writes the adapters in PEFT's format to a folder that
the servers must be able to read.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import torch.distributed as dist
from torch import Tensor

from megatron_rl.config import LoRAConfig, SyncConfig
from megatron_rl.errors import together
from megatron_rl.models.peft_folder import write_folder
from megatron_rl.sync.engines import Engines
from megatron_rl.sync.transport import WeightSyncError
from megatron_rl.sync.weight_sync import SyncStats, refuse_others

SERVED = "policy"
"""Name of the adapter on the servers, used in every request."""


class AdapterSync:
    """Adapter sync of a run. Every trainer rank makes one, and all push together; only rank 0 talks to the servers."""

    def __init__(
        self,
        config: SyncConfig,
        addresses: list[str],
        lora: LoRAConfig,
        *,
        base: Path,
        folder: Path,
        group: dist.ProcessGroup | None = None,
        key: str = "",
    ) -> None:
        """Prepare, without connecting.

        base: folder of the base model that the servers hold. folder: parent of the folders with adapters. key: API key of the
        servers.
        """
        self.config, self.addresses, self.group = config, list(addresses), group
        self._lora, self._base, self._folder, self._key = lora, base, folder, key
        self._is_sender = not dist.is_initialized() or dist.get_rank(group) == 0
        self._engines: Engines | None = None
        self.version: str | None = None
        """Version of the adapters that were pushed last."""

    def push(self, named_tensors: Iterator[tuple[str, Tensor]], version: str) -> SyncStats:
        """Replace the adapters on all servers by new ones, given by PEFT's names. Collective: all ranks call it.

        named_tensors: (PEFT's name, tensor) of every adapter weight. Rank 0 reads them, other ranks only iterate. Errors:
        WeightSyncError (every rank) naming the server.
        """
        tensors = dict(named_tensors)
        result = [together((lambda: self._push(tensors, version)) if self._is_sender else None, self.group)]
        if dist.is_initialized() and dist.get_world_size(self.group) > 1:
            dist.broadcast_object_list(result, group_src=0, group=self.group)
        stats = result[0]
        assert stats is not None
        self.version = version
        return stats

    def verify(self) -> None:
        """Check that the servers have the last pushed version. Errors (on every rank): WeightSyncError naming the servers."""
        together(self._check_served if self._is_sender else None, self.group)

    def move(self, addresses: list[str]) -> None:
        """Replace the servers' addresses. The next push goes to the new servers."""
        if list(addresses) != self.addresses:
            self.close()
            self.addresses = list(addresses)

    def close(self) -> None:
        """Close the connection, and remove the files written for the servers."""
        if self._engines is not None:
            self._engines.close()
            self._engines = None
            shutil.rmtree(self._folder, ignore_errors=True)

    def _push(self, tensors: dict[str, Tensor], version: str) -> SyncStats:
        start = time.monotonic()
        self._engines = engines = self._engines or Engines(self.addresses, self.config.timeout_s, key=self._key)
        refuse_others(self.addresses, [reply.get("weight_version") for reply in engines.get("/model_info")], version)
        folder = (self._folder / f"adapter_{version}").resolve()
        try:
            shutil.rmtree(self._folder, ignore_errors=True)
            write_folder(folder, tensors, self._lora, self._base)
        except OSError as error:
            raise WeightSyncError(f"weight sync: {folder}: could not be written ({error.strerror or error})") from None
        engines.attempt("/unload_lora_adapter", {"lora_name": SERVED})  # of an earlier push or trainer
        engines.call("/load_lora_adapter", {"lora_name": SERVED, "lora_path": str(folder)})
        engines.call("/update_weight_version", {"new_version": version, "abort_all_requests": False})
        size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        return SyncStats(size, time.monotonic() - start, 1, len(tensors))

    def _check_served(self) -> None:
        if self._engines is None:
            raise WeightSyncError("weight sync: nothing was pushed yet")
        replies = self._engines.get("/model_info")
        served = {address: r.get("weight_version") for address, r in zip(self.addresses, replies, strict=True)}
        if wrong := [f"{address} has '{found}'" for address, found in served.items() if found != self.version]:
            raise WeightSyncError(
                f"weight sync: adapters of version '{self.version}' were pushed last, and {', '.join(wrong)}: the"
                " server was restarted, or another program changed its adapters"
            )
