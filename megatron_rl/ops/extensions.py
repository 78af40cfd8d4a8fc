"""The compiled extensions of csrc/, or one line that says how to get them."""

import importlib
from typing import Any

import torch

from megatron_rl.errors import UserError

try:
    masked_log_softmax: Any = importlib.import_module("megatron_rl.ops._masked_log_softmax")
    sink_attention: Any = importlib.import_module("megatron_rl.ops._sink_attention")
except ImportError as error:
    raise UserError(
        f"megatron_rl's kernels are not built for this Python and torch ({error}): tools/setup.sh --force builds them"
    ) from None


def same_torch(built: str, here: str) -> bool:
    """True if what was compiled against one release of torch runs with another: patches of one release change no classes."""
    return built.split(".")[:2] == here.split(".")[:2]


for _module in (masked_log_softmax, sink_attention):
    if not same_torch(getattr(_module, "torch", ""), torch.__version__):
        raise UserError(
            f"megatron_rl's kernels are built for torch {getattr(_module, 'torch', 'of another release')}, and this is"
            f" {torch.__version__}: tools/setup.sh --force builds them anew"
        )

CAPABILITY = (8, 0)
"""Least compute capability of a GPU that the CUDA part runs on: the oldest that setup.py compiles for."""


def have_cuda() -> bool:
    """True if the CUDA part is built: nvcc was there when the package was installed."""
    return masked_log_softmax.cuda and sink_attention.cuda
