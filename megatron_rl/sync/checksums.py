"""Checksums that the engine must report after a push, computed from the Hugging Face tensors that the trainer sent.

The engine hashes the weights that it serves, after loading, fusing and sharding them. The trainer hashes the tensors that it
sends. `megatron_rl_plugin.fingerprint` describes the hash, and why the hash of a fused tensor is a sum over its parts.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby

import torch
from megatron_rl_plugin.fingerprint import (
    MODULUS,
    PREFIX,
    as_matrix,
    below,
    fingerprint_tensor,
    to_integers,
)
from torch import Tensor

from megatron_rl.models.families import EXPERT_LINEARS, FAMILIES, LINEARS, STACKS, stack_of

# -- slots ---------------------------------------------------------------------------------------------------------------
# A slot is the place of a Hugging Face tensor in SGLang's own parameters: q, k, v in qkv_proj, experts in w13_weight and
# w2_weight. SGLang fuses by rows: the parts of a parameter are stacked in the order of their positions. The rules use the
# module names of the families (`models.families`). The scales of FP8 blocks are stacked like the weights that they belong to.


PREDICTOR_WEIGHT = ".predictor.weight"
"""Suffix of the names of route predictors (`megatron_rl_models`)."""
_IN_ONE_CALL = {linear.stacked_in for linear in LINEARS.values() if linear.in_one_call}
"""Parameters whose two halves SGLang fuses within one load_weights call. A half that arrives alone is lost."""
_SHARED_EXPERTS = tuple({f".{family.moe.shared_experts}" for family in FAMILIES.values() if family.moe})


@dataclass(frozen=True)
class Slot:
    """Position of a Hugging Face tensor in the engine's own parameters, which may be fused or hold all experts."""

    parameter: str
    expert: int = 0
    part: int = 0
    """Position among the tensors that are stacked into one expert (or into a parameter without experts)."""
    parts: int = 1
    """Number of tensors that are stacked into one expert. Set only for parameters with experts."""
    all_experts: bool = False
    """True if the tensor holds all experts: [E, ...]."""
    transposed: bool = False
    """True if the engine stores the last two dimensions in swapped order (gpt-oss)."""


def locate(name: str, parameters: dict[str, tuple[int, ...]]) -> Slot | None:
    """Return the position of Hugging Face tensor `name` in the engine's parameters {name: local shape}; None if it has none."""
    if name in parameters:
        return Slot(name)
    if match := re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)\.weight(_scale_inv)?", name):
        prefix, expert, module, scale = match.groups()
        if (linear := EXPERT_LINEARS.get(module)) is None:
            return None
        fused, parts = f"{prefix}.{linear.stacked_in}{scale or ''}", 2 if linear.stacked_in == "w13_weight" else 1
        slot = Slot(fused, int(expert), linear.place, parts)
    elif (found := stack_of(name)) and found[1] in ("", "_bias"):
        prefix, (module, bias) = name.rpartition(".")[0], found
        fused = f"{prefix}.{STACKS[module].stacked_in}{bias}"
        slot = Slot(fused, all_experts=True, transposed=not bias and _experts_are_transposed(prefix, parameters))
    elif match := re.fullmatch(r"(.+)\.(\w+)\.(weight|bias|weight_scale_inv)", name):
        prefix, module, kind = match.groups()
        linear = LINEARS.get(module)
        slot = Slot(f"{prefix}.{linear.stacked_in}.{kind}", part=linear.place) if linear else Slot(name)
        if slot.parameter not in parameters and prefix.endswith(_SHARED_EXPERTS):
            # SGLang may serve the single shared expert as the last routed expert.
            experts = prefix.rpartition(".")[0] + ".experts"
            last = parameters.get(f"{experts}.w2_weight", (0,))[0] - 1
            return locate(f"{experts}.{last}.{module}.{kind}", parameters)
    else:
        return None
    return slot if slot.parameter in parameters else None


def _experts_are_transposed(prefix: str, parameters: dict[str, tuple[int, ...]]) -> bool:
    """Return whether the engine stores gpt-oss's experts [E, in, out] transposed, as [E, out, in].

    With its Triton kernels, SGLang does not transpose them. Experts of all other families have no biases and are [E, out, in]
    in trainer and engine.
    """
    if f"{prefix}.w13_weight_bias" not in parameters:
        return False
    twice_intermediate, hidden = parameters[f"{prefix}.w13_weight_bias"][1], parameters[f"{prefix}.w2_weight_bias"][1]
    if hidden != twice_intermediate:
        return parameters[f"{prefix}.w13_weight"][2] == hidden
    return parameters[f"{prefix}.w2_weight"][1] == hidden  # w13 is square, so w2 is not


def _in_one_call(parameter: str) -> bool:
    return not _IN_ONE_CALL.isdisjoint(parameter.split("."))


def keep_together(
    named_tensors: Iterable[tuple[str, Tensor]], slot_of: Callable[[str], Slot | None]
) -> Iterator[list[tuple[str, Tensor]]]:
    """Yield groups of tensors that the engine must load in one call: DeepSeek's two low-rank halves, else single tensors."""
    waiting: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in named_tensors:
        slot = slot_of(name)
        if slot is None or not _in_one_call(slot.parameter):
            yield [(name, tensor)]
            continue
        group = waiting.setdefault(slot.parameter, [])
        group.append((name, tensor))
        if len(group) == 2:
            yield waiting.pop(slot.parameter)
    yield from waiting.values()


# -- checksums -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class EngineParameter:
    """An engine parameter on one of the tensor-parallel ranks: fingerprint (value), dtype and local shape."""

    value: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def has_experts(self) -> bool:
        """True if the shape is [experts on this rank, rows of an expert, columns]."""
        return len(self.shape) == 3


class WeightsDigest:
    """A digest of a model's weights. It does not depend on the parallel layout, and weights are rounded to one dtype first."""

    def __init__(self, dtype: torch.dtype) -> None:
        """Start an empty digest. dtype: the engine's dtype, to which weights are rounded."""
        self._dtype = dtype
        self._values: dict[str, Tensor] = {}

    def watch(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the given Hugging Face tensors unchanged and add each to the digest. All-zero tensors do not affect it."""
        for name, tensor in named_tensors:
            seen = tensor if name.endswith(PREDICTOR_WEIGHT) else tensor.to(self._dtype)
            self._values[name] = fingerprint_tensor(seen)
            yield name, tensor

    def __str__(self) -> str:
        """Return the digest in hexadecimal; '' if no tensor was watched."""
        values = dict(zip(self._values, to_integers(list(self._values.values())), strict=True))
        nonzero = sorted((name, value) for name, value in values.items() if value)  # 0: all elements are zero
        return hashlib.sha256(repr(nonzero).encode()).hexdigest()[:16] if nonzero else ""


def parse(text: str) -> EngineParameter | None:
    """Parse a checksum in the format of `fingerprint.describe`. Returns None for the SHA-256 of a server without the plugin."""
    prefix, *fields = text.split(":")
    if prefix != PREFIX:
        return None
    value, dtype, shape = fields
    return EngineParameter(int(value, 16), getattr(torch, dtype), tuple(int(size) for size in shape.split(",") if size))


@dataclass(frozen=True)
class _Piece:
    """Fingerprints of one pushed tensor (or of one expert in it), computed in blocks of the size that a rank may hold."""

    slot: Slot
    name: str
    rows: int
    """Number of rows of one block."""
    hashes: list
    """Fingerprints of the blocks: scalar int64 tensors until `ExpectedChecksums.collect` replaces them by Python numbers."""
    by_columns: bool


class ExpectedChecksums:
    """Collects the pushed tensors and compares them with the engine's checksums.

    Tensor parallelism cuts the rows or columns of the pushed tensors into shards. Each rank must hold one of these shards, and
    some rank must hold each shard. The shapes that the engine reports show how it cut the tensors. The same rule covers expert
    parallelism and replicated parameters (norms, routers, and key-value heads if there are more ranks than heads).
    """

    def __init__(self, engine: list[dict[str, EngineParameter]], slot_of: Callable[[str], Slot | None]) -> None:
        """Start without expected tensors.

        engine: one dict (name -> parameter) per tensor-parallel rank, as the engine reported them at connection. slot_of:
        returns a tensor's position in the engine (`locate`).
        """
        self._engine = engine[0]
        self._ranks = len(engine)
        self._slot_of = slot_of
        self._pieces: dict[str, list[_Piece]] = defaultdict(list)
        self._on_device: list[_Piece] = []

    def add(self, name: str, tensor: Tensor) -> None:
        """Add a full tensor, in the engine's dtype, that the trainer sends. The call does not wait for the tensor's device."""
        slot = self._slot_of(name)
        if slot is None:
            raise KeyError(name)  # `WeightSync` refuses such a tensor before
        parameter = self._engine[slot.parameter]
        tensor = tensor.transpose(-1, -2) if slot.transposed else tensor
        if slot.all_experts:
            parts = [part[None] if part.dim() == 1 else part for part in tensor]
            pieces = [self._piece(Slot(slot.parameter, e), name, part, parameter) for e, part in enumerate(parts)]
        else:
            pieces = [self._piece(slot, name, tensor, parameter)]
        self._pieces[slot.parameter] += pieces
        self._on_device += pieces

    def collect(self) -> None:
        """Copy the fingerprints added since the last call to the host, with one wait for the device."""
        hashes = iter(to_integers([h for piece in self._on_device for h in piece.hashes]))
        for piece in self._on_device:
            piece.hashes[:] = [next(hashes) for _ in piece.hashes]
        self._on_device = []

    def _piece(self, slot: Slot, name: str, tensor: Tensor, parameter: EngineParameter) -> _Piece:
        matrix = as_matrix(tensor)
        rows, columns = matrix.shape
        local_rows, local_columns = _matrix_shape(parameter.shape)
        if local_columns < columns:
            blocks = matrix.split(local_columns, dim=1)
            return _Piece(slot, name, rows, [fingerprint_tensor(block) for block in blocks], by_columns=True)
        size = rows
        if parameter.has_experts:
            size = min(rows, parameter.shape[1] // slot.parts)
        elif slot.parameter == name:
            size = min(rows, local_rows)  # a vocabulary is padded to equal shards: its rows do not tell the cuts
        else:  # one cut per rank, or fewer if ranks share key-value heads
            size = rows // math.gcd(rows, self._ranks)
        return _Piece(slot, name, size, [fingerprint_tensor(block) for block in matrix.split(size)], by_columns=False)

    def mismatches(self, engine: list[dict[str, EngineParameter]]) -> list[str]:
        """Return all parameters that differ, each with the pushed tensors that it consists of; [] if there are none."""
        self.collect()
        found = []
        for parameter in self._engine:
            names = sorted({piece.name for piece in self._pieces[parameter]})
            if not names:
                found.append(f"{parameter} (nothing was pushed for it)")
                continue
            held = {rank[parameter].value for rank in engine if parameter in rank}
            if parameter.endswith(".w2_weight_bias") and len(engine) > 1:
                held.discard(0)  # added after the sum over ranks, so SGLang keeps it on one rank
            if held not in self._shards(parameter):
                origin = "" if names == [parameter] else f" (from {_summary(names)})"
                found.append(parameter + origin)
        return found

    def _shards(self, name: str) -> list[set[int]]:
        """Return the fingerprints of a parameter that the engine's ranks must hold: one set for each possible way to cut it.

        A set holds one fingerprint per distinct shard.
        """
        pieces = sorted(self._pieces[name], key=lambda piece: (piece.slot.expert, piece.slot.part))
        parameter = self._engine[name]
        if not parameter.has_experts:
            return _shards_of_parts(pieces, _matrix_shape(parameter.shape)[0], self._ranks)
        # A rank has a run of whole experts, or the same cut of every expert, or both. The distance between parts is constant,
        # but may exceed their rows, because SGLang pads parts if a kernel needs multiples.
        local_experts, distance = parameter.shape[0], parameter.shape[1] // pieces[0].slot.parts
        by_expert = [list(parts) for _, parts in groupby(pieces, key=lambda piece: piece.slot.expert)]
        found = {
            _stack([(distance, [piece.hashes[cut]]) for parts in by_expert[i : i + local_experts] for piece in parts])
            for i in range(0, len(by_expert), local_experts)
            for cut in range(min(len(piece.hashes) for piece in pieces))
        }
        return [found]


def _shards_of_parts(pieces: list[_Piece], local_rows: int, ranks: int) -> list[set[int]]:
    """Return `ExpectedChecksums._shards` of a parameter without experts.

    A rank holds local_rows rows, or a cut of the columns.
    """
    if pieces[0].by_columns:
        cuts = range(len(pieces[0].hashes))
        return [{_stack([(piece.rows, [piece.hashes[cut]]) for piece in pieces]) for cut in cuts}]
    total = sum(piece.rows * len(piece.hashes) for piece in pieces)
    if local_rows >= total:
        # On one rank, each part may have the same padding: SGLang pads shared experts like this without a GPU.
        padding = (local_rows - total) // len(pieces) if ranks == 1 else 0
        return [{_stack([(piece.rows + padding, piece.hashes) for piece in pieces])}]
    if len(pieces) == 1 and pieces[0].rows == local_rows:
        return [{*pieces[0].hashes, *([0] if ranks > len(pieces[0].hashes) else [])}]  # 0: a rank with padding only
        # Either all pieces are cut alike, or queries are cut and ranks share key-value heads. Shapes may allow both.
    ways = []
    if total % local_rows == 0 and ranks % (total // local_rows) == 0:
        ways.append([total // local_rows] * len(pieces))
    first, *others = pieces
    rest = (local_rows - first.rows) // max(1, len(others))
    if rest > 0:
        ways.append([len(first.hashes), *(piece.rows * len(piece.hashes) // rest for piece in others)])
    possible = [
        cuts for cuts in ways if all(cut and not len(p.hashes) % cut for p, cut in zip(pieces, cuts, strict=True))
    ]
    return [{_stack(_held(pieces, cuts, rank)) for rank in range(max(cuts))} for cuts in possible]


def _held(pieces: list[_Piece], cuts: list[int], rank: int) -> list[tuple[int, list[int]]]:
    """Return each piece's blocks on rank `rank` of max(cuts). Neighboring ranks share the blocks of a piece with fewer cuts."""
    held = []
    for piece, cut in zip(pieces, cuts, strict=True):
        blocks, part = len(piece.hashes) // cut, rank * cut // max(cuts)
        held.append((piece.rows, piece.hashes[part * blocks : (part + 1) * blocks]))
    return held


def _stack(blocks: list[tuple[int, list[int]]]) -> int:
    """Return the fingerprint of blocks stacked by rows, given as (rows of a block, fingerprints)."""
    value = offset = 0
    for rows, hashes in blocks:
        for block in hashes:
            value += below(block, offset)
            offset += rows
    return value % MODULUS


def _matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    *rows, columns = shape if len(shape) > 1 else (*shape, 1)
    return math.prod(rows), columns


def _summary(names: list[str]) -> str:
    return ", ".join(dict.fromkeys(re.sub(r"\.experts\.\d+\.", ".experts.*.", name) for name in names))
