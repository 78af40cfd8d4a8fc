"""Which flash attention `sink_attention` calls on CUDA.

It calls torch's `_flash_attention_forward` and `_flash_attention_backward`: FlashAttention 2, which comes with torch. Where
FlashAttention 3 or 4 is installed, torch can put it in their place for the whole process.
"""

from __future__ import annotations

import importlib.util
from typing import Literal

import torch

FlashImpl = Literal["torch", "FA3", "FA4"]

MODULES = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute.interface"}
"""Where torch looks for each of them."""


def installed() -> list[str]:
    """The names that `activate` would take here, by whether their module can be found (its parents are imported)."""
    found = ["torch"]
    for name, module in MODULES.items():
        try:
            if importlib.util.find_spec(module) is not None:
                found.append(name)
        except Exception:  # the parent package is missing, or is broken
            continue
    return found


def activate(impl: FlashImpl) -> None:
    """Make `impl` what torch's flash attention is in this process. Call it once, at the start.

    Errors: ValueError where it is not installed or torch cannot take it.
    """
    if impl == "torch":
        return
    if impl not in installed():
        raise ValueError(f"{impl} is not installed (no module {MODULES[impl]}); installed: {', '.join(installed())}")
    try:
        torch.nn.attention.activate_flash_attention_impl(impl)
    except Exception as error:
        raise ValueError(f"{impl} cannot be used: {type(error).__name__}: {error}") from error
