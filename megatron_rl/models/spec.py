"""The layer spec: the modules from which Megatron builds a transformer layer."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.extensions.transformer_engine import HAVE_TE
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLPSubmodules
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.models.attention import CoreAttention, HeadsNormSelfAttention, MLASelfAttention, SelfAttention
from megatron_rl.models.experts import GroupedExperts
from megatron_rl.models.identical_layers import make_batch_invariant
from megatron_rl.models.moe import ExpertMoELayer
from megatron_rl.models.norm import RMSNorm
from megatron_rl.models.router import ReplayRouter, ReplayTransformerLayer
from megatron_rl.ops.batch_invariant import Rotary
from megatron_rl.ops.flash import FlashImpl

_MOE = {"pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_"}
_LATENT = {
    "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
}
"""Checkpoint names of Transformer Engine's norms -> names in local layers, so that each kind of layer can load the checkpoints
of the other kind."""


def layer_spec(
    config: TransformerConfig,
    vp_stage: int | None = None,
    *,
    ignore_sinks: bool = False,
    flash_attention: FlashImpl = "torch",
    plain: bool = False,
    rotary: Rotary | None = None,
    norms_over_all_heads: bool = False,
) -> TransformerBlockSubmodules:
    """Return the spec of this stage's layers: dense or MoE (config.moe_layer_freq), with plain or multi-latent attention.

    Use this function as `provider.transformer_layer_spec` of Megatron-Bridge, or its result as
    `GPTModel(transformer_layer_spec=...)`. If CUDA and Transformer Engine are available, the result is Megatron's Transformer
    Engine spec, else Megatron's local spec with our norms and experts. Both use `CoreAttention`.

    ignore_sinks, flash_attention: see `CoreAttention`. plain: always use the local spec. rotary: make the layers
    batch-invariant, with this rotary embedding; needs the local spec. norms_over_all_heads: norms of queries and keys run over
    all heads, as in OLMoE (`Family.qk_norm`).
    """
    fast = HAVE_TE and torch.cuda.is_available() and not plain
    block = get_gpt_decoder_block_spec(config, fast, normalization="RMSNorm", qk_l2_norm=False, vp_stage=vp_stage)
    options = {"ignore_sinks": ignore_sinks, "flash_attention": flash_attention}
    core = ModuleSpec(module=CoreAttention, params=options)
    layers: list[Any] = block.layer_specs or []  # ModuleSpecs; Megatron does not type their submodules
    for layer in {id(spec): spec for spec in layers}.values():
        layer.module = ReplayTransformerLayer
        layer.submodules.mlp = _with_our_router(layer.submodules.mlp)
        _set_attention(layer.submodules.self_attention, config, fast, core, norms_over_all_heads)
        if fast:
            layer.submodules.sharded_state_dict_keys_map |= _LATENT if config.multi_latent_attention else _MOE
        else:
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
            _set_experts(layer.submodules.mlp)
    if not fast:
        block.layer_norm = RMSNorm
    if rotary is not None:
        make_batch_invariant(block, rotary)
    return block


def _set_attention(attention: Any, config: Any, fast: bool, core: ModuleSpec, norms_over_all_heads: bool) -> None:
    attention.submodules.core_attention = core
    if config.multi_latent_attention:
        attention.module = MLASelfAttention
        if not fast:
            norm = RMSNorm if config.qk_layernorm else IdentityOp
            attention.submodules.kv_layernorm = norm
            attention.submodules.q_layernorm = norm if config.q_lora_rank else IdentityOp
        return
    attention.module = HeadsNormSelfAttention if norms_over_all_heads else SelfAttention
    if config.qk_layernorm and not fast:
        attention.submodules.q_layernorm = attention.submodules.k_layernorm = RMSNorm


def _with_our_router(mlp: partial) -> partial:
    if mlp.func is not MoELayer:
        return mlp
    mlp.keywords["submodules"].router = ReplayRouter
    return partial(ExpertMoELayer, *mlp.args, **mlp.keywords)


def _set_experts(mlp: partial) -> None:
    submodules = mlp.keywords["submodules"]
    if hasattr(submodules, "experts"):
        linear = MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
        submodules.experts = partial(GroupedExperts, submodules=linear)
