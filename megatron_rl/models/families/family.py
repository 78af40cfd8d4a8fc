"""Description of a model family: one object with everything that differs between families. Needs no torch, no Megatron."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Linear:
    """A linear layer in Hugging Face's files: `weight` [out, in] and `bias` [out] of attention, an MLP or an expert."""

    cut: Literal["rows", "columns", "none"]
    """Dimension of the weight that SGLang splits for tensor parallelism; none if every rank has the whole weight."""
    of: Literal["queries", "keys", "channels", "latents"]
    """Units along the split dimension: query heads, key-value heads, inner channels of an MLP, or latents."""
    stacked_in: str = ""
    """SGLang's parameter in which the layer is stacked with others; empty if SGLang keeps the layer under its own name."""
    place: int = 0
    """Index of the layer in the parameter `stacked_in`."""
    whole_blocks: bool = False
    """True if the layer must end at an FP8 block's edge, because another layer may follow in SGLang's parameter."""
    in_one_call: bool = False
    """True if SGLang stacks the layers only within one call of load_weights, and drops a layer that is loaded alone."""


@dataclass(frozen=True)
class Stack:
    """A tensor X [experts, in, out] in the files that holds one linear layer for all experts, and X_bias [experts, out]."""

    stacked_in: str
    """SGLang's parameter that holds this tensor."""
    channels: Literal["in", "out"]
    """Dimension of the tensor that runs over the expert's inner channels."""
    by_turns: bool = False
    """True if the gate value and the up value of a channel are neighbors."""


ATTENTION = {
    "q_proj": Linear("rows", "queries", "qkv_proj", 0),
    "k_proj": Linear("rows", "keys", "qkv_proj", 1, whole_blocks=True),
    "v_proj": Linear("rows", "keys", "qkv_proj", 2, whole_blocks=True),
    "o_proj": Linear("columns", "queries"),
}
MLP = {
    "gate_proj": Linear("rows", "channels", "gate_up_proj", 0, whole_blocks=True),
    "up_proj": Linear("rows", "channels", "gate_up_proj", 1, whole_blocks=True),
    "down_proj": Linear("columns", "channels"),
}


def expert_linears(gate: str, up: str, down: str) -> dict[str, Linear]:
    """Return the three linear layers of an expert under these names."""
    return {
        gate: Linear("rows", "channels", "w13_weight", 0, whole_blocks=True),
        up: Linear("rows", "channels", "w13_weight", 1, whole_blocks=True),
        down: Linear("columns", "channels", "w2_weight", 0),
    }


@dataclass(frozen=True)
class Moe:
    """Layers with experts: the keys of config.json that describe them, and the names of their weights in files."""

    experts: str = "num_experts"
    """Key of the number of routed experts."""
    topk: str = "num_experts_per_tok"
    """Key of the number of experts per token."""
    intermediate: str = "moe_intermediate_size"
    """Key of the inner size of one expert."""
    groups: str = ""
    """Key of the number of expert groups; a token first chooses groups, then experts within them. Empty without groups."""
    shared_size: Callable[[PreTrainedConfig], int] = lambda config: 0
    """Function that returns the inner size of all shared experts together."""
    layers: Callable[[PreTrainedConfig], Sequence[int]] = lambda config: range(config.num_hidden_layers)
    """Function that returns the layers with experts."""
    keep_layers: Callable[[PreTrainedConfig, list[int]], dict[str, Any]] = lambda config, kept: {}
    """Function that returns the keys of config.json that change if only the given layers are kept."""
    block: str = "mlp"
    """Name of the module in a layer that holds router and experts."""
    router: str = "gate"
    """Name of the router's module within `block`."""
    of_router: tuple[str, ...] = ("weight",)
    """Names of the router's tensors, each with one row per expert."""
    shared_experts: str = "shared_experts"
    """Name of the shared experts' module within `block`."""
    linears: Mapping[str, Linear] = field(default_factory=lambda: expert_linears("gate_proj", "up_proj", "down_proj"))
    """Linear layers of one expert, by their names in `experts.N`."""
    stacks: Mapping[str, Stack] = field(default_factory=dict)
    """Tensors that hold all experts, by their names in `experts`; empty if the files have none."""


@dataclass(frozen=True)
class TinySizes:
    """Sizes of tiny models, common to all families. A family ignores sizes that it does not use."""

    hidden: int = 64
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    intermediate: int = 96
    """Width of a dense MLP."""
    expert_intermediate: int = 48
    experts: int = 8
    topk: int = 2
    vocab: int = 512
    max_position: int = 4096
    """Number of positions. For gpt_oss, yarn's original length is 1/32 of it; 131072 gives the released yarn parameters."""
    window: int = 8
    """Sliding window [tokens]; 128 in the released models."""
    q_lora_rank: int = 0
    """Rank of the query latents in multi-latent attention; 0 for none, as in Moonlight; 1536 in DeepSeek-V3."""

    @property
    def decoder(self) -> dict[str, Any]:
        """Keys of config.json that every decoder has."""
        return {
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "max_position_embeddings": self.max_position,
            "tie_word_embeddings": False,
        }

    @property
    def routed(self) -> dict[str, Any]:
        """Keys of config.json that most models with experts have."""
        return {"moe_intermediate_size": self.expert_intermediate, "num_experts_per_tok": self.topk}


@dataclass(frozen=True)
class Family:
    """Description of a model family, without values that config.json states (sizes, numbers of experts and dense layers)."""

    architecture: str
    """Name of Hugging Face's class, which is the entry of `architectures`."""
    model_type: str
    """Hugging Face's short name, also used for the tiny model."""
    bridge: Callable[[], type]
    """Function that returns the Megatron-Bridge class (weight names, settings). It imports Megatron when called."""
    tiny: Callable[[TinySizes], PreTrainedConfig]
    """Function that returns the config of a tiny model, for tests."""
    provider: Callable[[], type] | None = None
    """Function that returns Megatron-Bridge's provider class, if it is not GPTModelProvider."""
    moe: Moe | None = None
    """Description of the experts; None for a dense family."""
    linears: Mapping[str, Linear] = field(default_factory=lambda: ATTENTION | MLP)
    """Linear layers outside of experts, by their names in files."""

    # Parts of the layers: weights and norms that config.json does not mention.
    qk_norm: Literal["none", "head", "heads"] = "none"
    """Norms of queries and keys: none, over each head, or over all heads together."""
    latent_attention: bool = False
    """True if attention is multi-latent (MLA) when config.json has kv_lora_rank."""
    qkv_bias: bool | None = None
    """True if queries, keys and values have biases; None if `attention_bias` in config.json decides."""
    bias: bool | None = None
    """True if attention's output layer, MLPs and experts have biases; None if `mlp_bias` in config.json decides."""
    sinks: str = ""
    """Name of the attention module's tensor with one learned sink per query head; empty if there are no sinks."""
    router_bias: bool = False
    """True if the router's linear layer has a bias. Balancing biases do not count, because they are buffers."""

    # Settings that are refused.
    rope_types: tuple[str, ...] = ("default", "yarn")
    unsupported: Callable[[PreTrainedConfig], tuple[str, str] | None] = lambda config: None
    """Function that returns an unsupported key of config.json and the reason; None if the config is supported. Such a key would
    change the results, but no tensor's name or shape."""

    # Behavior of SGLang with this family.
    tied_in_sglang: bool = False
    """True if SGLang 0.5.23 respects tie_word_embeddings."""
    served_in_folder_dtype: bool = False
    """True if SGLang 0.5.23 makes layers in the dtype of config.json and ignores --dtype."""
    fp8_scales_lost: bool = False
    """True if SGLang loses the scales of FP8 blocks, because it renames the scale tensors."""
    not_quantized: str = ""
    """Reason why `quantize` refuses the family; empty if the family can be quantized."""
    few_tokens: int = 0
    """Threshold in tokens: SGLang's bf16 router uses one kernel up to this number and another kernel above it, on GPUs of
    compute capability 9.0 or higher. 0 if the router always uses the same kernel."""
    width_from_hidden: bool = False
    """True if transformers or SGLang compute a head's width from the hidden size and the number of heads."""
