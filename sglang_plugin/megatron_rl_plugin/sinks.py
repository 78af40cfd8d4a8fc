"""Attention sinks of a gpt-oss that is served in fp32, in fp32 too: SGLang keeps them in bf16, whatever --dtype says.

A sink between 4 and 8 is then up to 0.016 off, and its share of the attention by 1.6 %; what an update of the trainer adds to
it may not arrive at all.
"""

from __future__ import annotations

import torch
from torch import nn


def in_fp32(_result: None, attention: nn.Module, *_, **__) -> None:
    """Called after `GptOssAttention.__init__`, before any weight is loaded. All kernels that take fp32 take these."""
    if attention.qkv_proj.weight.dtype == torch.float32:
        attention.sinks = nn.Parameter(attention.sinks.data.float(), requires_grad=False)
