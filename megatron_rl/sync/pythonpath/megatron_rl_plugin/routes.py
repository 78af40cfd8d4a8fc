"""Routes of a reply in as many bytes as expert ids need: a fourth of what SGLang sends through its processes and over HTTP."""

from __future__ import annotations

import torch
from torch import Tensor

WIRE_DTYPES = (torch.uint8, torch.int16)


def compact(routes: Tensor, *_, **__) -> Tensor:
    """[rows, layers, topk] int32 -> the same ids in one byte where all are below 256, else in two; a receiver tells it by the
    number of bytes. What is no expert id (negative) stays as it is.

    Called after SGLang has read a finished request's rows from its buffer; what follows sends the bytes of any tensor.
    """
    if not routes.numel():
        return routes
    low, high = (int(bound) for bound in routes.aminmax())
    fits = (dtype for dtype in WIRE_DTYPES if low >= 0 and high <= torch.iinfo(dtype).max)
    return routes.to(next(fits, routes.dtype))
