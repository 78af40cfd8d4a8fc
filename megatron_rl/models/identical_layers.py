"""Layers for `precision.identical`: Megatron's layers, with matrix products, norms and routing from ops/batch_invariant.py.

These operations are for the forward pass. Gradients use the same formulas with torch's own products, because they need not be
reproducible.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.bridge.models.conversion.param_mapping import AutoMapping
from megatron.core.fusions.fused_bias_geglu import quick_gelu as megatron_quick_gelu
from megatron.core.tensor_parallel import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    scatter_to_sequence_parallel_region,
)
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from megatron_rl.errors import UserError
from megatron_rl.models.attention import HeadsNormSelfAttention, MLASelfAttention, SelfAttention
from megatron_rl.models.experts import GroupedExperts, Groups
from megatron_rl.models.moe import ExpertMoELayer, rows_of_tokens
from megatron_rl.models.norm import HeadsRMSNorm, RMSNorm
from megatron_rl.models.packed import token_places
from megatron_rl.models.router import ReplayRouter
from megatron_rl.ops import batch_invariant as ops
from megatron_rl.routing.passes import straight_through


def parts_of_rank(width: int, ranks: int) -> int:
    """Return how many parts of a sum over `width` inputs each tensor-parallel rank computes.

    Errors: UserError if the ranks cannot share the parts evenly.
    """
    parts = ops.parts(width)
    if parts % ranks:
        raise UserError(
            f"config: parallel.tensor = {ranks} with precision.identical: a sum over {width} inputs has {parts} parts,"
            f" which the ranks cannot share evenly; set parallel.tensor to a divisor of {parts}"
        )
    return parts // ranks


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, dtype: torch.dtype | None, of_parts: int | None) -> Tensor:
        ctx.save_for_backward(x if ctx.needs_input_grad[1] else None, weight)
        return ops.linear(x, weight, dtype=dtype, of_parts=of_parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        x, weight = ctx.saved_tensors
        rows = grad.reshape(-1, grad.shape[-1])
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            of_x = (rows @ weight.to(rows.dtype)).to(weight.dtype).view(*grad.shape[:-1], weight.shape[1])
        if ctx.needs_input_grad[1]:
            of_weight = (rows.t() @ x.reshape(-1, x.shape[-1]).to(rows.dtype)).to(weight.dtype)
        return of_x, of_weight, None, None


def linear(x: Tensor, weight: Tensor, *, dtype: torch.dtype | None = None, of_parts: int | None = None) -> Tensor:
    """Compute `ops.batch_invariant.linear` with gradients."""
    out: Any = _Linear.apply(x, weight, dtype, of_parts)
    return out


class BatchInvariantColumnParallelLinear(ColumnParallelLinear):
    """Megatron's layer. One rank computes the full sum of each output, so the bits do not depend on the number of ranks."""

    def _forward_impl(self, input: Tensor, weight: Tensor, *_: Any, **options: Any) -> Tensor:
        if options["sequence_parallel"]:
            input = gather_from_sequence_parallel_region(
                input, tensor_parallel_output_grad=True, group=options["tp_group"]
            )
        elif options["allreduce_dgrad"]:
            input = copy_to_tensor_model_parallel_region(input, group=options["tp_group"])
        out, bias = linear(input, weight), options["bias"]
        return out if bias is None else out + bias


class BatchInvariantRowParallelLinear(RowParallelLinear):
    """Megatron's layer. The ranks' partial sums are added in fp32, in the same order as the parts on a single rank.

    Errors: UserError if the ranks cannot share the sum's parts evenly.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.parts = parts_of_rank(self.input_size, self.input_size // self.input_size_per_partition)

    def forward(self, input_: Tensor) -> Any:
        """Compute (output, bias) from inputs [s, b, h], like Megatron."""
        group: Any = self.tp_group
        if group.size() == 1 or self.explicit_expert_comm:
            return super().forward(input_)
        weight = self.get_parameter("weight")
        share = linear(input_, weight, dtype=torch.float32, of_parts=self.parts)
        out: Any = _TreeReduce.apply(share, group, self.sequence_parallel)
        out = out.to(input_.dtype)
        bias = self.bias
        if bias is None or self.skip_bias_add:
            return out, bias
        return out + bias, None

    def _forward_impl(self, input: Tensor, weight: Tensor, *_: Any, **options: Any) -> Tensor:
        return linear(input, weight)


class _TreeReduce(torch.autograd.Function):
    """Adds the ranks' partial sums [s, ...] in a fixed tree order. scatter: return this rank's s / ranks rows, not all rows."""

    @staticmethod
    def forward(ctx: Any, share: Tensor, group: dist.ProcessGroup, scatter: bool) -> Tensor:
        ctx.group, ctx.scatter = group, scatter
        ranks = group.size()
        if scatter:
            mine = torch.empty_like(share)
            dist.all_to_all_single(mine, share.contiguous(), group=group)
            return ops.tree_sum(mine.chunk(ranks))
        shares = [torch.empty_like(share) for _ in range(ranks)]
        dist.all_gather(shares, share.contiguous(), group=group)
        return ops.tree_sum(shares)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        if ctx.scatter:
            parts = [torch.empty_like(grad) for _ in range(ctx.group.size())]
            dist.all_gather(parts, grad.contiguous(), group=ctx.group)
            grad = torch.cat(parts)
        return grad, None, None


class _Norm(torch.autograd.Function):
    """Computes x [R, d] times factors [R] times weight [d].

    factors: 1 / sqrt(mean square + eps) of each row. The mean is over the row's `width` numbers on all ranks.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, factors: Tensor, width: int, add_up: Callable[[Tensor], Tensor] | None
    ):
        ctx.save_for_backward(x, weight, factors)
        ctx.width, ctx.add_up = width, add_up
        return ops.scale_rows(x, factors, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        x, weight, factors = ctx.saved_tensors
        factors = factors[:, None]
        scaled, wide = x.float() * factors, grad.float()
        of_weight = (wide * scaled).sum(0).to(weight.dtype) if ctx.needs_input_grad[1] else None
        of_scaled = wide * weight.float()
        along = (of_scaled * scaled).sum(-1, keepdim=True)
        if ctx.add_up is not None:
            along = ctx.add_up(along)
        return ((of_scaled - scaled * (along / ctx.width)) * factors).to(x.dtype), of_weight, None, None, None


class BatchInvariantRMSNorm(RMSNorm):
    """RMSNorm that computes each row independently of the other rows."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x `[..., hidden_size]`; return the same shape and dtype."""
        rows = x.reshape(-1, x.shape[-1])
        factors = ops.norm_factors(ops.square_sums(rows.detach()), x.shape[-1], self.eps)
        out: Any = _Norm.apply(rows, self.weight.to(x.dtype), factors, x.shape[-1], None)
        return out.view_as(x)


class BatchInvariantHeadsRMSNorm(HeadsRMSNorm):
    """RMSNorm over all heads. Each rank's part of the sum is a subtree of the summation tree."""

    def forward(self, x: Tensor) -> Tensor:
        """Normalize x `[..., heads / tp, head_dim]`, this rank's heads; return the same shape and dtype."""
        rows, width, ranks = (
            x.flatten(-2).reshape(-1, x.shape[-2] * x.shape[-1]),
            self.weight.numel(),
            self.tp_group.size(),
        )
        sums = ops.square_sums(rows.detach(), of_parts=parts_of_rank(width, ranks))
        add_up = None
        if ranks > 1:
            shares = [torch.empty_like(sums) for _ in range(ranks)]
            dist.all_gather(shares, sums, group=self.tp_group)
            sums = ops.tree_sum(shares)
            add_up = self._add_up
        weight = self.weight.view(ranks, -1)[self.tp_group.rank()].to(x.dtype)
        out: Any = _Norm.apply(rows, weight, ops.norm_factors(sums, width, self.eps), width, add_up)
        return out.view_as(x)

    def _add_up(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self.tp_group)
        return x


class _Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slope: float) -> Tensor:
        ctx.save_for_backward(x)
        ctx.slope = slope
        return ops.swish(x.contiguous(), slope)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        (x,) = ctx.saved_tensors
        gate = torch.sigmoid(ctx.slope * x.float())
        return (grad.float() * (gate + ctx.slope * x.float() * gate * (1 - gate))).to(x.dtype), None


def silu(x: Tensor) -> Tensor:
    """Compute x sigmoid(x). It replaces torch's function as config.activation_func."""
    out: Any = _Swish.apply(x, 1.0)
    return out


def quick_gelu(x: Tensor) -> Tensor:
    """Compute x sigmoid(1.702 x). It replaces Megatron's function as config.activation_func."""
    out: Any = _Swish.apply(x, 1.702)
    return out


class BatchInvariantRouter(ReplayRouter):
    """Router with batch-invariant logits, expert choice and gates. The gates' gradient uses Megatron's formula."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        config = self.config
        self.rule = ops.Routing(
            topk=self.topk,
            scores=self.score_function,
            over_all=bool(config.moe_router_pre_softmax),
            groups=config.moe_router_num_groups or 1,
            group_topk=config.moe_router_group_topk or 1,
            scale=config.moe_router_topk_scaling_factor or 1.0,
        )

    def compute_logits(self, input: Tensor) -> Tensor:
        """Compute logits [s, b, E] in fp32 from hidden states [s, b, d]."""
        logits = linear(input, self.weight, dtype=torch.float32)
        return logits if self.bias is None else logits + self.bias.float()

    @torch.no_grad()
    def choice(self, logits: Tensor) -> Tensor:
        """Return the experts [T, k] int64 that the router itself would choose for logits [T, E]."""
        return self.rule.choose(self.rule.scores_of(logits, self.expert_bias))

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Return router weights [T, E] and the map of chosen experts [T, E] from logits [s, b, E]."""
        flat = logits.detach().view(-1, logits.shape[-1])
        self.router_replay.own = self.choice(flat)
        probs, chosen = super().routing(logits, padding_mask)
        self.router_replay.own = None
        with torch.no_grad():
            ids = chosen.byte().argsort(dim=1, descending=True, stable=True)[:, : self.topk]
            value = torch.zeros_like(probs).scatter_(1, ids, self.rule.weights(flat, ids).to(probs.dtype))
        return straight_through(value, probs), chosen


class BatchInvariantExperts(GroupedExperts):
    """Experts with batch-invariant matrix multiplications."""

    @staticmethod
    def product(x: Tensor, groups: Groups, weights: Sequence[Tensor]) -> Tensor:
        """Multiply the rows of x by the weight of each row's expert."""
        return ops.grouped_linear(x, groups.counts, weights)


class BatchInvariantMoELayer(ExpertMoELayer):
    """Adds the outputs of a token's experts in ascending order of expert ids, in fp32."""

    def postprocess(self, output: Tensor, shared_expert_output: Tensor | None) -> Tensor:
        """Add up the experts' outputs [T k, d] (rows sorted by expert) for each token; return [s, b, d]."""
        dispatcher: Any = self.token_dispatcher
        rows = rows_of_tokens(dispatcher, self.config.moe_router_topk)
        combined: Any = _Combine.apply(output, rows)
        combined = combined.view(dispatcher.hidden_shape)
        if shared_expert_output is not None:
            combined = combined + shared_expert_output
        self.let_go()
        return combined


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = x.shape
        return ops.combine(x, rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        (rows,) = ctx.saved_tensors
        out = grad.new_empty(ctx.shape)
        out[rows] = grad[:, None].expand(-1, rows.shape[1], -1)
        return out, None


class _TableRotation:
    """Rotary embedding from a table of cosines and sines; the engine uses the same table."""

    rotary: ops.Rotary
    _table: tuple[Tensor, Tensor] | None = None

    def angles(self, positions: Tensor, length: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return cosines and sines [T, n] of positions [T] below `length`."""
        if self._table is None or len(self._table[0]) < length or self._table[0].dtype != dtype:
            self._table = self.rotary.table(length, dtype)
        cosines, sines = (table.index_select(0, positions) for table in self._table)
        return cosines, sines

    def rotate(self, x: Tensor, angles: Tensor, positions: Tensor) -> Tensor:
        """Rotate x `[T, 1, H, D]`. The shape of angles `[S, 1, 1, R]` gives the number of positions and the rotated width."""
        width, heads = angles.shape[-1], x.squeeze(1)
        rotated = ops.rotate(heads[..., :width], *self.angles(positions, len(angles), x.dtype))
        return torch.cat((rotated, heads[..., width:]), dim=-1).unsqueeze(1)


class _ByHead(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights)
        return ops.by_head(x, weights)

    @staticmethod
    def backward(ctx: Any, grad: Tensor):
        x, weights = ctx.saved_tensors
        rows = grad.transpose(0, 1)  # [H, T, N]
        of_weights = torch.bmm(rows.transpose(1, 2), x.transpose(0, 1)) if ctx.needs_input_grad[1] else None
        return torch.bmm(rows, weights).transpose(0, 1), of_weights


class _Product(torch.nn.Module):
    """Module without weights that calls `linear`, so that hooks can observe the output."""

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        return linear(x, weight)


class BatchInvariantMLASelfAttention(_TableRotation, MLASelfAttention):
    """MLA that attends to the latents directly ("absorbed", arXiv 2405.04434), like an engine that caches latents.

    Queries are projected into the space of the latents, and each head's value projection is applied to its attention-weighted
    mean of latents. Megatron instead computes keys and values from the latents first. With rank R of the latents and head size
    d, this attention costs about (2 R + rope) / (2 d + rope) times as much as Megatron's.
    """

    config: Any
    """Megatron's MLATransformerConfig."""

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.latent_projection = _Product()

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: Any = None,
        **_: Any,
    ) -> tuple[Tensor | None, ...]:
        """Return query [T, H, R + rope], key [T, 1, R + rope] and value [T, 1, R] of a pack."""
        if packed_seq_params is None:
            raise UserError("precision.identical: multi-latent attention needs packed sequences")
        rank, rope = self.config.kv_lora_rank, self.config.qk_pos_emb_head_dim
        compressed, combined = self._qkv_down_projection(hidden_states)
        if combined.shape[-1] != rank + rope:
            combined = gather_from_tensor_model_parallel_region(combined)
        combined = combined.squeeze(1)  # [T, R + rope], the same on every rank
        if self.config.q_lora_rank is None:
            query, _ = self.linear_q_proj(compressed)
        else:
            q_layernorm: Any = self.q_layernorm
            query, _ = self.linear_q_up_proj(q_layernorm(compressed))
        heads = self.num_attention_heads_per_partition
        query = query.view(-1, heads, self.q_head_dim)
        content, rotated = query.split([self.config.qk_head_dim, rope], dim=-1)
        latents, key = combined.split([rank, rope], dim=-1)
        latents = self._normed(latents.contiguous())
        key = copy_to_tensor_model_parallel_region(key, group=self.pg_collection.tp)
        positions = token_places(packed_seq_params, len(combined), self.pg_collection.cp).positions
        angles = self.angles(positions, int(positions.max()) + 1, query.dtype)
        rotated, key = (ops.rotate(ops.half_by_half(x), *angles) for x in (rotated, key.unsqueeze(1)))
        up_key, self._up_value = self._up_projections()
        content: Any = _ByHead.apply(content, up_key.transpose(1, 2))
        keys = torch.cat((latents.unsqueeze(1), key), dim=-1)
        return torch.cat((content, rotated), dim=-1), keys, latents.unsqueeze(1), compressed, latents

    def _qkv_down_projection(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the down-projections with batch-invariant products. Megatron's layers only hold the weights."""
        tp, config = self.pg_collection.tp, self.config
        gathered = hidden_states
        if config.sequence_parallel:
            gathered = gather_from_sequence_parallel_region(hidden_states, tensor_parallel_output_grad=True, group=tp)
        elif tp.size() > 1:
            gathered = copy_to_tensor_model_parallel_region(hidden_states, group=tp)
        combined = self.latent_projection(gathered, self.linear_kv_down_proj.get_parameter("weight"))
        if config.q_lora_rank is None:
            return hidden_states, combined
        compressed = linear(gathered, self.linear_q_down_proj.get_parameter("weight"))
        if compressed.shape[-1] != config.q_lora_rank:
            compressed = gather_from_tensor_model_parallel_region(compressed)
            if config.sequence_parallel:
                compressed = scatter_to_sequence_parallel_region(compressed)
        return compressed, combined

    def _normed(self, latents: Tensor) -> Tensor:
        """Normalize latents [T, R]. Their gradient is summed over the ranks, because each rank's heads give a part of it.

        With sequence parallelism, Megatron sums the ranks' gradients of the norm's weight. So each rank normalizes only its own
        rows.
        """
        tp, norm = self.pg_collection.tp, cast("Any", self.kv_layernorm)
        if not self.config.sequence_parallel:
            return copy_to_tensor_model_parallel_region(norm(latents), group=tp)
        rows = scatter_to_sequence_parallel_region(latents, group=tp)
        return gather_from_sequence_parallel_region(norm(rows), tensor_parallel_output_grad=True, group=tp)

    def _up_projections(self) -> tuple[Tensor, Tensor]:
        weight = self.linear_kv_up_proj.get_parameter("weight")
        of_heads = weight.view(self.num_attention_heads_per_partition, -1, self.config.kv_lora_rank)
        key, value = of_heads.split([self.config.qk_head_dim, self.config.v_head_dim], dim=1)
        return key, value

    def _run_core_attention(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, *_: Any, **options: Any
    ) -> Tensor:
        means = self.core_attention(query, key, value, attention_mask, **options)
        out: Any = _ByHead.apply(means.view(len(means), -1, self.config.kv_lora_rank), self._up_value)
        return out.flatten(1)


class BatchInvariantSelfAttention(_TableRotation, SelfAttention):
    """Self-attention with the rotary embedding from the table."""


class BatchInvariantHeadsNormSelfAttention(_TableRotation, HeadsNormSelfAttention):
    """Self-attention with the rotary embedding from the table, and norms over all heads of queries and keys."""

    norm = BatchInvariantHeadsRMSNorm


AutoMapping.register_module_type(BatchInvariantColumnParallelLinear.__name__, "column")
AutoMapping.register_module_type(BatchInvariantRowParallelLinear.__name__, "row")
for _class in (BatchInvariantRouter, BatchInvariantRMSNorm, BatchInvariantHeadsRMSNorm):
    AutoMapping.register_module_type(_class.__name__, "replicated")

_REPLACED: dict[Any, Any] = {
    ColumnParallelLinear: BatchInvariantColumnParallelLinear,
    RowParallelLinear: BatchInvariantRowParallelLinear,
    RMSNorm: BatchInvariantRMSNorm,
    ReplayRouter: BatchInvariantRouter,
    GroupedExperts: BatchInvariantExperts,
    ExpertMoELayer: BatchInvariantMoELayer,
    SelfAttention: BatchInvariantSelfAttention,
    HeadsNormSelfAttention: BatchInvariantHeadsNormSelfAttention,
    MLASelfAttention: BatchInvariantMLASelfAttention,
}
"""Classes in a layer spec -> their batch-invariant replacements."""


_CHOSEN_BY_CLASS = ("linear_q_down_proj", "linear_kv_down_proj")
"""Fields of a layer spec for which Megatron only accepts its own classes."""


def make_batch_invariant(spec: Any, rotary: ops.Rotary) -> None:
    """Replace classes by their batch-invariant versions throughout a layer spec, in place. rotary: for the attention."""
    for name, value in [*vars(spec).items()] if hasattr(spec, "__dict__") else []:
        if name in _CHOSEN_BY_CLASS:
            continue
        setattr(spec, name, _replaced(value, rotary))


def _replaced(value: Any, rotary: ops.Rotary) -> Any:
    if isinstance(value, type):
        kind = _REPLACED.get(value, value)
        return type(kind.__name__, (kind,), {"rotary": rotary}) if issubclass(kind, _TableRotation) else kind
    if isinstance(value, partial) and value.func in (GroupedExperts, BatchInvariantExperts):
        return partial(BatchInvariantExperts, *value.args, **value.keywords)  # its linear layers only hold weights
    if isinstance(value, partial):
        keywords = {name: _replaced(v, rotary) for name, v in value.keywords.items()}
        return partial(_replaced(value.func, rotary), *(_replaced(v, rotary) for v in value.args), **keywords)
    if isinstance(value, list):
        return [_replaced(v, rotary) for v in value]
    if dataclasses.is_dataclass(value):
        make_batch_invariant(value, rotary)
    return value


def set_batch_invariant(config: Any, hf_config: Any) -> ops.Rotary:
    """Set a batch-invariant activation in the provider's config; return the rotary embedding that the layers share.

    Errors: UserError that names an unsupported activation or rotary embedding.
    """
    known = {F.silu: silu, megatron_quick_gelu: quick_gelu}
    if config.activation_func not in known:
        raise UserError(f"config: precision.identical: activation {config.activation_func.__name__} is not supported")
    config.activation_func = known[config.activation_func]
    try:
        return ops.Rotary.of(hf_config.to_dict())
    except ValueError as error:
        raise UserError(f"config: precision.identical: {error}") from None
