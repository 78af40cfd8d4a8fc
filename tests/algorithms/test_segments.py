"""Sums within packed sequences, against loops over tokens; cut over ranks they are those of the whole."""

from __future__ import annotations

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_rl.algorithms.segments import Segments

layouts = st.lists(st.integers(0, 6), min_size=1, max_size=6), st.integers(0, 4), st.integers(0, 2**31)


def draw(lengths: list[int], padding: int, seed: int) -> tuple[Segments, torch.Tensor]:
    """Sequences of these lengths, some of them empty, with padding of NaN behind each and at the end; two rows of values."""
    generator = torch.Generator().manual_seed(seed)
    ids = [one for row, length in enumerate(lengths) for one in [row] * length + [-1] * (row % 2)] + [-1] * padding
    values = torch.randn(2, len(ids), generator=generator, dtype=torch.float64)
    values[:, [i for i, one in enumerate(ids) if one < 0]] = torch.nan
    return Segments(torch.tensor(ids, dtype=torch.int64), len(lengths)), values


def by_loop(segments: Segments, values: torch.Tensor) -> list[float]:
    found = [0.0] * segments.count
    for one, value in zip(segments.ids.tolist(), values.tolist(), strict=True):
        if one >= 0:
            found[one] += value
    return found


def close(actual: torch.Tensor, expected: list[float]) -> None:
    """At most 6 values are added up: the order of an addition is a rounding of fp64."""
    torch.testing.assert_close(actual, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-14)


@settings(max_examples=60)
@given(*layouts)
def test_sums_and_what_is_spread_out_are_loops_over_tokens(lengths, padding, seed):
    segments, values = draw(lengths, padding, seed)
    found = segments.sums(*values)
    assert len(found) == 2
    for sums, row, many in zip(found, values, segments.local_sums(values), strict=True):
        assert sums.shape == (len(lengths),)
        close(sums, by_loop(segments, row))
        assert torch.equal(sums, many) and torch.equal(sums, segments.local_sums(row))
    for fill in (0.0, 7.0):
        spread = segments.spread_out(found[0], padding=fill).tolist()
        assert spread == [float(found[0][one]) if one >= 0 else fill for one in segments.ids.tolist()]


@settings(max_examples=60)
@given(*layouts)
def test_what_is_taken_knows_its_sequences(lengths, padding, seed):
    segments, values = draw(lengths, padding, seed)
    chosen = torch.rand(len(segments.ids), generator=torch.Generator().manual_seed(seed)) < 0.5
    for rows in (chosen, chosen.nonzero()[:, 0]):
        some = segments.take(rows)
        assert some.count == segments.count and some.ids.tolist() == segments.ids[rows].tolist()
        close(some.sums(values[0][rows])[0], by_loop(some, values[0][rows]))


@settings(max_examples=60)
@given(*layouts)
def test_two_parts_with_their_sums_reduced_are_one_whole(lengths, padding, seed):
    """Context parallelism in one process: what each part's reduction sees is recorded first, and then added up."""
    segments, values = draw(lengths, padding, seed)
    parts = [torch.arange(len(segments.ids)) % 2 == part for part in range(2)]
    seen: list[torch.Tensor] = []

    def record(sums: torch.Tensor) -> torch.Tensor:
        seen.append(sums.clone())
        return sums

    for rows in parts:
        replace(segments.take(rows), all_reduce=record).sums(*values[:, rows])
    assert len(seen) == 2, "one reduction of each part, however many sums"
    for rows in parts:
        part = replace(segments.take(rows), all_reduce=lambda sums: seen[0] + seen[1])
        assert part.take(torch.arange(0)).all_reduce is part.all_reduce
        for sums, row in zip(part.sums(*values[:, rows]), values, strict=True):
            close(sums, by_loop(segments, row))


def test_segments_of_ids_alone_and_of_no_token():
    assert Segments.of(torch.tensor([0, 0, 2, -1])).count == 3
    for nothing in (Segments.of(torch.zeros(0, dtype=torch.int64)), Segments.of(torch.full((3,), -1))):
        assert nothing.count == 0
        (sums,) = nothing.sums(torch.ones(len(nothing.ids)))
        assert sums.shape == (0,) and nothing.spread_out(sums).tolist() == [0.0] * len(nothing.ids)
