"""Keeps the attention sinks of gpt-oss in fp32 if the model is served in fp32; SGLang keeps them in bf16 for every --dtype.

In bf16, rounding changes a sink between 4 and 8 by up to 0.016, and its share of the attention by up to 1.6 %. Rounding may
also cancel the small change of a trainer's update completely.
"""

from __future__ import annotations

import torch
from torch import nn


def in_fp32(_result: None, attention: nn.Module, *_, **__) -> None:
    """Make the sinks fp32 (hook after `GptOssAttention.__init__`, before weights are loaded).

    All fp32 kernels accept fp32 sinks.
    """
    if attention.qkv_proj.weight.dtype == torch.float32:
        attention.sinks = nn.Parameter(attention.sinks.data.float(), requires_grad=False)
