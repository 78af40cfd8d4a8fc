"""Torch's allocator settings for GPU memory in trainer processes. This module is read before torch, and loads nothing heavy."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_rl.sync.transport import Transport

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Environment variables that torch reads; the second is the newer name."""
EXPANDABLE = "expandable_segments:True"


def allocator_settings(transport: type[Transport], environment: Mapping[str, str]) -> dict[str, str]:
    """Return variables to add to a trainer process's environment; {} if the user has already set one of them.

    The variables select expandable memory segments, so that micro-batches of different lengths leave no gaps.

    Nothing is added for the transport `tensor`, whose buckets the engine maps. Torch refuses to share expandable segments with
    another process (2.14: "Cannot share an expandable_segments allocation"). TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=1 allows it,
    but only if the operating system's kernel lets the engine take the trainer's file descriptors. Kernels rarely let a child
    process take descriptors of its parent.
    """
    if any(name in environment for name in ALLOCATOR_VARIABLES) or transport.shares_memory:
        return {}
    return {ALLOCATOR_VARIABLES[0]: EXPANDABLE}


def shares_expandable_memory(transport: type[Transport], environment: Mapping[str, str]) -> bool:
    """Return whether the user's settings put the transport's bucket into expandable memory, which no other process can map."""
    given = ",".join(environment.get(name, "") for name in ALLOCATOR_VARIABLES)
    allowed = environment.get("TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC") == "1"
    return transport.shares_memory and EXPANDABLE in given and not allowed
