"""Heads of a width that SGLang's own kernel does not rotate: on a GPU keys and values go to the cache by a kernel of their own.

SGLang asks the rotation to write them for every cache in bf16; the kernel that rotates the other widths refuses that at the
first request.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

ROTATED_AND_WRITTEN = (64, 128, 256, 512)
"""Widths of heads for which RotaryEmbedding takes the kernel that does both."""


def written_within_rotation(original: Callable[..., bool], forward_batch: Any) -> bool:
    """Around `enable_fused_set_kv_buffer`, which looks at the cache and not at its width."""
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    return original(forward_batch) and get_token_to_kv_pool().head_dim in ROTATED_AND_WRITTEN
