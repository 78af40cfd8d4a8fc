"""Import-only names of Transformer Engine for Megatron-Bridge's LoRA module: classes that nothing is an instance of."""

from __future__ import annotations

from types import SimpleNamespace

import torch


class Linear(torch.nn.Module):
    """Never built: stands in `isinstance` tests and annotations."""

    def __init__(self, *args: object, **kwargs: object):
        raise RuntimeError("Transformer Engine is not installed")


class LayerNormLinear(Linear):
    """Never built."""


class GroupedLinear(Linear):
    """Never built."""


ops = SimpleNamespace(Sequential=Linear)
