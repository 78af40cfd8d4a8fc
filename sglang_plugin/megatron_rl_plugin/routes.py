"""Sends each expert id of a route in one or two bytes between processes and by HTTP. SGLang itself sends four bytes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

WIRE_DTYPES = (torch.uint8, torch.int16)
"""Dtypes of the routes in a reply, smallest first."""


def compact(routes: Tensor, capturer: Any = None, *_, **__) -> Tensor:
    """Convert routes [rows, layers, topk] int32 to one byte per id if all ids are below 256, else to two bytes.

    The receiver infers the dtype from the number of bytes. If routes contain values other than expert ids (negative numbers, or
    gates), they are not converted. SGLang calls this hook after reading the rows of a finished request from its buffer. It then
    sends the bytes of the returned tensor.
    """
    if not routes.numel() or getattr(capturer, "with_gates", False):
        return routes
    low, high = (int(bound) for bound in routes.aminmax())
    fits = (dtype for dtype in WIRE_DTYPES if low >= 0 and high <= torch.iinfo(dtype).max)
    return routes.to(next(fits, routes.dtype))
