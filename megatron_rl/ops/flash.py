"""Which flash attention computes bf16 attention on CUDA, and what each takes.

torch's `_flash_attention_forward` and `_flash_attention_backward` are FlashAttention 2, which comes with torch. Where
FlashAttention 3 is installed, torch can put it in their place for the whole process. FlashAttention 4 (the package
flash-attn-4) is called directly (`ops/flash_attention_4.py`): it has windows and sinks of its own, forward and backward.
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
"""Modules in which they are; torch looks for FlashAttention 3 itself."""

_WIDEST = {9: 256, 10: 128}
"""FlashAttention 4: widest heads by the first number of the compute capability, where sinks and windows have gradients."""


def installed() -> list[str]:
    """The names that can be chosen here, by whether their module can be found (its parents are imported)."""
    return ["torch", *(name for name in MODULES if _is_there(name))]


@dataclass(frozen=True)
class Heads:
    """Attention heads, as far as kernels differ in which they take."""

    width: int
    """Numbers of a query and of a key."""
    value_width: int
    grouped: bool
    """Several query heads share a key head."""


def takes(impl: Literal["torch", "FA4"], dtype: torch.dtype, heads: Heads, capability: tuple[int, int]) -> bool:
    """True where it computes such heads, forward and backward, on a GPU of this compute capability."""
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
    """The one that computes these heads when `asked` is the config's; None: none does. FlashAttention 3 counts as torch's."""
    if asked in ("auto", "FA4") and takes("FA4", dtype, heads, capability) and _is_there("FA4"):
        return "FA4"
    return "torch" if takes("torch", dtype, heads, capability) else None


def activate(asked: FlashImpl, capability: tuple[int, int] | None) -> Literal["torch", "FA3", "FA4"]:
    """Have what is asked for ready in this process, whose GPU has this compute capability (None: no GPU). Once, at the start.

    Returns the one that computes heads which it takes. Errors: ValueError where it is not installed, cannot be imported or
    does not run on this GPU.
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
        return not MODULES[name].startswith(str(error.name))  # one that it needs: it is there and broken
    except Exception:  # broken too, which `activate` says
        return True
