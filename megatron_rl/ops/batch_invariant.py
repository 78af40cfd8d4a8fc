"""Batch-invariant operators for trainer and engine: the bits of a row do not depend on the other rows (precision.identical).

Matrix multiplication, norm, softmax, router and the sum over experts add in one fixed order. The order is the same whether a
token is computed alone or with others, in a prefill or in a decode. Trainer and engine therefore get identical numbers from
identical inputs. Kernels: csrc/batch_invariant/, and batch_invariant_triton.py for CUDA. Attention: csrc/sink_attention/, which
cuts its sums at the same keys for every query.

An engine process loads this file by its path, without the package. The file therefore imports nothing of megatron_rl except
the kernels in the same folder. All operators are forward only; models/identical_layers.py has the gradients.

No sum here depends on the number of tensor-parallel ranks, up to `parts(width)` ranks. The inputs of a product are cut into
this many equal parts, and the sums of the parts are added pairwise as a tree. The share of a rank is then a subtree (arXiv
2511.17826). A softmax over the vocabulary adds integers, for which every order gives the same sum.
"""

from __future__ import annotations

import functools
import importlib.machinery
import importlib.util
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def _extension(name: str) -> Any:
    spec = importlib.machinery.PathFinder.find_spec(name, [str(Path(__file__).parent)])
    if spec is None or spec.loader is None:
        raise ImportError(f"{name} is not built. Build it: tools/setup.sh --force")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


Reduce = Callable[[Tensor, str], None]
"""Function reduce(x, "max" | "sum") that reduces a tensor over tensor-parallel ranks, in place."""
_kernels = _extension("_batch_invariant")
_attention = _extension("_sink_attention")


@functools.cache
def _triton() -> Any:
    """Load batch_invariant_triton.py on first use, because a process without a GPU may not have Triton."""
    name = "megatron_rl_triton_operators"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("batch_invariant_triton.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up their module here
    spec.loader.exec_module(module)
    return module


def _kernels_of(x: Tensor) -> Any:
    return _triton() if x.is_cuda else _kernels


def parts(width: int) -> int:
    """Return the number of partial sums of a product over `width` inputs: the largest number of tensor-parallel ranks."""
    most = 8 if width >= 1024 else 4 if width >= 512 else 2
    return math.gcd(width, most)


def tree_sum(shares: Sequence[Tensor]) -> Tensor:
    """Add the shares of the ranks pairwise, in the order of the tree. The number of ranks is a power of two."""
    while len(shares) > 1:
        shares = [a + b for a, b in zip(shares[::2], shares[1::2], strict=True)]
    return shares[0]


def linear(x: Tensor, weight: Tensor, *, dtype: torch.dtype | None = None, of_parts: int | None = None) -> Tensor:
    """Return x [..., K] times weight [N, K] transposed: [..., N] in `dtype` (default: dtype of x). Sums are in fp32.

    of_parts: number of parts of K, by default parts(K). A rank that holds only a slice of the inputs passes its share of the
    parts.
    """
    rows = x.reshape(-1, x.shape[-1])
    return grouped_linear(rows, [len(rows)], [weight], dtype=dtype, of_parts=of_parts).view(*x.shape[:-1], len(weight))


def grouped_linear(
    x: Tensor,
    counts: Sequence[int],
    weights: Sequence[Tensor],
    *,
    dtype: torch.dtype | None = None,
    of_parts: int | None = None,
) -> Tensor:
    """Multiply x [R, K] by the weight [N, K] of each row's group: [R, N]. counts: rows of each group, in order."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    return _kernels_of(x).product(x, counts, weights, of_parts or parts(x.shape[1]), dtype or x.dtype)


def square_sums(x: Tensor, *, of_parts: int | None = None) -> Tensor:
    """Return the sum of squares of each row of x [R, d]: fp32 [R]. of_parts: as in `linear`."""
    return _kernels_of(x).square_sums(x, of_parts or parts(x.shape[1]))


def norm_factors(sums: Tensor, width: int, eps: float) -> Tensor:
    """Return 1 / sqrt(mean of squares + eps) [R] from the sums of squares [R] of rows of `width` elements."""
    return (sums / width + eps).sqrt().reciprocal()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return RMSNorm of x [..., d], computed in fp32 and rounded once to the dtype of x (arXiv 1910.07467)."""
    rows = x.reshape(-1, x.shape[-1])
    return scale_rows(rows, norm_factors(square_sums(rows), x.shape[-1], eps), weight).view_as(x)


def scale_rows(x: Tensor, factors: Tensor, weight: Tensor) -> Tensor:
    """Return x [R, d] times factors [R] times weight [d]."""
    return _kernels_of(x).scale_rows(x, factors, weight.to(x.dtype).contiguous())


def swish(x: Tensor, slope: float = 1.0) -> Tensor:
    """Return x sigmoid(slope x), of the shape and dtype of x. This is SiLU, or quick GELU with slope 1.702."""
    return _kernels_of(x).swish(_rows(x), slope, False).view(x.shape)


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)) of fp32 x."""
    return _kernels_of(x).swish(_rows(x), 1.0, True).view(x.shape)


def softmax(x: Tensor) -> Tensor:
    """Return the softmax of fp32 x over its last dimension."""
    return _kernels_of(x).softmax(_rows(x)).view(x.shape)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1]) if x.is_contiguous() or x.dim() != 2 or x.stride(-1) != 1 else x


def topk(x: Tensor, k: int) -> Tensor:
    """Return the indices [T, k] of the k largest values of each row of fp32 x [T, n], largest first, ties in index order."""
    return _kernels_of(x).topk(x, k)


@dataclass(frozen=True)
class Routing:
    """Rule by which a router turns logits into experts and weights."""

    topk: int
    """Number of experts per token."""
    scores: str
    """Score function: softmax | sigmoid."""
    over_all: bool = False
    """True: softmax over all experts, so that the weights of the chosen experts need not add up to 1. False: softmax over
    the chosen experts only."""
    groups: int = 1
    """Number of expert groups. Experts are chosen from the `group_topk` best groups (arXiv 2412.19437)."""
    group_topk: int = 1
    """Number of groups from which experts are chosen."""
    scale: float = 1.0
    """Factor of the weights."""

    def choose(self, scores: Tensor) -> Tensor:
        """Return the ids [T, k] int64 of the experts with the highest scores [T, E], best first."""
        if self.groups > 1:
            by_group = scores.view(len(scores), self.groups, -1)
            best = by_group.gather(
                2, topk(by_group.flatten(0, 1), self.topk // self.group_topk).view(*by_group.shape[:2], -1)
            )
            chosen = topk(_in_order(best), self.group_topk)
            allowed = torch.zeros(len(scores), self.groups, dtype=torch.bool).scatter_(1, chosen, True)
            scores = by_group.masked_fill(~allowed[..., None], -math.inf).flatten(1)
        return topk(scores, self.topk)

    def scores_of(self, logits: Tensor, bias: Tensor | None = None) -> Tensor:
        """Return the scores that choose experts, [T, E] fp32, from fp32 logits. bias: [E], affects only the choice."""
        if self.scores == "sigmoid":
            scores = sigmoid(logits)
            return scores if bias is None else scores + bias.float()
        return softmax(logits) if self.over_all else logits

    def weights(self, logits: Tensor, ids: Tensor) -> Tensor:
        """Return the weights [T, k] fp32 of the experts `ids` [T, k], given in any order. Sums run in order of rising id."""
        ids, order = ids.sort(dim=1)
        if self.scores == "sigmoid":
            weights = sigmoid(logits).gather(1, ids)
            weights = weights / (_in_order(weights)[:, None] + 1e-20) if self.topk > 1 else weights
        elif self.over_all:
            weights = softmax(logits).gather(1, ids)
        else:
            weights = softmax(logits.gather(1, ids))
        if self.scale != 1:
            weights = weights * self.scale
        return torch.empty_like(weights).scatter_(1, order, weights)


def _in_order(x: Tensor) -> Tensor:
    total = x[..., 0]
    for i in range(1, x.shape[-1]):
        total = total + x[..., i]
    return total


@dataclass(frozen=True)
class Gate:
    """Gated activation of an MLP: swish(gate) (up + offset), with gate and up clamped to the limit."""

    slope: float = 1.0
    limit: float | None = None
    offset: float = 0.0

    def __call__(self, gate: Tensor, up: Tensor, weights: Tensor | None = None) -> Tensor:
        """Apply the activation to gate and up [R, F], times weights [R, 1]: [R, F]. Each operation rounds to their dtype."""
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
        hidden = swish(gate, self.slope) * (up + self.offset if self.offset else up)
        return hidden if weights is None else (hidden * weights).to(hidden.dtype)


def experts(
    x: Tensor,
    counts: Sequence[int],
    weights: Tensor,
    gate: Gate,
    up: tuple[Sequence[Tensor], Tensor | None],
    down: tuple[Sequence[Tensor], Tensor | None],
    *,
    interleaved: bool = False,
    width: int | None = None,
) -> Tensor:
    """Return the outputs [R, d] of the experts, times the router's weights [R, 1].

    x: [R, d], sorted by expert; counts: rows of each expert.
    up, down: the weights of each expert, [2 F, d] and [d, F], and their biases [E, ...] or None. The rows of `up` are first
    all gates, then all ups; with `interleaved` they alternate. Biases are multiplied by the router's weights too, as in
    Megatron. width: F without padding, because padding would move the places at which sums are cut.
    """
    hidden = grouped_linear(x, counts, up[0])
    if up[1] is not None:
        add_biases(hidden, counts, up[1])
    first, second = (hidden[:, ::2], hidden[:, 1::2]) if interleaved else hidden.chunk(2, dim=-1)
    hidden = gate(first[:, :width].contiguous(), second[:, :width].contiguous(), weights)
    out = grouped_linear(hidden, counts, [weight[:, :width] for weight in down[0]])
    if down[1] is not None:
        add_biases(out, counts, down[1], weights)
    return out


def add_biases(x: Tensor, counts: Sequence[int], biases: Tensor, weights: Tensor | None = None) -> None:
    """Add the bias of each expert, biases [E, n] times weights [R, 1], to its rows of x [R, n], in place."""
    start = 0
    for expert, count in enumerate(counts):
        if count:
            rows = slice(start, start + count)
            bias = biases[expert].to(x.dtype)
            x[rows] += bias if weights is None else weights[rows] * bias
        start += count


def combine(x: Tensor, places: Tensor) -> Tensor:
    """Sum the rows `places` [T, k] of x [R, d], in the order of `places`, in fp32: [T, d]."""
    return _kernels_of(x).combine(x, places)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    borders: Tensor,
    key_borders: Tensor,
    *,
    window: int | None,
    scale: float,
) -> Tensor:
    """Call the forward kernel of ops.sink_attention: [T, H, Dv]. borders: int64 [S + 1] on the CPU."""
    sinks = None if sinks is None else sinks.float().contiguous()
    return _attention.forward(q, k, v, sinks, borders, key_borders, window or 0, scale)[0]


def log_softmax(logits: Tensor) -> Tensor:
    """Return the log-softmax of fp32 logits [T, V]."""
    most = logits.amax(-1)
    return (logits - most[:, None]) - log_sum(logits, most)[:, None]


def log_sum(logits: Tensor, most: Tensor, reduce: Reduce | None = None) -> Tensor:
    """Return the log of the sum of exp(logits - most), fp32 [T], for fp32 logits [T, V] and their maxima `most` [T].

    The terms are rounded to multiples of 2^-42 and added as integers. reduce: as in `log_probs`.
    """
    sums = _kernels_of(logits).exponential_sums(logits, most)
    if reduce is not None:
        reduce(sums, "sum")
    return _kernels_of(sums).log_of_sums(sums).float()


def log_probs(
    logits: Tensor, columns: Tensor, log_rho: float | None, temperature: float, reduce: Reduce | None = None
) -> Tensor:
    """Return the log-softmax of fp32 logits [T, V] / temperature at one column of each row, [T], over the safe set of log_rho.

    The engine gets the same numbers if it divides its logits by the temperature, prunes them and calls `log_softmax`.
    columns: int64 [T]; columns outside of [0, V) belong to another rank. reduce(x, "max" | "sum"): reduces in place over
    the ranks that hold other columns.
    """
    logits = logits / temperature if temperature != 1 else logits
    most = logits.amax(-1)
    if reduce is not None:
        reduce(most, "max")
    if log_rho is not None:
        logits = logits.masked_fill(logits < (most + log_rho)[:, None], -math.inf)
    mine = (columns >= 0) & (columns < logits.shape[1])
    chosen = logits.gather(1, columns.where(mine, 0)[:, None])[:, 0].where(mine, 0.0)
    if reduce is not None:
        reduce(chosen, "sum")
    return (chosen - most) - log_sum(logits, most, reduce)


@dataclass(frozen=True)
class Rotary:
    """Angles of a model's rotary embedding, read from its config.json."""

    frequencies: tuple[float, ...]
    """Frequency of each pair, in radians per position."""
    factor: float = 1.0
    """Factor of cosines and sines (YaRN's attention scaling)."""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Rotary:
        """Read a config.json. Errors: ValueError if the kind of embedding is not supported."""
        rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        kind = rope.get("rope_type") or rope.get("type") or "default"
        base = float(rope.get("rope_theta") or config.get("rope_theta") or 10_000.0)
        heads = config["num_attention_heads"]
        width = config.get("qk_rope_head_dim") or config.get("head_dim") or config["hidden_size"] // heads
        width = int(width * (rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1))
        plain = [base ** (-2 * i / width) for i in range(width // 2)]
        if kind in ("default", "mrope"):
            return cls(tuple(plain))
        if kind == "linear":
            return cls(tuple(f / rope["factor"] for f in plain))
        if kind != "yarn":
            raise ValueError(f"rotary embedding of the kind '{kind}' is not supported: use default, linear or yarn")
        return cls(*_yarn(plain, base, width, rope, config))

    def table(self, positions: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return the cosines and sines [positions, n] in `dtype`, times the factor."""
        frequencies = torch.tensor(self.frequencies, dtype=torch.float32)
        cosines, sines = _kernels_of(frequencies).rotary(positions, frequencies)
        return (cosines * self.factor).to(dtype), (sines * self.factor).to(dtype)


def _yarn(
    plain: list[float], base: float, width: int, rope: Mapping[str, Any], config: Mapping[str, Any]
) -> tuple[tuple[float, ...], float]:
    """Return the frequencies and the factor of cosines and sines by YaRN (arXiv 2309.00071), computed as in transformers."""
    factor = float(rope["factor"])
    original = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]

    def pair(rotations: float) -> float:
        return width * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = pair(rope.get("beta_fast") or 32), pair(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    high = high + 0.001 if low == high else high
    ramp = [min(1.0, max(0.0, (i - low) / (high - low))) for i in range(width // 2)]
    frequencies = tuple(f / factor * r + f * (1 - r) for f, r in zip(plain, ramp, strict=True))

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1 if factor > 1 else 1.0

    if rope.get("attention_factor") is not None:
        return frequencies, float(rope["attention_factor"])
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return frequencies, magnitude(rope["mscale"]) / magnitude(rope["mscale_all_dim"])
    return frequencies, magnitude(1.0)


def by_head(x: Tensor, weights: Tensor) -> Tensor:
    """Multiply x [T, H, K] by the transposed weight of each head, [H, N, K]: [T, H, N]."""
    tokens, heads, width = x.shape
    rows = x.transpose(0, 1).reshape(heads * tokens, width)
    out = grouped_linear(rows, [tokens] * heads, weights.contiguous().unbind())
    return out.view(heads, tokens, -1).transpose(0, 1)


def half_by_half(x: Tensor) -> Tensor:
    """Reorder x [..., 2 n] from adjacent pairs (DeepSeek) to pairs whose elements are n apart."""
    return torch.cat((x[..., ::2], x[..., 1::2]), dim=-1)


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """Rotate x [T, H, 2 n], whose pairs are n apart, by cosines and sines [T, n] of the same dtype."""
    a, b = x.chunk(2, dim=-1)
    cosines, sines = cosines[:, None], sines[:, None]
    return torch.cat((a * cosines - b * sines, b * cosines + a * sines), dim=-1)
