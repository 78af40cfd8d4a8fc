"""Routes of a reply in as many bytes as expert ids need: a fourth of what SGLang sends through its processes and over HTTP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

WIRE_DTYPES = (torch.uint8, torch.int16)


def compact(routes: Tensor, capturer: Any = None, *_, **__) -> Tensor:
    """Routes [rows, layers, topk] int32 with the same ids in one byte where all are below 256, else in two.

    The number of bytes tells a receiver which. Routes with anything but expert ids (negative numbers, or gates beside them)
    stay as they are.
    SGLang calls it after it has read a finished request's rows from its buffer, and then sends the bytes of any tensor.
    """
    if not routes.numel() or getattr(capturer, "with_gates", False):
        return routes
    low, high = (int(bound) for bound in routes.aminmax())
    fits = (dtype for dtype in WIRE_DTYPES if low >= 0 and high <= torch.iinfo(dtype).max)
    return routes.to(next(fits, routes.dtype))
