"""Sequences -> packed micro-batches (THD: no padding between sequences but what the parallel layout asks for)."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_rl.algorithms.segments import AllReduce, Segments
from megatron_rl.data.sequence import FIELDS, RouterFeatures, Sequence, TopLogProbs
from megatron_rl.errors import UserError
from megatron_rl.ops.device import upload
from megatron_rl.ops.masked_log_softmax import KeptTokens
from megatron_rl.ops.token_places import TokenPlaces
from megatron_rl.routing.table import Features, RouteShape, RouteTable, evenly_spaced, has_route

ALWAYS = ("loss_mask", "rollout_log_probs", "advantages")
"""Fields that every batch has."""
IGNORED = -100
"""Label of a position whose prediction nobody asks for."""


@dataclass(frozen=True)
class Layout:
    """Constraints on a packed micro-batch that come from the parallel layout and the model's routers."""

    tensor: int = 1
    context: int = 1
    context_rank: int = 0
    pad_token: int = 0
    tensor_rank: int = 0
    routes: RouteShape | None = None
    """None: a dense model."""
    cached_tokens: int = 0
    """Tokens of each response whose router features are stored."""
    multiple: int = 1
    """The tokens of a rank's products come in multiples of this (FP8)."""
    vocabulary: int | None = None
    """Size of the model's vocabulary: ids of tokens are below it. None: not checked."""
    all_reduce: AllReduce | None = None
    """Over the context-parallel ranks; None where there is one."""

    @property
    def sequence_multiple(self) -> int:
        """Megatron's zigzag cuts each sequence into 2 x context chunks."""
        return 2 * self.context if self.context > 1 else 1

    @property
    def total_multiple(self) -> int:
        """Sequence parallelism cuts this rank's tokens into `tensor` equal parts."""
        return math.lcm(self.sequence_multiple, self.tensor * self.context * self.multiple)


@dataclass
class Batch:
    """One packed micro-batch as this context-parallel rank sees it.

    T tokens of S sequences lie behind each other; with context parallelism T is this rank's share. All per-token fields
    are in *label position*: entry t speaks of the token that position t predicts.
    """

    tokens: torch.Tensor
    """[1, T] int64"""
    position_ids: torch.Tensor
    """[1, T] int64, from 0 in each sequence"""
    labels: torch.Tensor
    """[T] int64, IGNORED outside the response, and where a label does not count: the head computes no row for it"""
    label_rows: torch.Tensor
    """[n] int64: the others; as rows, because a GPU would be waited for to find them"""
    fields: dict[str, torch.Tensor]
    """[T] values of each label by name of `data.sequence.FIELDS`. What a pass over the batch computes is added by whoever asked
    for it, on the pipeline stage that has it."""
    segments: Segments
    """Which of the S sequences a token belongs to"""
    cu_seqlens: torch.Tensor
    """[S' + 1] int32: borders of the sequences over *all* context-parallel ranks, padding counted with its sequence"""
    places: TokenPlaces
    """The same for attention, and where this rank's tokens lie"""
    max_seqlen: int
    sequence_lengths: torch.Tensor
    """[S] float32: counted labels of each whole sequence"""
    samples: list[int]
    """Index of each of the S sequences in the list that was packed"""
    inputs: int
    """Tokens of the sequences on this rank, without padding"""
    kept: KeptTokens | None = None
    """Kept sets of the T tokens, where the sampler truncates its vocabulary."""
    routes: RouteTable | None = None
    """Routes of the tokens at this process's routers: with sequence parallelism its share of the T. None for a dense model."""
    without_route: int = 0
    """Tokens on this context-parallel rank whose experts the engine did not tell."""
    teacher_hidden: torch.Tensor | None = None
    """[n, hidden of the teacher]: its last hidden states at label_rows; on the pipeline stage that has the head."""
    teacher_layers: dict[int, torch.Tensor] = field(default_factory=dict)
    """[m, hidden] by layer of the teacher: outputs at the m counted labels of this process's share of the T."""
    top_token_ids: torch.Tensor | None = None
    """[n, k] int32: a teacher's recorded likeliest tokens at label_rows, -1: none; None where no sequence has any."""
    top_log_probs: torch.Tensor | None = None
    """[n, k] fp32: theirs."""

    def __getitem__(self, name: str) -> torch.Tensor:
        """[T] values of a field."""
        return self.fields[name]

    @property
    def mask(self) -> torch.Tensor:
        """[T] bool: labels that count in the loss."""
        return self.fields["loss_mask"]

    def to(self, device: torch.device) -> Batch:
        """Move the batch to a device."""
        movable = (RouteTable, KeptTokens, TokenPlaces)
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, movable)}
        moved |= {k: upload(v, device) for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        moved["fields"] = {name: upload(values, device) for name, values in self.fields.items()}
        return replace(self, **moved, segments=replace(self.segments, ids=upload(self.segments.ids, device)))

    def take(self, rows: torch.Tensor) -> Batch:
        """Some tokens of it [n], for losses that look at each token alone; what belongs to sequences stays."""
        fields = {name: values[rows] for name, values in self.fields.items()}
        taken = {name: getattr(self, name)[:, rows] for name in ("tokens", "position_ids")}
        segments = self.segments.take(rows)
        of_rows: dict[str, Any] = {
            "teacher_hidden": None,
            "teacher_layers": {},
            "top_token_ids": None,
            "top_log_probs": None,
        }
        return replace(self, **taken, labels=self.labels[rows], fields=fields, segments=segments, **of_rows)


def micro_batch_count(lengths: list[int], budget: int) -> int:
    """Fewest micro-batches that the longest-first rule needs to stay within `budget` tokens each."""
    if not lengths:
        return 1
    count = max(1, math.ceil(sum(lengths) / budget))
    while max(sum(lengths[i] for i in b) for b in assign(lengths, count)) > budget and count < len(lengths):
        count += 1
    return count


def assign(lengths: list[int], count: int) -> list[list[int]]:
    """Share sequences among `count` bins, longest first to the emptiest bin (LPT); indices ascend within a bin."""
    heap: list[tuple[int, int]] = [(0, b) for b in range(count)]
    bins: list[list[int]] = [[] for _ in range(count)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, b = heapq.heappop(heap)
        bins[b].append(index)
        heapq.heappush(heap, (load + lengths[index], b))
    return [sorted(b) for b in bins]


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def pack(samples: list[Sequence], indices: list[int], layout: Layout) -> Batch:
    """Pack samples[i] for i in indices into one micro-batch (an empty list gives one of padding alone).

    Errors: UserError for a token outside the layout's vocabulary.
    """
    padded = [_round_up(samples[i].inputs, layout.sequence_multiple) for i in indices]
    tail = _round_up(sum(padded), layout.total_multiple) - sum(padded) if indices else layout.total_multiple
    borders = np.concatenate([[0], np.cumsum([*padded, *([tail] if tail else [])])]).astype(np.int64)
    total = int(borders[-1])

    tokens = np.full(total, layout.pad_token, np.int64)
    position_ids = np.concatenate([np.arange(n) for n in np.diff(borders)])
    labels = np.full(total, IGNORED, np.int64)
    names = {name for i in indices for name in samples[i].fields} | set(ALWAYS)
    fields = {name: np.full(total, FIELDS[name].default, FIELDS[name].dtype) for name in FIELDS if name in names}
    ids = np.full(total, -1, np.int64)
    for row, (i, start) in enumerate(zip(indices, borders, strict=False)):
        sample = samples[i]
        n, p = sample.inputs, sample.prompt_length
        _check_tokens(sample, layout.vocabulary)
        tokens[start : start + n] = sample.tokens[:-1]
        response = slice(start + p - 1, start + n)
        labels[response] = np.where(sample["loss_mask"], sample.tokens[p:], IGNORED)
        for name, values in fields.items():
            values[response] = sample[name]
        ids[start : start + n] = row

    local = np.concatenate([_zigzag(a, b, layout) for a, b in pairwise(borders)])
    label_rows = np.flatnonzero(labels[local] != IGNORED)
    top = _recorded_top([samples[i] for i in indices], borders, local[label_rows], layout.vocabulary)
    pick = lambda array: torch.from_numpy(np.ascontiguousarray(array[local]))  # noqa: E731
    routes = None if layout.routes is None else _engine_routes(samples, indices, borders, layout.routes)
    return Batch(
        tokens=pick(tokens)[None],
        position_ids=pick(position_ids)[None],
        labels=pick(labels),
        label_rows=torch.from_numpy(label_rows),
        fields={name: pick(values) for name, values in fields.items()},
        segments=Segments(pick(ids), len(indices), layout.all_reduce, counts=layout.context_rank == 0),
        cu_seqlens=torch.from_numpy(borders.astype(np.int32)),
        places=TokenPlaces.build(torch.from_numpy(borders), len(local), layout.context, layout.context_rank),
        max_seqlen=int(np.diff(borders).max()),
        sequence_lengths=torch.tensor([float(samples[i]["loss_mask"].sum()) for i in indices]),
        samples=list(indices),
        inputs=int((ids[local] >= 0).sum()),
        kept=_kept_tokens([samples[i] for i in indices], borders, local),
        routes=None
        if routes is None or layout.routes is None
        else _route_table(
            [samples[i] for i in indices], routes, borders, fields["loss_mask"], local, layout, layout.routes
        ),
        without_route=0 if routes is None else int((_missing(routes) & (ids >= 0))[local].sum()),
        top_token_ids=None if top is None else torch.from_numpy(top.token_ids),
        top_log_probs=None if top is None else torch.from_numpy(top.log_probs),
    )


def _check_tokens(sample: Sequence, vocabulary: int | None) -> None:
    """A GPU would end the process at one of them, and name none."""
    if vocabulary is None:
        return
    wrong = np.flatnonzero((sample.tokens < 0) | (sample.tokens >= vocabulary))
    if len(wrong):
        raise UserError(
            f"data: token {sample.tokens[wrong[0]]} at position {wrong[0]} of a sequence is outside the model's vocabulary of"
            f" {vocabulary}; the tokenizer of the data, or of the rollout engine, is another model's"
        )


def _kept_tokens(samples: list[Sequence], borders: np.ndarray, local: np.ndarray) -> KeptTokens | None:
    """Kept sets of this context-parallel rank's tokens; None where no sampler truncated."""
    if all(sample.kept is None for sample in samples):
        return None
    sets = [np.zeros(0, np.int32)] * int(borders[-1])
    for sample, start in zip(samples, borders, strict=False):
        first = int(start) + sample.prompt_length - 1
        sets[first : first + len(sample.kept or [])] = sample.kept or []
    chosen = [sets[position] for position in local]
    ends = np.cumsum([0] + [len(ids) for ids in chosen])
    return KeptTokens.of(torch.from_numpy(np.concatenate(chosen).astype(np.int64)), torch.from_numpy(ends))


def _recorded_top(
    samples: list[Sequence], borders: np.ndarray, places: np.ndarray, vocabulary: int | None
) -> TopLogProbs | None:
    """The teacher's log-probs for the labels at these places of the packed tokens; None without any."""
    k = max((sample.top.token_ids.shape[1] for sample in samples if sample.top is not None), default=None)
    if k is None:
        return None
    whole = TopLogProbs.none(int(borders[-1]), k)
    for sample, start in zip(samples, borders, strict=False):
        if sample.top is None:
            continue
        first = int(start) + sample.prompt_length - 1
        rows, columns = slice(first, first + sample.response_length), slice(sample.top.token_ids.shape[1])
        whole.token_ids[rows, columns], whole.log_probs[rows, columns] = sample.top.token_ids, sample.top.log_probs
    ids = whole.token_ids[places]
    if vocabulary is not None:  # of the same tokenizer: rows of the teacher's embeddings that stand for no token
        ids = np.where(ids < vocabulary, ids, -1)
    return TopLogProbs(ids, whole.log_probs[places])


def _engine_routes(samples: list[Sequence], indices: list[int], borders: np.ndarray, shape: RouteShape) -> np.ndarray:
    """[total, moe_layers, topk], with sentinels for padding and for sequences without routes."""
    routes = shape.empty(int(borders[-1]))
    for i, start in zip(indices, borders, strict=False):
        if samples[i].routes is not None:
            routes[start : start + samples[i].inputs] = samples[i].routes
    return routes


def _engine_gates(samples: list[Sequence], borders: np.ndarray, shape: RouteShape) -> np.ndarray | None:
    """[total, moe_layers, topk] float32, 0 for padding and for sequences without; None where all are."""
    if all(sample.gates is None for sample in samples):
        return None
    gates = np.zeros((int(borders[-1]), len(shape.moe_layers), shape.topk), np.float32)
    for sample, start in zip(samples, borders, strict=False):
        if sample.gates is not None:
            gates[start : start + sample.inputs] = sample.gates
    return gates


def _missing(routes: np.ndarray) -> np.ndarray:
    return ~has_route(torch.from_numpy(routes[:, 0])).numpy()


def _route_table(
    samples: list[Sequence],
    routes: np.ndarray,
    borders: np.ndarray,
    mask: np.ndarray,
    local: np.ndarray,
    layout: Layout,
    shape: RouteShape,
) -> RouteTable:
    """Route table of the tokens that sequence parallelism leaves to this process."""
    own = np.split(local, layout.tensor)[layout.tensor_rank]
    cached = np.full(len(mask), -1)  # where a token's features lie among all that the engine has sent
    of_samples = _features(samples)
    from_engine = [f for f in of_samples if f is not None]
    hidden_too = all(f.hidden.shape[-1] for f in from_engine)
    sent = 0
    for sample, of_sample, start in zip(samples, of_samples, borders, strict=False):
        first = start + sample.prompt_length - 1
        if from_engine:
            rows = first + (np.arange(0) if of_sample is None else of_sample.positions.numpy())
        else:
            rows = first + np.flatnonzero(sample["loss_mask"])
            rows = rows[evenly_spaced(len(rows), layout.cached_tokens)]
        cached[rows] = np.arange(sent, sent + len(rows))
        sent += len(rows)
    rows = np.flatnonzero(cached[own] >= 0)
    features = {}
    if from_engine:
        chosen = torch.from_numpy(cached[own][rows])
        logits = torch.cat([f.logits for f in from_engine])[chosen]
        hidden = torch.cat([f.hidden for f in from_engine])[chosen] if hidden_too else None
        features = {
            layer: Features(None if hidden is None else hidden[:, column], logits[:, column], None)
            for column, layer in enumerate(shape.moe_layers)
        }
    gates = _engine_gates(samples, borders, shape)
    return RouteTable(
        shape,
        counted=torch.from_numpy(mask[own]),
        cached=torch.from_numpy(rows),
        counted_rows=torch.from_numpy(np.flatnonzero(mask[own])),
        engine=None if _missing(routes).all() else torch.from_numpy(routes[own]),
        gates=None if gates is None else torch.from_numpy(gates[own]),
        features=features,
    )


def _features(samples: list[Sequence]) -> list[RouterFeatures | None]:
    """The engine's router inputs and logits of each sequence. Logits alone are left out beside hidden states of others.

    A predictor learns from both: hidden states of the trainer's own pass would be another thing than the engine's logits.
    """
    found = [sample.features for sample in samples]
    whole = any(f is not None and f.hidden.shape[-1] for f in found)
    return [f if f is not None and (f.hidden.shape[-1] or not whole) else None for f in found]


def _zigzag(start: int, end: int, layout: Layout) -> np.ndarray:
    """Positions of [start, end) on this context-parallel rank: chunks r and 2c-1-r of 2c."""
    if layout.context == 1:
        return np.arange(start, end)
    chunks = np.split(np.arange(start, end), 2 * layout.context)
    return np.concatenate([chunks[layout.context_rank], chunks[2 * layout.context - 1 - layout.context_rank]])


def pack_all(samples: list[Sequence], count: int, layout: Layout) -> list[Batch]:
    """Share samples over `count` micro-batches of about equal length and pack each."""
    bins = assign([s.inputs for s in samples], count)
    return [pack(samples, indices, layout) for indices in bins]


# -- labels --------------------------------------------------------------------------------------------------------------
# A value of each label, out of packed micro-batches and back: for what looks along whole sequences, as advantages do.


class Labels:
    """All labels of some sequences behind each other, [L], and where micro-batches have them."""

    def __init__(self, sequences: Items[Sequence]) -> None:
        self.lengths = torch.tensor([s.response_length for s in sequences], dtype=torch.long)
        self._starts = self.lengths.cumsum(0) - self.lengths
        self._prompts = torch.tensor([s.prompt_length for s in sequences], dtype=torch.long)
        self.count = int(self.lengths.sum())
        self._sequences = sequences

    def of(self, name: str) -> Tensor:
        """[L] values of a field, as the sequences have them."""
        parts = [sequence[name] for sequence in self._sequences]
        return torch.from_numpy(np.concatenate([np.zeros(0, FIELDS[name].dtype), *parts]))

    def ends(self) -> Tensor:
        """[L] bool: the last label of each sequence, of which each has one."""
        found = torch.zeros(self.count, dtype=torch.bool)
        found[self._starts + self.lengths - 1] = True
        return found

    def places(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """(tokens of a batch that is packed from the sequences and predict a label [n], the labels [n]); on the host."""
        ids, positions = batch.segments.ids.cpu(), batch.position_ids[0].cpu()
        tokens = (ids >= 0).nonzero()[:, 0]
        sequence = torch.tensor(batch.samples, dtype=torch.long)[ids[tokens]]
        label = positions[tokens] - self._prompts[sequence] + 1
        inside = label >= 0
        return tokens[inside], (self._starts[sequence] + label)[inside]

    def collect(self, batches: Items[Batch], values: Items[Tensor | None]) -> Tensor:
        """[L] fp32 on the host, of values [T] of each batch; 0 where this process has none."""
        found = torch.zeros(self.count)
        for batch, of_batch in zip(batches, values, strict=True):
            if of_batch is not None:
                tokens, labels = self.places(batch)
                found[labels] = of_batch.detach().float().cpu()[tokens]
        return found

    def give(self, batches: Items[Batch], name: str, values: Tensor) -> None:
        """Set a field of the batches to values [L]."""
        for batch in batches:
            tokens, labels = self.places(batch)
            declared = FIELDS[name]
            field = torch.full(batch.mask.shape, declared.default, dtype=torch.float32)
            field[tokens] = values[labels].float()
            batch.fields[name] = field.to(batch.mask.device)

    def rows(self, values: Tensor) -> Tensor:
        """Values [L] as one row for each sequence, [B, T], with zeros behind its end."""
        longest = int(self.lengths.max()) if len(self.lengths) else 0
        rows = values.new_zeros(len(self.lengths), longest)
        rows[self._inside(longest)] = values
        return rows

    def flat(self, rows: Tensor) -> Tensor:
        """[B, T] -> [L]."""
        return rows[self._inside(rows.shape[1])]

    def _inside(self, longest: int) -> Tensor:
        return torch.arange(longest) < self.lengths[:, None]
