"""Delayed scaling (fp8_delayed): what Transformer Engine remembers of earlier passes, kept apart from what passes score.

A tensor's scale is 448 (or e5m2's 57344) by its largest magnitude (amax) in the micro-batch before. Every forward raises the
amaxes, one that only scores too; the next that trains makes scales of them. Left alone, how often a model scores would move
what it learns, and one that only scores would keep the scales of its construction, which are all 1.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.fp8_utils import get_fp8_recipe
from megatron.core.transformer.transformer_config import TransformerConfig

Remembered = dict[str, dict[str, Any]]
"""Scale and amax_history of a module's forward and backward, and the number of its products; by the module's name."""
_FORWARD, _BACKWARD = "scaling_fwd", "scaling_bwd"


def calibrated(chunks: Iterable[torch.nn.Module]) -> bool:
    """True where a pass has made scales, or a checkpoint has brought them."""
    return any(True for _ in _states(chunks, _FORWARD))


def calibrate() -> None:
    """Make scales of the amaxes of the pass before, of all models; those that have seen nothing keep theirs. Collective."""
    # As Megatron imports it.
    from transformer_engine.pytorch.fp8 import FP8GlobalStateManager  # pyright: ignore[reportMissingImports]

    FP8GlobalStateManager.reduce_and_update_fp8_tensors(forward=True)


@contextmanager
def amaxes_kept(chunks: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Leave the amaxes as they were before the block, whose passes have no gradients and so move no scales."""
    before = {name: state.amax_history.clone() for name, _, state in _states(chunks, _FORWARD)}
    try:
        yield
    finally:
        with torch.no_grad():
            for name, _, state in _states(chunks, _FORWARD):
                state.amax_history.copy_(before.get(name, torch.zeros(())))


def remembered(chunks: Iterable[torch.nn.Module]) -> Remembered:
    """Copies, on the host, for a checkpoint: Transformer Engine's own are pickles, which it refuses to load."""
    found: Remembered = {}
    for key in (_FORWARD, _BACKWARD):
        for name, module, state in _states(chunks, key):
            one = found.setdefault(name, {"products": module.fp8_meta["num_gemms"]})
            one[key] = {"scale": state.scale.cpu(), "amax_history": state.amax_history.cpu()}
    return found


@torch.no_grad()
def restore(
    chunks: Iterable[torch.nn.Module], found: Mapping[str, Mapping[str, Any]], config: TransformerConfig
) -> None:
    """Give the modules what `remembered` has found, those of it that are there. config: the chunks'."""
    recipe = get_fp8_recipe(config)
    for name, module in _modules(chunks):
        if name not in found:
            continue
        module.fp8_meta.update(num_gemms=found[name]["products"], recipe=recipe)
        module.init_fp8_meta_tensors(recipe)
        for key in (_FORWARD, _BACKWARD):
            for what, tensor in found[name][key].items():
                getattr(module.fp8_meta[key], what).copy_(tensor)


def _modules(chunks: Iterable[torch.nn.Module]) -> Iterator[tuple[str, Any]]:
    for number, chunk in enumerate(chunks):
        for name, module in chunk.named_modules():
            if hasattr(module, "fp8_meta"):
                yield f"{number}.{name}", module


def _states(chunks: Iterable[torch.nn.Module], key: str) -> Iterator[tuple[str, Any, Any]]:
    """(name, module, state) of the modules that have remembered something."""
    for name, module in _modules(chunks):
        state = module.fp8_meta.get(key)
        if hasattr(state, "amax_history"):
            yield name, module, state
