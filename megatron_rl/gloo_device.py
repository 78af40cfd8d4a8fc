"""One gloo device for all groups of a process.

torch gives each group its own, with a thread that wakes a hundred times a second for as long as the group lives; Megatron makes
some thirty groups.
"""

from __future__ import annotations

import inspect
import os
from contextlib import suppress
from typing import Any

from torch.distributed.distributed_c10d import Backend, ProcessGroup, ProcessGroupGloo

from megatron_rl.network import own_address


def _devices() -> list[Any]:
    """One for each interface of GLOO_SOCKET_IFNAME; by default one on the interface that leads to MASTER_ADDR.

    torch's own is that of the host's name, which on a cluster is often the wrong network, and on Debian the host itself.
    """
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        return [ProcessGroupGloo.create_device(interface=name) for name in names.split(",")]
    one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    with suppress(OSError):
        address = own_address(os.environ.get("MASTER_ADDR", "127.0.0.1"))
        if one_host or not address.startswith("127."):
            return [ProcessGroupGloo.create_device(hostname=address)]
    return [ProcessGroupGloo.create_default_device()]


def share_device() -> None:
    """Groups over gloo that are made from here on share the same devices; with a torch older than the pin, nothing changes."""
    if "_backend_type" not in inspect.signature(Backend.register_backend).parameters:
        return  # it would take a backend that is registered again for a foreign one, which has no monitored barrier
    devices = _devices()

    def create(wanted: Any, _: object) -> ProcessGroupGloo:  # torch's own, but for its options
        options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]: torch's stubs call it Options
        options._devices, options._threads, options._timeout = devices, 2 * len(devices), wanted.timeout
        group = ProcessGroupGloo(wanted.store, wanted.group_rank, wanted.group_size, options)
        group.options.global_ranks_in_group = wanted.global_ranks_in_group
        group.options.group_name = wanted.group_id
        return group

    Backend.register_backend(
        Backend.GLOO,
        create,
        extended_api=True,
        devices=Backend.backend_capability[Backend.GLOO],
        _backend_type=ProcessGroup.BackendType.GLOO,
    )
