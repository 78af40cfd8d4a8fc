"""Imports the compiled extensions of csrc/, or fails with a message that says how to build them."""

import importlib
from typing import Any

import torch

from megatron_rl.errors import UserError

try:
    masked_log_softmax: Any = importlib.import_module("megatron_rl.ops._masked_log_softmax")
    sink_attention: Any = importlib.import_module("megatron_rl.ops._sink_attention")
except ImportError as error:
    raise UserError(
        f"megatron_rl's kernels are not built for this Python and torch ({error}). Build them: tools/setup.sh --force"
    ) from None


def same_torch(built: str, here: str) -> bool:
    """Return True if code compiled against torch `built` runs with torch `here`: patch releases change no C++ classes."""
    return built.split(".")[:2] == here.split(".")[:2]


for _module in (masked_log_softmax, sink_attention):
    if not same_torch(getattr(_module, "torch", ""), torch.__version__):
        raise UserError(
            f"megatron_rl's kernels are built for torch {getattr(_module, 'torch', 'of another release')}, and this is"
            f" {torch.__version__}: tools/setup.sh --force builds them again"
        )

CAPABILITY = (8, 0)
"""Lowest compute capability for the CUDA part: the oldest architecture that setup.py compiles for."""


def have_cuda() -> bool:
    """Return True if the CUDA part is built, that is, if nvcc was found when the package was installed."""
    return masked_log_softmax.cuda and sink_attention.cuda
