"""How torch allocates GPU memory in trainer processes. Imports nothing heavy: it is read before torch is."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_rl.sync.transport import Transport

ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables that torch reads; the second is the newer name."""
EXPANDABLE = "expandable_segments:True"


def allocator_settings(transport: type[Transport], environment: Mapping[str, str]) -> dict[str, str]:
    """Variables to add to a trainer process's environment; none where the user has set something.

    They ask for segments that grow, so that micro-batches of different lengths leave no gaps.

    Not with a transport whose buckets the engine maps, as tensor: torch refuses to share such memory with another process
    (2.14: "Cannot share an expandable_segments allocation", unless TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC=1 and the kernel lets the
    engine take the trainer's file descriptors, which it seldom does for a child).
    """
    if any(name in environment for name in ALLOCATOR_VARIABLES) or transport.shares_memory:
        return {}
    return {ALLOCATOR_VARIABLES[0]: EXPANDABLE}


def shares_expandable_memory(transport: type[Transport], environment: Mapping[str, str]) -> bool:
    """True if the user's settings put the weights' bucket into memory that no other process can map."""
    given = ",".join(environment.get(name, "") for name in ALLOCATOR_VARIABLES)
    allowed = environment.get("TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC") == "1"
    return transport.shares_memory and EXPANDABLE in given and not allowed
