"""A test of parity draws again where two experts tie but for rounding, by the real choice of experts, or a token is clipped."""

from __future__ import annotations

import math
import random

import pytest
import torch
from ranks import BORDER, TIE, NearTie, run_ranks, without_ties

TOPK, EXPERTS, GROUPS = 2, 8, 2


def choose(gap: float, grouped: bool, seed: int) -> list[list[int]]:
    """Experts of 30 tokens by Megatron's router, of which one has its last chosen and first left-out score so close."""
    from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

    draws = torch.Generator().manual_seed(seed)
    # Powers of 2, of which no two sums, by which groups are chosen, are the same.
    scores = torch.stack([torch.randperm(EXPERTS, generator=draws) for _ in range(30)]).float().exp2()
    if grouped:  # the best experts of the tied token are of one group
        scores[7] = torch.tensor([7.0, 6.0, 5.0, 0.0, 1.0, 2.0, 3.0, 4.0]).exp2()
    order = scores[7].argsort(descending=True)
    scores[7, order[TOPK]] = scores[7, order[TOPK - 1]] - gap * scores[7].max()
    groups = {"num_groups": GROUPS, "group_topk": 1} if grouped else {}
    _, chosen = topk_routing_with_score_function(scores, TOPK, **groups)
    return chosen.nonzero().tolist()


def clip(gap: float, of_values: bool) -> int:
    """Terms of a clipped loss, of which one token is so far beyond the border."""
    from megatron_rl.algorithms import losses

    moved, still, target = torch.tensor([0.0, 0.5 + gap, 3.0]), torch.zeros(3), torch.ones(3)
    if of_values:
        return len(losses.value_terms(moved, still, target, clip=0.5)[0])
    return len(losses.token_terms(moved, still, target, clip_low=0.2, clip_high=math.expm1(0.5))[0])


@pytest.mark.parametrize("grouped", [False, True])
def test_a_tie_is_seen_and_others_are_not(grouped):
    seed = random.randrange(2**31)
    print(f"seed {seed}")
    [apart] = run_ranks(1, f"{__name__}:choose", (3 * TIE, grouped, seed), refuse_ties=True)
    assert len(apart) == 30 * TOPK
    with pytest.raises(NearTie):
        run_ranks(1, f"{__name__}:choose", (TIE / 3, grouped, seed), refuse_ties=True)
    assert len(run_ranks(1, f"{__name__}:choose", (TIE / 3, grouped, seed))[0]) == 30 * TOPK
    for gap in (3 * BORDER, BORDER / 3):
        assert run_ranks(1, f"{__name__}:clip", (gap, grouped)) == [3]
    assert run_ranks(1, f"{__name__}:clip", (3 * BORDER, grouped), refuse_ties=True) == [3]
    with pytest.raises(NearTie):
        run_ranks(1, f"{__name__}:clip", (BORDER / 3, grouped), refuse_ties=True)


def test_a_seed_with_a_tie_is_followed_by_another_one():
    seeds: list[int] = []

    def attempt(seed: int) -> str:
        seeds.append(seed)
        if len(seeds) < 3:
            raise NearTie
        return "done"

    assert without_ties(attempt) == "done" and len({*seeds}) == 3


def test_ties_that_never_end_are_an_error():
    def attempt(_: int) -> None:
        raise NearTie

    with pytest.raises(AssertionError, match="ten seeds"):
        without_ties(attempt)
