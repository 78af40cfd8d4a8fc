"""Layout of the tokens of a packed micro-batch: positions, and Megatron's zigzag order under context parallelism.

With c context-parallel ranks each sequence (padded to a multiple of 2c) is cut into 2c chunks, and rank r holds the chunks r
and 2c-1-r. Causal attention then costs the same on each rank. The layout is built on the host while sequences are packed,
because on a GPU every step would have to wait for the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_rl.ops.device import upload
from megatron_rl.ops.sink_attention import PackedSequences


@dataclass(frozen=True)
class OwnQueries:
    """Queries of this rank and the keys that they may attend to, after keys and values of all ranks were gathered."""

    queries: PackedSequences
    """Borders of this rank's T tokens; each chunk counts as a sequence."""
    keys: PackedSequences
    """Borders of `rows`: each chunk attends to the keys of its sequence up to the chunk's end."""
    rows: torch.Tensor
    """[n] int64: indices into the gathered tokens of all ranks. The first tokens of a sequence occur twice, once for each of
    the two chunks."""

    def to(self, device: torch.device) -> OwnQueries:
        """Copy to `device` without waiting for it."""
        return OwnQueries(self.queries.to(device), self.keys.to(device), upload(self.rows, device))


@dataclass(frozen=True)
class TokenPlaces:
    """Layout of one micro-batch on one context-parallel rank, with T tokens on this rank and c * T in total."""

    cu_seqlens: torch.Tensor
    """[S + 1] int64: starts of the whole (padded) sequences, then c * T."""
    order: torch.Tensor
    """[c, T] int64: entry [r, t] is the index, in the whole micro-batch, of the t-th token on rank r."""
    positions: torch.Tensor
    """[T] int64: position of each token of this rank in its own sequence."""
    sequences: PackedSequences
    """The same whole (padded) sequences, in the form that attention needs."""
    place: torch.Tensor
    """[c * T] int64: index of each token of the whole micro-batch among the gathered tokens of all ranks (inverse of order)."""
    own: OwnQueries | None
    """Queries of this rank; None without context parallelism."""

    def to(self, device: torch.device) -> TokenPlaces:
        """Copy to `device` without waiting for it."""
        return TokenPlaces(
            upload(self.cu_seqlens, device),
            upload(self.order, device),
            upload(self.positions, device),
            self.sequences.to(device),
            upload(self.place, device),
            self.own.to(device) if self.own is not None else None,
        )

    @classmethod
    def build(cls, cu_seqlens: torch.Tensor, tokens: int, context: int = 1, rank: int = 0) -> TokenPlaces:
        """Build the layout for one rank. cu_seqlens: [S + 1]; padding after the last sequence becomes one more sequence.

        Errors: ValueError if a sequence cannot be cut into 2 * context chunks, or if there are too few token places.
        """
        starts = cu_seqlens.to(torch.int64)
        rest = tokens * context - starts[-1:]
        if int(rest) != 0:
            starts = torch.cat([starts, starts[-1:] + rest])
        lengths = starts.diff()
        if bool((lengths < 0).any()):
            raise ValueError(
                f"packed sequences of {int(starts[-1] - rest)} tokens do not fit {tokens} x {context} places"
            )
        if context > 1 and bool((lengths % (2 * context) != 0).any()):
            raise ValueError(f"context parallelism of {context} needs sequences padded to multiples of {2 * context}")
        whole = torch.arange(tokens * context, device=starts.device)
        position = whole - starts[:-1].repeat_interleave(lengths)
        sequences = PackedSequences.of(starts, starts.device)
        if context == 1:
            return cls(starts, whole[None], position, sequences, whole, None)
        chunk = position // (lengths // (2 * context)).clamp(min=1).repeat_interleave(lengths)
        owner = torch.minimum(chunk, 2 * context - 1 - chunk)
        order = owner.argsort(stable=True).view(context, tokens)
        place = torch.empty_like(whole)
        place[order.view(-1)] = whole
        own = _own_queries(sequences, place, context, rank)
        return cls(starts, order, position[order[rank]], sequences, place, own)


def _own_queries(sequences: PackedSequences, place: torch.Tensor, context: int, rank: int) -> OwnQueries:
    """Build the queries of this rank: its two chunks of each sequence, in the order in which it holds them."""
    starts, chunks = sequences.borders[:-1], sequences.borders.diff() // (2 * context)
    which = chunks.new_tensor([rank + 1, 2 * context - rank])
    keys = (chunks[:, None] * which).view(-1)  # number of keys of the sequence up to the end of the chunk
    queries = chunks.repeat_interleave(2)
    key_borders = _borders(keys)
    first = starts.repeat_interleave(2) - key_borders[:-1]
    rows = torch.arange(int(key_borders[-1])) + first.repeat_interleave(keys)
    own, keys = (PackedSequences.of(borders, place.device) for borders in (_borders(queries), key_borders))
    return OwnQueries(own, keys, place[rows.to(place.device)])


def _borders(lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
