"""The description of a model family: all that sets it apart from others, in one object. No torch, no Megatron."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Linear:
    """A linear layer of attention, an MLP or an expert, in Hugging Face's files: `weight` [out, in], and a `bias` [out]."""

    cut: Literal["rows", "columns", "none"]
    """The side that tensor parallelism shares out in SGLang; none: every rank has it whole."""
    of: Literal["queries", "keys", "channels", "latents"]
    """Parts of the cut side: query heads, key-value heads, inner channels of an MLP; or neither, but latents."""
    stacked_in: str = ""
    """SGLang's parameter that stacks it with others, where it has none of this name."""
    place: int = 0
    """Its place there."""
    whole_blocks: bool = False
    """True if SGLang wants FP8 blocks to end with it, since another may follow in the same parameter."""
    in_one_call: bool = False
    """True if SGLang stacks inside of one call of load_weights, and forgets a part that comes alone."""


@dataclass(frozen=True)
class Stack:
    """A tensor of the files that holds a linear layer of all experts: X [experts, in, out], and X_bias [experts, out]."""

    stacked_in: str
    """SGLang's parameter."""
    channels: Literal["in", "out"]
    """The side that consists of inner channels."""
    by_turns: bool = False
    """True if gate and up of a channel are neighbors."""


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
    """The three linear layers of an expert, under these names."""
    return {
        gate: Linear("rows", "channels", "w13_weight", 0, whole_blocks=True),
        up: Linear("rows", "channels", "w13_weight", 1, whole_blocks=True),
        down: Linear("columns", "channels", "w2_weight", 0),
    }


@dataclass(frozen=True)
class Moe:
    """Layers with experts: what config.json says of them, by which keys, and the names of their weights in files."""

    experts: str = "num_experts"
    """Key: number of routed experts."""
    topk: str = "num_experts_per_tok"
    """Key: experts of a token."""
    intermediate: str = "moe_intermediate_size"
    """Key: inner size of one expert."""
    groups: str = ""
    """Key: number of groups of neighboring experts, among which a token chooses first; empty: there are none."""
    shared_size: Callable[[PreTrainedConfig], int] = lambda config: 0
    """Returns the inner size of all shared experts together."""
    layers: Callable[[PreTrainedConfig], Sequence[int]] = lambda config: range(config.num_hidden_layers)
    """Returns the layers that have experts."""
    keep_layers: Callable[[PreTrainedConfig, list[int]], dict[str, Any]] = lambda config, kept: {}
    """Returns keys of config.json that change where these layers alone are kept."""
    block: str = "mlp"
    """Module of a layer that holds router and experts."""
    router: str = "gate"
    """Module in it of the router."""
    of_router: tuple[str, ...] = ("weight",)
    """Tensors of the router, each with a row for each expert."""
    shared_experts: str = "shared_experts"
    """Module in it of the shared experts."""
    linears: Mapping[str, Linear] = field(default_factory=lambda: expert_linears("gate_proj", "up_proj", "down_proj"))
    """Linear layers of one expert, by their names in `experts.N`."""
    stacks: Mapping[str, Stack] = field(default_factory=dict)
    """Tensors of all experts, by their names in `experts`, where the files hold these."""


@dataclass(frozen=True)
class TinySizes:
    """Sizes that the tiny models of all families share; a family ignores those that it does not have."""

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
    """With yarn (gpt_oss) 32 times the length that was trained first: 131072 gives the released models' factors."""
    window: int = 8
    """Sliding window [tokens]; the released models' is 128."""
    q_lora_rank: int = 0
    """Rank of the queries' latent in multi-latent attention: 0, none, as Moonlight; DeepSeek-V3 has 1536."""

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
    """A model family. What a config.json says (sizes, numbers of experts, dense layers) is not repeated here."""

    architecture: str
    """Hugging Face's class, the entry of `architectures`."""
    model_type: str
    """Hugging Face's short name, and that of the tiny model."""
    bridge: Callable[[], type]
    """Returns the Megatron-Bridge class: names of weights, and settings. Imported when called, as it needs Megatron."""
    tiny: Callable[[TinySizes], PreTrainedConfig]
    """Config of a tiny model, for tests."""
    provider: Callable[[], type] | None = None
    """Returns Megatron-Bridge's provider class where it is not GPTModelProvider."""
    moe: Moe | None = None
    """Its experts; None: a dense model."""
    linears: Mapping[str, Linear] = field(default_factory=lambda: ATTENTION | MLP)
    """Linear layers outside of experts, by their names in files."""

    # What the layers have: weights and norms that config.json does not tell of.
    qk_norm: Literal["none", "head", "heads"] = "none"
    """Norms of queries and keys: of each head by itself, or of all heads together."""
    latent_attention: bool = False
    """True if attention is multi-latent (MLA) where config.json has kv_lora_rank."""
    qkv_bias: bool | None = None
    """True if queries, keys and values have biases; None: `attention_bias` of config.json says so."""
    bias: bool | None = None
    """True if the other linear layers, experts among them, have biases; None: `mlp_bias` of config.json says so."""
    sinks: str = ""
    """Tensor in files, beside attention's linear layers, with a learned sink for each query head; empty: there are none."""
    router_bias: bool = False
    """True if the router's product has a bias. Biases for balance are none: they are buffers."""

    # What is refused.
    rope_types: tuple[str, ...] = ("default", "yarn")
    unsupported: Callable[[PreTrainedConfig], tuple[str, str] | None] = lambda config: None
    """Returns the key of config.json that would change results without changing a tensor's name or shape, and why."""

    # What SGLang does with it.
    tied_in_sglang: bool = False
    """True if SGLang 0.5.23 heeds tie_word_embeddings."""
    served_in_folder_dtype: bool = False
    """True if SGLang 0.5.23 makes layers in the dtype of config.json, whatever --dtype says."""
    fp8_scales_lost: bool = False
    """True if SGLang loses the scales of FP8 blocks."""
    not_quantized: str = ""
    """Why `quantize` refuses the family; empty: it does not."""
    few_tokens: int = 0
    """Tokens up to which SGLang's router in bf16 is another product than for more, on GPUs of capability 9.0 and later."""
    width_from_hidden: bool = False
    """True if transformers or SGLang read a head's width off the number of heads."""
