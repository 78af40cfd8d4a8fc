"""The compiled extensions of csrc/, or one line that says how to get them."""

import importlib
from typing import Any

from megatron_rl.errors import UserError

try:
    masked_log_softmax: Any = importlib.import_module("megatron_rl.ops._masked_log_softmax")
    sink_attention: Any = importlib.import_module("megatron_rl.ops._sink_attention")
except ImportError as error:
    raise UserError(
        f"megatron_rl's kernels are not built for this Python and torch ({error}): tools/setup.sh --force builds them"
    ) from None

CAPABILITY = (8, 0)
"""Least compute capability of a GPU that the CUDA part runs on: the oldest that setup.py compiles for."""


def have_cuda() -> bool:
    """True if the CUDA part is built: nvcc was there when the package was installed."""
    return masked_log_softmax.cuda and sink_attention.cuda
