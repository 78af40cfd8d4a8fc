"""Restricts two fused GPU kernels of SGLang to the inputs that they support. For other inputs, SGLang uses separate kernels.

One kernel rotates keys, and writes keys and values to the cache. It does not support all head widths; in bf16, the first
request would fail. The other kernel normalizes queries and keys together. It does not support fp32; every server would compile
a kernel that it cannot use.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

ROTATED_AND_WRITTEN = (64, 128, 256, 512)
"""Head widths that the kernel for rotation and cache writes supports."""


def rotates_and_writes(original: Callable[..., bool], forward_batch: Any) -> bool:
    """Return False also for unsupported head widths.

    Hook around `enable_fused_set_kv_buffer`, which checks only the cache's type.
    """
    from sglang.srt.model_executor.forward_context import get_token_to_kv_pool

    return original(forward_batch) and get_token_to_kv_pool().head_dim in ROTATED_AND_WRITTEN


def normalizes_both(original: Callable[..., bool], head_dim: int, dtype: torch.dtype) -> bool:
    """Return False also for an unsupported dtype. Hook around `can_use_fused_inplace_qknorm`, which checks only the width."""
    return dtype != torch.float32 and original(head_dim, dtype)
