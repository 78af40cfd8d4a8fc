"""Choice of the flash attention for bf16 on CUDA, and the limits of each implementation.

torch's `_flash_attention_forward` and `_flash_attention_backward` are FlashAttention 2, which comes with torch. If
FlashAttention 3 is installed, torch can replace both functions by it for the whole process. FlashAttention 4 (the package
flash-attn-4) is called directly (`ops/flash_attention_4.py`); it supports windows and sinks, forward and backward.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
from dataclasses import dataclass
from typing import Literal

import torch

FlashImpl = Literal["auto", "torch", "FA3", "FA4"]

MODULES = {"FA3": "flash_attn_interface", "FA4": "flash_attn.cute.interface"}
"""Module of each implementation. torch itself imports FlashAttention 3."""

_WIDEST = {9: 256, 10: 128}
"""Major compute capability -> largest head width for which FlashAttention 4 has gradients with sinks and windows."""


def installed() -> list[str]:
    """Return the implementations whose module can be found here. The search imports the parent packages."""
    return ["torch", *(name for name in MODULES if _is_there(name))]


@dataclass(frozen=True)
class Heads:
    """Properties of attention heads that decide which kernel supports them."""

    width: int
    """Number of elements of a query and of a key."""
    value_width: int
    """Number of elements of a value."""
    grouped: bool
    """True if several query heads share a key head."""


def takes(impl: Literal["torch", "FA4"], dtype: torch.dtype, heads: Heads, capability: tuple[int, int]) -> bool:
    """Return True if `impl` supports these heads, forward and backward, on a GPU of this compute capability."""
    width, value_width = heads.width, heads.value_width
    if dtype != torch.bfloat16 or width % 8 or value_width > width:
        return False
    if impl == "torch":
        return width <= 256 and capability >= (8, 0)
    if value_width % 8 or (heads.grouped and value_width != width):
        return False
    widest = _WIDEST.get(capability[0], 0)
    return width <= widest or (capability[0] == 10 and (width, value_width) == (192, 128))


def choose(
    asked: FlashImpl, dtype: torch.dtype, heads: Heads, capability: tuple[int, int]
) -> Literal["torch", "FA4"] | None:
    """Return the implementation for these heads, given the config's choice `asked`; None if no implementation supports them.

    FlashAttention 3 counts as "torch".
    """
    if asked in ("auto", "FA4") and takes("FA4", dtype, heads, capability) and _is_there("FA4"):
        return "FA4"
    return "torch" if takes("torch", dtype, heads, capability) else None


def activate(asked: FlashImpl, capability: tuple[int, int] | None) -> Literal["torch", "FA3", "FA4"]:
    """Activate the implementation `asked` in this process, once at the start, and return the chosen implementation.

    capability: compute capability of the GPU; None without a GPU. Errors: ValueError if the implementation is not installed,
    cannot be imported or does not run on this GPU.
    """
    if asked in MODULES and asked not in installed():
        raise ValueError(f"{asked} is not installed (no module {MODULES[asked]}); installed: {', '.join(installed())}")
    if asked == "FA4" and capability is not None and capability[0] not in _WIDEST:
        runs_on = " and ".join(f"{major}.x" for major in _WIDEST)
        raise ValueError(f"FA4 runs on compute capabilities {runs_on}, this GPU has {'.'.join(map(str, capability))}")
    usable = capability is not None and capability[0] in _WIDEST and _is_there("FA4")
    chosen = ("FA4" if usable else "torch") if asked == "auto" else asked
    try:
        if chosen == "FA3":
            torch.nn.attention.activate_flash_attention_impl(chosen)
        elif chosen == "FA4" and usable:
            importlib.import_module(MODULES[chosen])
    except Exception as error:
        raise ValueError(f"{chosen} cannot be used: {type(error).__name__}: {error}") from error
    return chosen


@functools.cache
def _is_there(name: str) -> bool:
    try:
        return importlib.util.find_spec(MODULES[name]) is not None
    except ModuleNotFoundError as error:
        return not MODULES[name].startswith(str(error.name))  # a dependency is missing: installed but broken
    except Exception:  # also broken; `activate` reports it
        return True
