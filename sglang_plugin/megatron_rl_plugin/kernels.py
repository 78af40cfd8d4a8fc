"""Kernels that SGLang takes on a GPU for what they cannot do: the ones beside them do it.

Keys and values of heads of some widths cannot go to the cache by the kernel that rotates them: it refuses the first request in
bf16. Queries and keys in fp32 have no kernel that normalizes both at once: every server would compile one in vain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

ROTATED_AND_WRITTEN = (64, 128, 256, 512)
"""Widths of heads for which RotaryEmbedding takes the kernel that does both."""


def rotates_and_writes(original: Callable[..., bool], forward_batch: Any) -> bool:
    """Around `enable_fused_set_kv_buffer`, which looks at the cache's type and not at its width."""
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    return original(forward_batch) and get_token_to_kv_pool().head_dim in ROTATED_AND_WRITTEN


def normalizes_both(original: Callable[..., bool], head_dim: int, dtype: torch.dtype) -> bool:
    """Around `can_use_fused_inplace_qknorm`, which looks at the width and leaves the type to the compiler."""
    return dtype != torch.float32 and original(head_dim, dtype)
