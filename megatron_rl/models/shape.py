"""Numbers of parameters of a model, from its config.json: every weight as Megatron stores it, unsplit and on one rank.

The module only does arithmetic, for all supported families. `tests/models/test_sizes.py` compares the counts with Megatron's
own modules and with transformers.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from transformers import PreTrainedConfig

from megatron_rl.config import LoRAConfig, ParallelConfig
from megatron_rl.config.plan import expert_tensor_size
from megatron_rl.errors import UserError
from megatron_rl.models.families import (
    architecture,
    expert_count,
    expert_intermediate,
    family_of,
    is_classifier,
    moe_layers,
)
from megatron_rl.models.freeze import ADAPTER, EMBEDDING, HEAD, is_frozen, is_target

if TYPE_CHECKING:  # plans are made without torch
    import torch

    from megatron_rl.data.engine_routes import EngineFeatures, EngineRoutes

Part = Literal["attention", "mlp", "router", "experts", "norm", "embedding", "head"]


@dataclass(frozen=True)
class Weight:
    """One parameter of the model, or one of `copies` parameters of the same shape (experts)."""

    part: Part
    shape: tuple[int, ...]
    name: str
    """Megatron's name without Transformer Engine (`models.freeze`), with * for the numbers of experts."""
    cut: bool = False
    """True if tensor parallelism splits the weight (expert tensor parallelism for experts); else every rank has all of it.
    """
    copies: int = 1
    """Number of experts that have such a parameter; expert parallelism divides the experts among ranks."""

    @property
    def size(self) -> int:
        """Number of elements over all copies."""
        return math.prod(self.shape) * self.copies

    @property
    def is_matrix(self) -> bool:
        """True if a linear layer multiplies by the weight. FP8 may store such a weight."""
        return len(self.shape) > 1 and self.part in ("attention", "mlp", "experts")

    def on_rank(self, parallel: ParallelConfig) -> Weight:
        """Return one rank's part of the weight in its pipeline stage, as one flat vector per copy."""
        experts = self.part == "experts"
        ranks = expert_tensor_size(parallel) if experts else parallel.tensor
        size = math.prod(self.shape) // (ranks if self.cut else 1)
        matrix = (size, 1) if len(self.shape) > 1 else (size,)
        return replace(self, shape=matrix, copies=self.copies // (parallel.expert if experts else 1))


@dataclass(frozen=True)
class Counts:
    """Numbers of parameters of the whole model; tied embeddings count once."""

    total: int
    experts: int
    """Number of parameters of routed experts."""
    dense: int
    """Number of all parameters outside of routed experts."""
    embedding: int
    """Number of dense parameters in embedding and head."""
    active: int
    """Number of parameters that a token uses: all except the experts that it is not routed to."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a model that determine its memory, under the same names for all families."""

    layers: int
    moe_layers: tuple[int, ...]
    hidden: int
    vocab: int
    tied: bool
    heads: int
    kv_heads: int
    head_dim: int
    """Width of a head's queries and keys."""
    value_dim: int
    rotary_dim: int
    intermediate: int
    """Inner size of a dense layer's MLP."""
    experts: int
    """Number of routed experts per layer; 0 for a dense model."""
    topk: int
    expert_intermediate: int
    shared_intermediate: int
    """Inner size of all shared experts together; 0 without shared experts."""
    q_lora: int
    """Rank of the low-rank queries in multi-latent attention; 0 without low-rank queries."""
    kv_lora: int
    """Rank of the low-rank keys and values in multi-latent attention; 0 without multi-latent attention."""
    qk_norm: Literal["none", "head", "heads"]
    """Norms of queries and keys: none, over each head, or over all heads together (OLMoE)."""
    qkv_bias: bool
    bias: bool
    """True if attention's output layer and the linear layers of MLPs and experts have a bias."""
    sinks: bool
    windows: tuple[int | None, ...]
    """Attention window of each layer; None for the whole sequence."""
    router_bias: bool
    value_head: bool = False
    """True if the head gives one number instead of logits; such a head is never tied."""

    @classmethod
    def from_config(cls, config: PreTrainedConfig, *, value_head: bool | None = None) -> Shape:
        """Return the sizes of a model of a supported architecture (families.FAMILIES). value_head: None to follow `config`."""
        value_head = is_classifier(config) if value_head is None else value_head
        family = family_of(config)
        moe, heads = family.moe, config.num_attention_heads
        kv_lora = (getattr(config, "kv_lora_rank", None) or 0) if family.latent_attention else 0
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
        rotary_dim = value_dim = head_dim
        if kv_lora:
            rotary_dim, value_dim = config.qk_rope_head_dim, config.v_head_dim
            head_dim = config.qk_nope_head_dim + rotary_dim
        return cls(
            layers=config.num_hidden_layers,
            moe_layers=moe_layers(config),
            hidden=config.hidden_size,
            vocab=config.vocab_size,
            tied=config.tie_word_embeddings and not value_head,
            heads=heads,
            kv_heads=heads if kv_lora else getattr(config, "num_key_value_heads", None) or heads,
            head_dim=head_dim,
            value_dim=value_dim,
            rotary_dim=rotary_dim,
            intermediate=config.intermediate_size,
            experts=expert_count(config),
            topk=getattr(config, moe.topk) if moe else 0,
            expert_intermediate=expert_intermediate(config),
            shared_intermediate=moe.shared_size(config) if moe else 0,
            q_lora=(config.q_lora_rank or 0) if kv_lora else 0,
            kv_lora=kv_lora,
            qk_norm=family.qk_norm,
            qkv_bias=_told(family.qkv_bias, config, "attention_bias"),
            bias=_told(family.bias, config, "mlp_bias"),
            sinks=bool(family.sinks),
            windows=_windows(config),
            router_bias=family.router_bias,
            value_head=value_head,
        )

    def padded_vocab(self, tensor: int) -> int:
        """Return the number of rows of embedding and head: a multiple of the tensor-parallel size."""
        return -(-self.vocab // tensor) * tensor


def _told(of_family: bool | None, config: PreTrainedConfig, key: str) -> bool:
    return bool(getattr(config, key, False)) if of_family is None else of_family


def _windows(config: PreTrainedConfig) -> tuple[int | None, ...]:
    kinds = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    return tuple(config.sliding_window if kind == "sliding_attention" else None for kind in kinds)


def engine_routes(config: PreTrainedConfig, *, gates: bool = False) -> EngineRoutes:
    """Return the format in which SGLang returns a model's routes. gates: replies also include the gates.

    Errors: UserError for a dense model, or if replies with gates cannot represent so many experts.
    """
    from megatron_rl.data.engine_routes import EngineRoutes

    shape = Shape.from_config(config)
    if not shape.experts:
        raise UserError(f"model: {architecture(config)} is dense: rollout.routes needs a MoE model")
    return EngineRoutes(shape.layers, shape.moe_layers, shape.experts, shape.topk, gates)


def engine_features(config: PreTrainedConfig, dtype: torch.dtype) -> EngineFeatures:
    """Return the format of SGLang's router features. dtype: dtype of its hidden states. Errors: as `engine_routes`."""
    from megatron_rl.data.engine_routes import EngineFeatures

    routes = engine_routes(config)
    return EngineFeatures(len(routes.moe_layers), config.hidden_size, routes.experts, dtype)


def layer_weights(shape: Shape, layer: int, *, transformer_engine: bool = True) -> list[Weight]:
    """Return the weights of one layer.

    transformer_engine: if True, every rank has the full low-rank projections of multi-latent attention. If False, they are
    split, as in Megatron's local layers.
    """
    norms = ("input_layernorm", "pre_mlp_layernorm")
    weights = [*_attention(shape, transformer_engine), *(Weight("norm", (shape.hidden,), f"{n}.weight") for n in norms)]
    if layer not in shape.moe_layers:
        weights += _mlp(shape, "mlp", "mlp", shape.intermediate)
    else:
        weights.append(Weight("router", (shape.experts, shape.hidden), "mlp.router.weight"))
        if shape.router_bias:
            weights.append(Weight("router", (shape.experts,), "mlp.router.bias"))
        experts = _mlp(shape, "experts", "mlp.experts.local_experts.*", shape.expert_intermediate)
        weights += [replace(w, copies=shape.experts) for w in experts]
        if shape.shared_intermediate:
            weights += _mlp(shape, "mlp", "mlp.shared_experts", shape.shared_intermediate)
    return [replace(w, name=f"decoder.layers.{layer}.{w.name}") for w in weights]


def _mlp(shape: Shape, part: Part, module: str, inner: int) -> list[Weight]:
    fc1, fc2 = (f"{module}.linear_fc{i}" for i in (1, 2))
    weights = [
        Weight(part, (2 * inner, shape.hidden), f"{fc1}.weight", cut=True),
        Weight(part, (shape.hidden, inner), f"{fc2}.weight", cut=True),
    ]
    if shape.bias:
        weights += [Weight(part, (2 * inner,), f"{fc1}.bias", cut=True), Weight(part, (shape.hidden,), f"{fc2}.bias")]
    return weights


def _attention(shape: Shape, transformer_engine: bool) -> list[Weight]:
    def weight(name: str, *sizes: int, cut: bool = False, part: Part = "attention") -> Weight:
        return Weight(part, sizes, f"self_attention.{name}", cut=cut)

    hidden, heads, dim = shape.hidden, shape.heads, shape.head_dim
    out = weight("linear_proj.weight", hidden, heads * shape.value_dim, cut=True)
    if shape.kv_lora:
        down = not transformer_engine
        nope = dim - shape.rotary_dim
        weights = [
            weight("linear_kv_down_proj.weight", shape.kv_lora + shape.rotary_dim, hidden, cut=down),
            weight("kv_layernorm.weight", shape.kv_lora, part="norm"),
            weight("linear_kv_up_proj.weight", heads * (nope + shape.value_dim), shape.kv_lora, cut=True),
            out,
        ]
        if not shape.q_lora:
            return [*weights, weight("linear_q_proj.weight", heads * dim, hidden, cut=True)]
        return [
            *weights,
            weight("linear_q_up_proj.weight", heads * dim, shape.q_lora, cut=True),
            weight("linear_q_down_proj.weight", shape.q_lora, hidden, cut=down),
            weight("q_layernorm.weight", shape.q_lora, part="norm"),
        ]
    qkv = (heads + 2 * shape.kv_heads) * dim
    weights = [weight("linear_qkv.weight", qkv, hidden, cut=True), out]
    if shape.qkv_bias:
        weights.append(weight("linear_qkv.bias", qkv, cut=True))
    if shape.bias:
        weights.append(weight("linear_proj.bias", hidden))
    if shape.qk_norm != "none":
        each = (heads, shape.kv_heads) if shape.qk_norm == "heads" else (1, 1)
        names = ("q_layernorm.weight", "k_layernorm.weight")
        weights += [weight(name, n * dim, part="norm") for name, n in zip(names, each, strict=True)]
    if shape.sinks:
        weights.append(weight("core_attention.softmax_offset", heads, cut=True))
    return weights


def end_weights(shape: Shape, *, first: bool, last: bool, tensor: int = 1) -> list[Weight]:
    """Return a stage's weights outside of layers: the embedding in the first stage, the final norm and the head in the last.

    Tied weights are returned twice if the first and the last stage differ. tensor: tensor-parallel size.
    """
    table = (shape.padded_vocab(tensor), shape.hidden)
    weights = [Weight("embedding", table, EMBEDDING, cut=True)] if first else []
    if last:
        weights.append(Weight("norm", (shape.hidden,), "decoder.final_layernorm.weight"))
        if shape.value_head:
            weights.append(Weight("head", (1, shape.hidden), HEAD))
        elif not (shape.tied and first):
            weights.append(Weight("head", table, EMBEDDING if shape.tied else HEAD, cut=True))
    return weights


def stage_layers(shape: Shape, parallel: ParallelConfig, stage: int) -> list[int]:
    """Return the layers of a pipeline stage; with virtual stages, the layers of all its chunks."""
    chunk = shape.layers // (parallel.pipeline * parallel.virtual_pipeline)
    starts = range(stage * chunk, shape.layers, parallel.pipeline * chunk)
    return [layer for start in starts for layer in range(start, start + chunk)]


def adapter_weights(weights: Iterable[Weight], lora: LoRAConfig) -> list[Weight]:
    """Return A [r, in], B [out, r] and DoRA's row lengths [out] of each weight that gets an adapter. weights: not split."""
    found = []
    for weight in weights if lora.rank else ():
        if is_target(weight.name.replace("*", "0"), lora.targets):
            out, width = weight.shape
            layer = weight.name.removesuffix(".weight") + ADAPTER
            found.append(replace(weight, shape=(lora.rank, width), name=f"{layer}linear_in.weight"))
            found.append(replace(weight, shape=(out, lora.rank), name=f"{layer}linear_out.weight"))
            found += [replace(weight, shape=(out,), name=f"{layer}weight_magnitude")] if lora.kind == "dora" else []
    return found


def rank_weights(
    shape: Shape,
    parallel: ParallelConfig,
    stage: int = 0,
    *,
    transformer_engine: bool = True,
    lora: LoRAConfig | None = None,
) -> list[Weight]:
    """Return the weights of one rank in a pipeline stage, adapters included. All ranks of a stage hold equal amounts."""
    ends = {"first": stage == 0, "last": stage == parallel.pipeline - 1}
    whole = end_weights(shape, **ends, tensor=parallel.tensor)
    for layer in stage_layers(shape, parallel, stage):
        whole += layer_weights(shape, layer, transformer_engine=transformer_engine)
    whole += adapter_weights(whole, lora) if lora else []
    return [weight.on_rank(parallel) for weight in whole]


def whole_model(shape: Shape) -> list[Weight]:
    """Return every weight of the model in order. A tied embedding is returned once."""
    ends = end_weights(shape, first=True, last=True)
    return [*ends[:1], *(w for layer in range(shape.layers) for w in layer_weights(shape, layer)), *ends[1:]]


def parameter_names(shape: Shape) -> set[str]:
    """Return the names of all parameters (`Weight.name`), with a separate name for each expert."""
    return {w.name.replace("*", str(i)) for w in whole_model(shape) for i in range(w.copies)}


def linear_weights(shape: Shape, patterns: Sequence[str] = ()) -> set[str]:
    """Return names of linear weights in attention, MLPs and experts that match a pattern; all names if there is no pattern."""
    names = {w.name.replace("*", str(i)) for w in whole_model(shape) if w.is_matrix for i in range(w.copies)}
    return {name for name in names if not patterns or is_frozen(name, patterns)}


def count(weights: Iterable[Weight], *parts: Part) -> int:
    """Return the number of parameters in the weights. parts: kinds of weights to count; none: all weights."""
    return sum(w.size for w in weights if not parts or w.part in parts)


def model_counts(shape: Shape) -> Counts:
    """Return the counts of the whole model, without the rows that pad the vocabulary."""
    weights = whole_model(shape)
    total, experts = count(weights), count(weights, "experts")
    active = total - experts + (experts * shape.topk // shape.experts if experts else 0)
    return Counts(total, experts, total - experts, count(weights, "embedding", "head"), active)
