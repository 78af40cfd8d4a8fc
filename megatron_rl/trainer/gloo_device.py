"""One gloo device for all groups of a process.

torch gives each group its own, with a thread that wakes a hundred times a second for as long as the group lives; Megatron makes
some thirty groups.
"""

from __future__ import annotations

import os
from typing import Any

from torch.distributed.distributed_c10d import Backend, ProcessGroup, ProcessGroupGloo


def share_device() -> None:
    """Groups over gloo that are made from here on share devices: one for each interface of GLOO_SOCKET_IFNAME."""
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    make = ProcessGroupGloo.create_device
    devices = (
        [make(interface=name) for name in names.split(",")] if names else [ProcessGroupGloo.create_default_device()]
    )

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
