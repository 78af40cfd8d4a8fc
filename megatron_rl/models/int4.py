"""Weights in INT4, as SGLang loads them: compressed-tensors' `pack-quantized`, symmetric, one scale for 128 inputs of a row.

`X.weight_packed` int32 [N, K / 8] has eight codes a number, the first in the lowest four bits, each with 8 added;
`X.weight_scale` bf16 [N, K / 128]; `X.weight_shape` int64 [2] = [N, K]. A weight is code * scale, codes are -8 to 7.
ModelOpt's own INT4 export packs for TensorRT-LLM, which SGLang 0.5.23 does not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

GROUP = 128
HIGHEST = 7
"""The largest code, for which a group's amax stands; the lowest is -8."""
_PACKED = 8
"""Codes of one int32."""
_TINY = 2.0**-24


def scales(amax: Tensor) -> Tensor:
    """Of groups whose largest magnitude is amax: bf16, the type in which SGLang holds them; 1 for a group of zeros."""
    return torch.where(amax > _TINY, amax.float() / HIGHEST, 1.0).bfloat16()


def encode(weight: Tensor, scale: Tensor) -> Tensor:
    """The nearest codes of a weight [N, K] for scales [N, K / 128]: int8 [N, K]."""
    # By the inverse, as ModelOpt has it: where weights and scales are bf16, ties are many.
    groups = weight.float().unflatten(-1, (-1, GROUP)) * (1 / scale.float()[..., None])
    return groups.round().clamp(-HIGHEST - 1, HIGHEST).to(torch.int8).flatten(-2)


def pack(codes: Tensor) -> Tensor:
    """Codes int8 [N, K] as int32 [N, K / 8]."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    words = (codes.int() + HIGHEST + 1).unflatten(-1, (-1, _PACKED)) << shifts
    return words.sum(-1, dtype=torch.int32)  # the bits do not overlap; the eighth code may set the sign


def unpack(packed: Tensor) -> Tensor:
    """The inverse of pack."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32)
    return ((packed[..., None] >> shifts & 15) - HIGHEST - 1).to(torch.int8).flatten(-2)


def dequantize(packed: Tensor, scale: Tensor) -> Tensor:
    """The weight fp32 [N, K] that codes and scales stand for."""
    return (unpack(packed).float().unflatten(-1, (-1, GROUP)) * scale.float()[..., None]).flatten(-2)


def quantized(
    named_tensors: Iterable[tuple[str, Tensor]], scales_of: Callable[[str, int], Tensor | None]
) -> Iterator[tuple[str, Tensor]]:
    """Yield a model's tensors, X.weight as three. scales_of: name and columns -> scales; None: the tensor stays."""
    for name, tensor in named_tensors:
        scale = scales_of(name, tensor.shape[-1])
        if scale is None:
            yield name, tensor
            continue
        module = name.removesuffix(".weight")
        yield f"{module}.weight_packed", pack(encode(tensor, scale))
        yield f"{module}.weight_scale", scale
        yield f"{module}.weight_shape", torch.tensor(tensor.shape)


def quantization_config(ignore: list[str]) -> dict:
    """The `quantization_config` of config.json. ignore: names of linear layers that are not quantized, or re:PATTERN."""
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP}
    group = {"targets": ["Linear"], "weights": weights | {"dynamic": False, "observer": "minmax"}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group | {"input_activations": None, "output_activations": None}},
        "ignore": ignore,
        "kv_cache_scheme": None,
    }
