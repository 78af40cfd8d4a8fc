"""Packing of sequences into micro-batches in THD layout. The only padding is the one that the parallel layout requires."""

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
"""Label at positions whose prediction the loss does not use."""


@dataclass(frozen=True)
class Layout:
    """Requirements of the parallel layout and of the model's routers for a packed micro-batch."""

    tensor: int = 1
    context: int = 1
    context_rank: int = 0
    pad_token: int = 0
    tensor_rank: int = 0
    routes: RouteShape | None = None
    """Shape of the model's routes; None for a dense model."""
    cached_tokens: int = 0
    """Number of tokens per response for which router features are stored."""
    multiple: int = 1
    """Divisor of the number of tokens in a rank's matrix multiplications, as FP8 kernels require."""
    vocabulary: int | None = None
    """Size of the model's vocabulary, which all token ids must be below. None: ids are not checked."""
    all_reduce: AllReduce | None = None
    """All-reduce over the context-parallel ranks; None without context parallelism."""

    @property
    def sequence_multiple(self) -> int:
        """Divisor of a sequence's length: Megatron's zigzag order cuts each sequence into 2 x context chunks."""
        return 2 * self.context if self.context > 1 else 1

    @property
    def total_multiple(self) -> int:
        """Divisor of a micro-batch's length: sequence parallelism cuts this rank's tokens into `tensor` equal parts."""
        return math.lcm(self.sequence_multiple, self.tensor * self.context * self.multiple)


@dataclass
class Batch:
    """One packed micro-batch, as this context-parallel rank sees it.

    The batch has T tokens of S sequences, which follow one another. With context parallelism, T counts the tokens of this rank
    only. All per-token fields are in *label position*: entry t belongs to the token that position t predicts.
    """

    tokens: torch.Tensor
    """Token ids, [1, T] int64."""
    position_ids: torch.Tensor
    """Positions in the sequence, counted from 0, [1, T] int64."""
    labels: torch.Tensor
    """Token ids to predict, [T] int64. IGNORED outside of responses and at labels that the loss does not use; the head skips
    these rows."""
    label_rows: torch.Tensor
    """Rows of the labels that are not ignored, [n] int64. They are stored, because searching for them on a GPU would block the
    host."""
    fields: dict[str, torch.Tensor]
    """Values of each label, [T], by a name in `data.sequence.FIELDS`. A forward pass stores its results here, on the pipeline
    stage that computes them."""
    segments: Segments
    """Index of each token's sequence (0 to S - 1)."""
    cu_seqlens: torch.Tensor
    """Borders of the sequences over *all* context-parallel ranks, [S' + 1] int32. A sequence's padding lies within its borders.
    Padding at the end of the micro-batch counts as one more sequence."""
    places: TokenPlaces
    """Borders of the sequences for attention, and the positions of this rank's tokens."""
    max_seqlen: int
    sequence_lengths: torch.Tensor
    """Number of labels that the loss uses in each whole sequence, [S] float32."""
    samples: list[int]
    """Index of each of the S sequences in the list that was packed."""
    inputs: int
    """Number of tokens on this rank, without padding."""
    kept: KeptTokens | None = None
    """Set of tokens that the sampler kept, for each of the T tokens; None if the sampler did not truncate."""
    routes: RouteTable | None = None
    """Routes of the tokens that this process's routers process (a shard of T with sequence parallelism); None for a dense
    model."""
    without_route: int = 0
    """Number of tokens on this context-parallel rank whose routes the engine did not report."""
    teacher_hidden: torch.Tensor | None = None
    """Last hidden states of the teacher at label_rows, [n, hidden of the teacher], on the pipeline stage with the head."""
    teacher_layers: dict[int, torch.Tensor] = field(default_factory=dict)
    """{layer of the teacher: its outputs [m, hidden]} at the m labels that the loss uses in this process's shard of T."""
    top_token_ids: torch.Tensor | None = None
    """Recorded most likely tokens of a teacher at label_rows, [n, k] int32, -1 if missing; None if no sequence has any."""
    top_log_probs: torch.Tensor | None = None
    """Log-probs of `top_token_ids`, [n, k] fp32."""

    def __getitem__(self, name: str) -> torch.Tensor:
        """Return the values [T] of a field."""
        return self.fields[name]

    @property
    def mask(self) -> torch.Tensor:
        """True for labels that the loss uses, [T] bool."""
        return self.fields["loss_mask"]

    def to(self, device: torch.device) -> Batch:
        """Move the batch to a device."""
        movable = (RouteTable, KeptTokens, TokenPlaces)
        moved: dict[str, Any] = {k: v.to(device) for k, v in vars(self).items() if isinstance(v, movable)}
        moved |= {k: upload(v, device) for k, v in vars(self).items() if isinstance(v, torch.Tensor)}
        moved["fields"] = {name: upload(values, device) for name, values in self.fields.items()}
        return replace(self, **moved, segments=replace(self.segments, ids=upload(self.segments.ids, device)))

    def take(self, rows: torch.Tensor) -> Batch:
        """Return a batch of the tokens `rows` [n] only, for per-token losses. Values of whole sequences stay unchanged."""
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
    """Return the smallest number of micro-batches for which `assign` stays within `budget` tokens per micro-batch."""
    if not lengths:
        return 1
    count = max(1, math.ceil(sum(lengths) / budget))
    while max(sum(lengths[i] for i in b) for b in assign(lengths, count)) > budget and count < len(lengths):
        count += 1
    return count


def assign(lengths: list[int], count: int) -> list[list[int]]:
    """Distribute sequences over `count` bins: longest first, each to the emptiest bin (the LPT rule).

    Indices ascend within a bin.
    """
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
    """Pack samples[i] for i in indices into one micro-batch. An empty list gives a micro-batch of padding only.

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
    """Raise UserError for a token outside the vocabulary. Without this check, a GPU would crash without naming the token."""
    if vocabulary is None:
        return
    wrong = np.flatnonzero((sample.tokens < 0) | (sample.tokens >= vocabulary))
    if len(wrong):
        raise UserError(
            f"data: token {sample.tokens[wrong[0]]} at position {wrong[0]} of a sequence is outside the model's vocabulary of"
            f" {vocabulary}; the data or the rollout engine uses the tokenizer of another model"
        )


def _kept_tokens(samples: list[Sequence], borders: np.ndarray, local: np.ndarray) -> KeptTokens | None:
    """Return the sets of tokens that the sampler kept for this context-parallel rank's tokens.

    The result is None if no sampler truncated the vocabulary.
    """
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
    """Return the teacher's recorded log-probs for the labels at positions `places` of the packed tokens.

    The result is None if no sample has a record.
    """
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
    if vocabulary is not None:  # ids above it are padding rows of the teacher's embeddings, which stand for no token
        ids = np.where(ids < vocabulary, ids, -1)
    return TopLogProbs(ids, whole.log_probs[places])


def _engine_routes(samples: list[Sequence], indices: list[int], borders: np.ndarray, shape: RouteShape) -> np.ndarray:
    """Return routes [total, moe_layers, topk], with sentinels for padding and for sequences without routes."""
    routes = shape.empty(int(borders[-1]))
    for i, start in zip(indices, borders, strict=False):
        if samples[i].routes is not None:
            routes[start : start + samples[i].inputs] = samples[i].routes
    return routes


def _engine_gates(samples: list[Sequence], borders: np.ndarray, shape: RouteShape) -> np.ndarray | None:
    """Return gates [total, moe_layers, topk] float32; None if no sequence has gates. Unknown gates and padding are 0."""
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
    """Build the route table of the tokens that sequence parallelism assigns to this process."""
    own = np.split(local, layout.tensor)[layout.tensor_rank]
    cached = np.full(len(mask), -1)  # index of a token's features among all features of these samples
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
    """Return the engine's router features of each sequence, for training a predictor.

    A predictor needs hidden states and logits from the same forward pass. If any sequence has hidden states, sequences that
    have only logits get None: the trainer's own hidden states would not match the engine's logits.
    """
    found = [sample.features for sample in samples]
    whole = any(f is not None and f.hidden.shape[-1] for f in found)
    return [f if f is not None and (f.hidden.shape[-1] or not whole) else None for f in found]


def _zigzag(start: int, end: int, layout: Layout) -> np.ndarray:
    """Return the positions in [start, end) that this context-parallel rank holds.

    Rank r of c ranks holds chunks r and 2c-1-r of 2c chunks (zigzag).
    """
    if layout.context == 1:
        return np.arange(start, end)
    chunks = np.split(np.arange(start, end), 2 * layout.context)
    return np.concatenate([chunks[layout.context_rank], chunks[2 * layout.context - 1 - layout.context_rank]])


def pack_all(samples: list[Sequence], count: int, layout: Layout) -> list[Batch]:
    """Distribute samples over `count` micro-batches of about equal length, and pack each micro-batch."""
    bins = assign([s.inputs for s in samples], count)
    return [pack(samples, indices, layout) for indices in bins]


# -- labels --------------------------------------------------------------------------------------------------------------
# One value per label, collected from packed micro-batches and written back, for code that works along whole sequences
# (for example advantages).


class Labels:
    """All labels of some sequences, concatenated ([L]), and their positions in micro-batches."""

    def __init__(self, sequences: Items[Sequence]) -> None:
        self.lengths = torch.tensor([s.response_length for s in sequences], dtype=torch.long)
        self._starts = self.lengths.cumsum(0) - self.lengths
        self._prompts = torch.tensor([s.prompt_length for s in sequences], dtype=torch.long)
        self.count = int(self.lengths.sum())
        self._sequences = sequences

    def of(self, name: str) -> Tensor:
        """Return the values [L] of a field, concatenated over the sequences."""
        parts = [sequence[name] for sequence in self._sequences]
        return torch.from_numpy(np.concatenate([np.zeros(0, FIELDS[name].dtype), *parts]))

    def ends(self) -> Tensor:
        """Return a mask [L] bool of the last label of each sequence. Each sequence needs at least one label."""
        found = torch.zeros(self.count, dtype=torch.bool)
        found[self._starts + self.lengths - 1] = True
        return found

    def places(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """Return (tokens of a batch that predict a label [n], indices of these labels [n]) in host memory.

        The batch must be packed from the sequences.
        """
        ids, positions = batch.segments.ids.cpu(), batch.position_ids[0].cpu()
        tokens = (ids >= 0).nonzero()[:, 0]
        sequence = torch.tensor(batch.samples, dtype=torch.long)[ids[tokens]]
        label = positions[tokens] - self._prompts[sequence] + 1
        inside = label >= 0
        return tokens[inside], (self._starts[sequence] + label)[inside]

    def collect(self, batches: Items[Batch], values: Items[Tensor | None]) -> Tensor:
        """Collect the batches' values [T] as [L] fp32 in host memory; 0 for labels that this process does not have."""
        found = torch.zeros(self.count)
        for batch, of_batch in zip(batches, values, strict=True):
            if of_batch is not None:
                tokens, labels = self.places(batch)
                found[labels] = of_batch.detach().float().cpu()[tokens]
        return found

    def give(self, batches: Items[Batch], name: str, values: Tensor) -> None:
        """Set the field `name` of the batches from values [L]."""
        for batch in batches:
            tokens, labels = self.places(batch)
            declared = FIELDS[name]
            field = torch.full(batch.mask.shape, declared.default, dtype=torch.float32)
            field[tokens] = values[labels].float()
            batch.fields[name] = field.to(batch.mask.device)

    def rows(self, values: Tensor) -> Tensor:
        """Arrange values [L] as one row per sequence, [B, longest], with zeros after the end of each sequence."""
        longest = int(self.lengths.max()) if len(self.lengths) else 0
        rows = values.new_zeros(len(self.lengths), longest)
        rows[self._inside(longest)] = values
        return rows

    def flat(self, rows: Tensor) -> Tensor:
        """Flatten the rows to values [L]; the inverse of `rows`."""
        return rows[self._inside(rows.shape[1])]

    def _inside(self, longest: int) -> Tensor:
        return torch.arange(longest) < self.lengths[:, None]
