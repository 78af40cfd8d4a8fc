"""SGLang plugin for test_quantized_server.py: products of per-tensor FP8 and of INT4 weights in plain torch.

SGLang's own config classes, layers and loaders read the folder; what is replaced are kernels that exist for GPUs alone:
the quantization of a tensor to e4m3, both linear products, Marlin's repacking, and both products of experts. They take fp32
too, so that nothing but the weights and what is rounded on purpose makes a difference.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from compressed_tensors.compressors.pack_quantized.helpers import unpack_from_int32

E4M3 = torch.float8_e4m3fn


def to_e4m3(x, scale, **_):
    return (x.float() / scale).clamp(-448, 448).to(E4M3), scale


def rounded(x, scale):
    return to_e4m3(x, scale)[0].float() * scale


def fp8_linear(self, layer, x, bias=None):
    out = rounded(x, layer.input_scale) @ (layer.weight.float() * layer.weight_scale)  # [K, N]
    return (out if bias is None else out + bias).to(x.dtype)


def experts(dispatch_output, w13, w2, round13, round2):
    """The sum over a token's experts of weight * down(silu(gate) * up). w13 [E, 2 I, H], w2 [E, H, I]."""
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput

    x, (weights, ids, *_) = dispatch_output.hidden_states, dispatch_output.topk_output
    out = torch.zeros_like(x, dtype=torch.float32)
    for expert in range(len(w13)):
        token, place = torch.where(ids == expert)
        gate, up = (round13(x[token].float()) @ w13[expert].float().T).chunk(2, -1)
        down = round2(F.silu(gate) * up) @ w2[expert].float().T
        out.index_add_(0, token, down * weights[token, place, None].float())
    return StandardCombineInput(hidden_states=out.to(x.dtype))


def fp8_experts(self, layer, dispatch_output):
    return experts(
        dispatch_output,
        layer.w13_weight.float() * layer.w13_weight_scale[:, None, None],
        layer.w2_weight.float() * layer.w2_weight_scale[:, None, None],
        lambda x: rounded(x, layer.w13_input_scale),
        lambda x: rounded(x, layer.w2_input_scale),
    )


def int4(packed, scale, group_size):
    """fp32 [N, K] of int32 [N, K / 8] and scales [N, K / group_size]."""
    codes = unpack_from_int32(packed, 4, torch.Size((packed.shape[0], packed.shape[1] * 8)))
    return (codes.float().unflatten(1, (-1, group_size)) * scale.float()[..., None]).flatten(1)


def int4_linear_loaded(self, layer):
    assert layer.weight_packed.shape[1] * 8 == self.kernel_config.partition_weight_shape[0]
    layer.dense = int4(layer.weight_packed.data, layer.weight_scale.data, self.group_size)


def int4_linear(self, layer, x, bias=None):
    out = x.float() @ layer.dense.T
    return (out if bias is None else out + bias).to(x.dtype)


def int4_experts_loaded(self, layer):
    # The loader has transposed each expert's tensors.
    for name in ("w13", "w2"):
        packed, scale = getattr(layer, f"{name}_weight_packed"), getattr(layer, f"{name}_weight_scale")
        dense = [int4(p.T.contiguous(), s.T, self.group_size) for p, s in zip(packed.data, scale.data, strict=True)]
        setattr(layer, f"{name}_dense", torch.stack(dense))


def int4_experts(self, layer, dispatch_output):
    return experts(dispatch_output, layer.w13_dense, layer.w2_dense, lambda x: x, lambda x: x)


def without_runner(self, layer, config):
    from sglang.srt.layers.moe import MoeRunnerBackend

    self.runner, self._moe_runner_backend = None, MoeRunnerBackend.TRITON


def install() -> None:
    from sglang.srt.layers.quantization import modelopt_quant, utils
    from sglang.srt.layers.quantization.compressed_tensors import compressed_tensors, schemes

    utils.scaled_fp8_quant = modelopt_quant.scaled_fp8_quant = to_e4m3
    modelopt_quant.ModelOptFp8LinearMethod.apply = fp8_linear
    modelopt_quant.ModelOptFp8MoEMethod.create_moe_runner = without_runner
    modelopt_quant.ModelOptFp8MoEMethod.apply = fp8_experts
    for config in (modelopt_quant.ModelOptFp8Config, compressed_tensors.CompressedTensorsConfig):
        config.get_supported_act_dtypes = classmethod(lambda cls: [torch.float32])
    compressed_tensors.CompressedTensorsConfig._check_scheme_supported = lambda *_, **__: True  # asks for the GPU
    linear = schemes.CompressedTensorsWNA16
    linear.process_weights_after_loading, linear.apply_weights = int4_linear_loaded, int4_linear
    for moe in (schemes.CompressedTensorsWNA16MoE, schemes.CompressedTensorsWNA16TritonMoE):
        moe.create_moe_runner, moe.process_weights_after_loading = without_runner, int4_experts_loaded
        moe.apply_weights, moe.get_moe_runner_backend = int4_experts, lambda self, layer: None
