"""The description of a model family: all that sets it apart from others, in one object. No torch, no Megatron."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from transformers import PreTrainedConfig


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

    # What the layers have: weights and norms that config.json does not tell of.
    qk_norm: Literal["none", "head", "heads"] = "none"
    """Norms of queries and keys: of each head by itself, or of all heads together."""
    latent_attention: bool = False
    """True if attention is multi-latent (MLA) where config.json has kv_lora_rank."""
    qkv_bias: bool | None = None
    """True if queries, keys and values have biases; None: `attention_bias` of config.json says so."""
    bias: bool | None = None
    """True if the other linear layers, experts among them, have biases; None: `mlp_bias` of config.json says so."""
    sinks: bool = False
    """True if attention has a learned sink for each head."""
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

    # Names of weights in files.
    renamed: Mapping[str, str] = field(default_factory=dict)
    """Parts of names in files -> in transformers."""
    fused: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Modules that SGLang stacks in one parameter beyond the usual ones: name -> parameter and order."""
    fused_experts: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """Modules of an expert, beyond the usual names -> SGLang's parameter and order."""
