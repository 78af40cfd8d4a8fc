"""With `precision.identical`, gives a served model the trainer's operators, so that both sides' results are equal bit for bit.

`identical.load` imports `ops/batch_invariant.py` of the trainer's package by its path. After SGLang has built a model, the
matching operators in this file replace the forward functions of its modules. A module with weights but without a matching
operator stops the server, because its results would differ.
"""

from __future__ import annotations

import sys
from functools import cache, partial
from typing import Any

import torch
from sglang.srt.layers.activation import SiluAndMul
from sglang.srt.layers.layernorm import RMSNorm
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.logits_processor import LogitsProcessor
from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE
from sglang.srt.layers.moe.topk import StandardTopKOutput, TopK, capture_routed_experts_if_allowed
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.layers.rotary_embedding import RotaryEmbedding
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA
from torch import Tensor, nn

from megatron_rl_plugin.identical import OPERATORS

ops: Any = sys.modules[OPERATORS]


@cache
def replace_softmax() -> Any:
    """Replace torch's softmax and log-softmax on the CPU in this process. The returned object keeps the replacement alive."""
    library = torch.library.Library("aten", "IMPL")

    def rows(function, original, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
        if x.dtype == torch.float32 and x.dim() == 2 and dim in (-1, 1):
            return function(x)
        return original(x, dim, half_to_float, out=torch.empty(0, dtype=torch.float32 if half_to_float else x.dtype))

    for name, function in (("_softmax", ops.softmax), ("_log_softmax", ops.log_softmax)):
        library.impl(name, partial(rows, function, getattr(torch.ops.aten, name).out), "CPU")
    return library


def make_identical(model: nn.Module, config: dict[str, Any], dtype: torch.dtype) -> None:
    """Replace the operator of each module by the trainer's. config: content of config.json. Errors: NotImplementedError."""
    rotary = ops.Rotary.of(config)
    gates = {id(gate) for block in model.modules() if (gate := _gate_of(block)) is not None}
    rotated = set()
    real = real_widths(config)
    for name, module in model.named_modules():
        if id(module) in gates:
            module.forward = partial(gate_forward, module, returns_bias=isinstance(module, LinearBase))
        elif isinstance(module, DeepseekV2AttentionMLA):
            table = ops.Rotary.table(rotary, config["max_position_embeddings"], dtype)
            module.forward = partial(mla_forward, module, table)
        elif isinstance(module, LinearBase):
            module.quant_method = Product(real.get(module.input_size) if name.endswith(".down_proj") else None)
        elif isinstance(module, RMSNorm):
            module.forward = partial(norm_forward, module)
        elif isinstance(module, RotaryEmbedding):
            if id(module) not in rotated:
                table = ops.Rotary.table(rotary, config["max_position_embeddings"], dtype)
                module.forward = partial(rotary_forward, module, table)
                rotated.add(id(module))
        elif isinstance(module, SiluAndMul):
            module.forward = gated_forward
        elif isinstance(module, TopK):
            module.forward = partial(topk_forward, module, routing_of(module.topk_config))
        elif isinstance(module, FusedMoE):
            module.forward = partial(experts_forward, module, real.get(module.w2_weight.shape[2]))
        elif isinstance(module, RadixAttention):
            module.attend = ops.attention
        elif isinstance(module, LogitsProcessor):
            module._compute_lm_head = head_forward
            module.input_logprob_processor.enable_fast_input_logprobs = False  # by log-softmax, as for sampled tokens
        elif isinstance(module, VocabParallelEmbedding):
            pass  # only copies rows
        elif own := [parameter for parameter, _ in module.named_parameters(recurse=False) if parameter != "sinks"]:
            raise NotImplementedError(
                f"precision.identical: {name}.{own[0]}: the trainer has no operator for a {type(module).__name__}"
            )
        if hasattr(module, "routed_scaling_factor"):
            module.routed_scaling_factor = 1.0  # included in the router's weights, as in Megatron


def real_widths(config: dict[str, Any]) -> dict[int, int]:
    """Return {padded MLP width: the model's own width}. SGLang pads widths on a CPU and keeps both in its config."""
    names = ("moe_intermediate_size", "intermediate_size")
    padded = {config[name]: config[f"original_{name}"] for name in names if config.get(f"original_{name}")}
    shared = config.get("n_shared_experts") or 1  # shared experts are one MLP of this many widths
    return padded | {shared * wide: shared * own for wide, own in padded.items()}


def _gate_of(block: nn.Module) -> nn.Module | None:
    """Return the router's linear layer if the block has experts; else None."""
    if not hasattr(block, "topk") or not hasattr(block, "experts"):
        return None
    return getattr(block, "gate", None) or getattr(block, "router", None)


class Product(UnquantizedLinearMethod):
    """The trainer's matrix multiplication for a linear layer of SGLang.

    width: number of inputs without padding; None: no padding.
    """

    def __init__(self, width: int | None = None) -> None:
        self.width = width

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute a linear layer: x [T, K] -> [T, N]."""
        out = ops.linear(x[..., : self.width], layer.weight[:, : self.width])
        return out if bias is None else out + bias


def gate_forward(gate: nn.Module, x: Tensor, *_, returns_bias: bool, **__) -> Any:
    """Compute the router's logits: [T, d] -> [T, E] in fp32."""
    logits, bias = ops.linear(x, gate.weight, dtype=torch.float32), getattr(gate, "bias", None)
    logits = logits if bias is None else logits + bias.float()
    return (logits, None) if returns_bias else logits


def norm_forward(norm: nn.Module, x: Tensor, residual: Tensor | None = None, *_, **__) -> Any:
    """Return the norm of x. With a residual, return the norm of x + residual, and this sum, rounded as in the trainer."""
    weight, eps = norm.weight, norm.variance_epsilon
    if residual is None:
        return ops.rms_norm(x, weight, eps)
    residual = residual + x
    return ops.rms_norm(residual, weight, eps), residual


def rotary_forward(
    rotary: nn.Module, table: tuple[Tensor, Tensor], positions: Tensor, query: Tensor, key: Tensor, *_, **__
) -> tuple[Tensor, Tensor]:
    """Apply rotary embeddings to query and key [T, heads * head_size]."""
    cosines, sines = (t.index_select(0, positions.flatten()) for t in table)

    def rotate(x: Tensor) -> Tensor:
        heads = x.reshape(len(positions), -1, rotary.head_size)
        turned = ops.rotate(heads[..., : rotary.rotary_dim], cosines, sines)
        return torch.cat((turned, heads[..., rotary.rotary_dim :]), dim=-1).view(x.shape)

    return rotate(query), rotate(key)


def mla_forward(
    mla: nn.Module, table: tuple[Tensor, Tensor], positions: Tensor, hidden_states: Tensor, forward_batch: Any, **_
) -> Tensor:
    """Compute multi-latent attention over the cached latents: [T, d] -> [T, d]."""
    if mla.q_lora_rank is not None:
        both, _ = mla.fused_qkv_a_proj_with_mqa(hidden_states)
        query, latent = both.split([mla.q_lora_rank, mla.kv_lora_rank + mla.qk_rope_head_dim], dim=-1)
        query, _ = mla.q_b_proj(mla.q_a_layernorm(query))
    else:
        query, _ = mla.q_proj(hidden_states)
        latent, _ = mla.kv_a_proj_with_mqa(hidden_states)
    content, rotated = query.view(len(query), -1, mla.qk_head_dim).split(
        [mla.qk_nope_head_dim, mla.qk_rope_head_dim], dim=-1
    )
    latent, key = latent.split([mla.kv_lora_rank, mla.qk_rope_head_dim], dim=-1)
    latent = mla.kv_a_layernorm(latent.contiguous())[:, None]
    angles = [t.index_select(0, positions.flatten()) for t in table]
    rotated, key = (ops.rotate(ops.half_by_half(x), *angles) for x in (rotated, key[:, None]))
    up = mla.kv_b_proj.weight.view(rotated.shape[1], -1, mla.kv_lora_rank)
    up_key, up_value = up.split([mla.qk_nope_head_dim, mla.v_head_dim], dim=1)
    query = torch.cat((ops.by_head(content, up_key.transpose(1, 2)), rotated), dim=-1)
    means = mla.attn_mqa(query, torch.cat((latent, key), dim=-1), latent, forward_batch)
    out = ops.by_head(means.view(len(means), -1, mla.kv_lora_rank), up_value)
    out, _ = mla.o_proj(out.flatten(1))
    return out


def gated_forward(x: Tensor, *_, **__) -> Tensor:
    """Compute the gated activation: [T, 2 F] -> [T, F]."""
    return ops.Gate()(*(half.contiguous() for half in x.chunk(2, dim=-1)))


def routing_of(config: Any) -> Any:
    """Return the trainer's routing rule for SGLang's config of a router.

    Errors: NotImplementedError for an unsupported rule.
    """
    if config.custom_routing_function is not None or config.scoring_func not in ("softmax", "sigmoid"):
        raise NotImplementedError(
            f"precision.identical: a router with scores of the kind '{config.scoring_func}' is not supported"
        )
    if config.scoring_func == "sigmoid" and not config.renormalize and config.top_k > 1:
        raise NotImplementedError("precision.identical: sigmoid scores that are not normalized are not supported")
    return ops.Routing(
        topk=config.top_k,
        scores=config.scoring_func,
        over_all=not config.renormalize,
        groups=config.num_expert_group or 1,
        group_topk=config.topk_group or 1,
        scale=config.routed_scaling_factor or 1.0,
    )


def topk_forward(topk: nn.Module, rule: Any, hidden: Tensor, router_logits: Tensor, **_) -> Any:
    """Choose experts: router logits [T, E] -> gates and expert ids [T, k]."""
    bias = topk.topk_config.correction_bias
    ids = rule.choose(rule.scores_of(router_logits, bias))
    weights = rule.weights(router_logits, ids)
    capture_routed_experts_if_allowed(topk.topk_config, topk.layer_id, ids.int())
    return StandardTopKOutput(weights, ids.int(), router_logits)


def experts_forward(layer: nn.Module, width: int | None, x: Tensor, topk_output: Any, **_) -> Tensor:
    """Compute the chosen experts and sum their outputs: [T, d] -> [T, d]."""
    weights, ids = topk_output.topk_weights, topk_output.topk_ids.long()
    config, topk = layer.moe_runner_config, ids.shape[1]
    experts, order = ids.reshape(-1).sort(stable=True)
    counts = torch.bincount(experts, minlength=layer.w13_weight.shape[0]).tolist()
    alpha = config.gemm1_alpha
    gate = ops.Gate() if alpha is None else ops.Gate(slope=alpha, limit=config.gemm1_clamp_limit, offset=1.0)
    out = ops.experts(
        x[order // topk],
        counts,
        weights.reshape(-1, 1)[order],
        gate,
        (layer.w13_weight.unbind(), getattr(layer, "w13_weight_bias", None)),
        (layer.w2_weight.unbind(), getattr(layer, "w2_weight_bias", None)),
        interleaved=alpha is not None,
        width=width,
    )
    # Sum the rows of a token in order of rising expert. Rows are sorted by expert, so this is the order of rising row index.
    places = order.argsort().view(-1, topk).sort(dim=1).values
    return ops.combine(out, places)


def head_forward(hidden: Tensor, head: nn.Module, embedding_bias: Tensor | None = None, **_) -> Tensor:
    """Compute the output head: hidden states [T, d] -> logits [T, V] in fp32."""
    logits = ops.linear(hidden, head.weight, dtype=torch.float32)
    return logits if embedding_bias is None else logits + embedding_bias
