"""Where each token of a packed micro-batch lies: positions, and Megatron's zigzag order under context parallelism.

With context parallelism of c ranks each sequence (padded to a multiple of 2c) is cut into 2c chunks, and rank r holds
the chunks r and 2c-1-r: causal work is then the same on each rank. Built on the host, where the sequences are packed: a
GPU would have to be waited for at every step of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_rl.ops.device import upload
from megatron_rl.ops.sink_attention import PackedSequences


@dataclass(frozen=True)
class OwnQueries:
    """This rank's queries and the keys that they may see, when keys and values of all ranks are at hand."""

    queries: PackedSequences
    """Borders of this rank's T tokens: each chunk of a sequence is a sequence of its own."""
    keys: PackedSequences
    """Borders of `rows`: the keys of a chunk are those of its sequence up to the chunk's end."""
    rows: torch.Tensor
    """[n] int64: places in the ranks' joined tokens; a sequence's first ones twice, once for each of its two chunks."""

    def to(self, device: torch.device) -> OwnQueries:
        """The same on `device`, without waiting for it."""
        return OwnQueries(self.queries.to(device), self.keys.to(device), upload(self.rows, device))


@dataclass(frozen=True)
class TokenPlaces:
    """One micro-batch on one context-parallel rank. T tokens on this rank, c * T in all."""

    cu_seqlens: torch.Tensor
    """[S + 1] int64: starts of the whole (padded) sequences, c * T at the end."""
    order: torch.Tensor
    """[c, T] int64: token of the whole micro-batch that rank r holds at place t."""
    positions: torch.Tensor
    """[T] int64: position of each token of this rank in its own sequence."""
    sequences: PackedSequences
    """The whole (padded) sequences again, as attention wants them."""
    place: torch.Tensor
    """[c * T] int64: where a token of the whole micro-batch lies when the ranks' tokens are joined, the inverse of order."""
    own: OwnQueries | None
    """None without context parallelism."""

    def to(self, device: torch.device) -> TokenPlaces:
        """The same on `device`, without waiting for it."""
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
        """Lay out the sequences that start at cu_seqlens [S + 1] for one rank; padding behind the last is one more sequence.

        Errors: ValueError when a sequence cannot be cut into 2 * context chunks, or the tokens are too few.
        """
        starts = cu_seqlens.to(torch.int64)
        rest = tokens * context - starts[-1:]
        if int(rest) != 0:
            starts = torch.cat([starts, starts[-1:] + rest])
        lengths = starts.diff()
        if bool((lengths < 0).any()):
            raise ValueError(f"packed sequences of {int(starts[-1] - rest)} tokens in {tokens} x {context} places")
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
    """The two chunks of each sequence that this rank holds, in the order in which it holds them."""
    starts, chunks = sequences.borders[:-1], sequences.borders.diff() // (2 * context)
    which = chunks.new_tensor([rank + 1, 2 * context - rank])
    keys = (chunks[:, None] * which).view(-1)  # as many keys as the sequence has up to the chunk's end
    queries = chunks.repeat_interleave(2)
    key_borders = _borders(keys)
    first = starts.repeat_interleave(2) - key_borders[:-1]
    rows = torch.arange(int(key_borders[-1])) + first.repeat_interleave(keys)
    own, keys = (PackedSequences.of(borders, place.device) for borders in (_borders(queries), key_borders))
    return OwnQueries(own, keys, place[rows.to(place.device)])


def _borders(lengths: torch.Tensor) -> torch.Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])
