"""Checkpoints are read without what layers store beside their weights, and so fit Transformer Engine's layers and local ones.

Local layers have nothing. Transformer Engine's have objects by names that local layers lack, and with delayed scaling these are
pickles, which they refuse to load; `delayed_scaling` keeps their contents.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

_NAME = "._extra_state"


def without_extra_state(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """A state dict, or one of several, to be read into: what is left are weights, buffers and whatever is no layer's."""
    return {
        name: without_extra_state(part) if isinstance(part, dict) else part
        for name, part in state.items()
        if not (isinstance(name, str) and _NAME in name)
    }


def load_weights(module: torch.nn.Module, weights: Mapping[str, Any], *, strict: bool = True) -> Any:
    """As module.load_state_dict, of weights and buffers alone. Errors: RuntimeError naming keys that are lost, if strict."""
    # Not torch's own strictness: wrapped layers name what they store in one way and ask for it in another.
    found = module.load_state_dict(without_extra_state(weights), strict=False)
    missing, unexpected = ([key for key in keys if _NAME not in key] for keys in found)
    if strict and (missing or unexpected):
        raise RuntimeError(f"{type(module).__name__}: missing keys {missing[:5]}, unexpected keys {unexpected[:5]}")
    return type(found)(missing, unexpected)
