"""Names of Transformer Engine that Megatron-Bridge's LoRA module imports: classes without any instance."""

from __future__ import annotations

from types import SimpleNamespace

import torch


class Linear(torch.nn.Module):
    """Placeholder for `isinstance` tests and annotations; it is never instantiated."""

    def __init__(self, *args: object, **kwargs: object):
        raise RuntimeError("Transformer Engine is not installed")


class LayerNormLinear(Linear):
    """Placeholder that is never instantiated."""


class GroupedLinear(Linear):
    """Placeholder that is never instantiated."""


ops = SimpleNamespace(Sequential=Linear)
