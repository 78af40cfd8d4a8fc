"""Megatron's parallel state and small configurations for the tests of our layers; also what their ranks run."""

from __future__ import annotations

import contextlib
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from megatron_rl.platform import activate

activate()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.activations import quick_gelu  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.packed_seq_params import PackedSeqParams  # noqa: E402
from megatron.core.process_groups_config import ProcessGroupCollection  # noqa: E402, F401
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig  # noqa: E402

VOCAB = 64


@contextlib.contextmanager
def process_group():
    """gloo, from torchrun's environment, else of one process; kept by the worlds inside it."""
    if dist.is_initialized():
        yield
        return
    if "RANK" in os.environ:
        dist.init_process_group("gloo", timeout=timedelta(seconds=180))
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextlib.contextmanager
def parallel_world(tensor: int = 1, context: int = 1, expert: int = 1, expert_tensor: int = 1):
    """Megatron's groups."""
    with process_group():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor,
            context_parallel_size=context,
            expert_model_parallel_size=expert,
            expert_tensor_parallel_size=expert_tensor,
        )
        model_parallel_cuda_manual_seed(1234)
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()


COMMON: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "ffn_hidden_size": 48,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 16,
    "normalization": "RMSNorm",
    "layernorm_epsilon": 1e-6,
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": F.silu,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "use_cpu_initialization": True,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "attention_softmax_in_fp32": True,
    "params_dtype": torch.float32,
    "transformer_impl": "local",
    "init_method_std": 0.2,
}
MOE: dict[str, Any] = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 24,
    "moe_token_dispatcher_type": "alltoall",
    "moe_router_load_balancing_type": "none",
    "moe_router_dtype": "fp32",
}
FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {"qk_layernorm": True},
    "moe": MOE | {"qk_layernorm": True},
    "gpt_oss": MOE
    | {
        "softmax_type": "learnable",
        "window_size": (3, 0),
        "window_attn_skip_freq": 2,
        "add_bias_linear": True,
        "activation_func": quick_gelu,
        "activation_func_clamp_value": 0.7,
        "glu_linear_offset": 1.0,
    },
    "deepseek": MOE
    | {
        "multi_latent_attention": True,
        "num_query_groups": 4,
        "q_lora_rank": None,
        "kv_lora_rank": 8,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 6,
        "rope_type": "rope",
        "qk_layernorm": True,
        "moe_layer_freq": [0, 1],
        "moe_shared_expert_intermediate_size": 24,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_topk_scaling_factor": 2.4,
    },
}


def layer_config(family: str = "dense", **options: Any) -> TransformerConfig:
    values = COMMON | FAMILIES[family] | options
    return (MLATransformerConfig if values.get("multi_latent_attention") else TransformerConfig)(**values)


def packed_params(lengths: list[int]) -> PackedSeqParams:
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    longest = max(lengths)
    return PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def fill(module: torch.nn.Module, seed: int = 0) -> None:
    """Parameters that do not depend on the layout: drawn in the order of names."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(module.named_parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + (parameter.ndim == 1))


def gpt_model(config: TransformerConfig) -> GPTModel:
    from megatron_rl.models.spec import layer_spec

    model = GPTModel(
        config,
        layer_spec(config),
        VOCAB,
        max_sequence_length=128,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    fill(model)
    return model
