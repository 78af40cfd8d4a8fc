"""Sequences over data-parallel ranks: even, nothing lost, and the same update whoever trains on which of them."""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest
import torch
from balance_ranks import UPDATES, make_trajectories
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import run_ranks

from megatron_rl.algorithms.advantages import group_relative
from megatron_rl.config import Config
from megatron_rl.config.plan import share_of
from megatron_rl.data.balance import partition, plan_updates

sizes = st.lists(st.integers(1, 60), max_size=7)


@settings(max_examples=200)
@given(sizes, st.integers(1, 4))
def test_partition_against_brute_force(sizes, count):
    bins = partition(sizes, count)
    assert len(bins) == count and sorted(i for one in bins for i in one) == list(range(len(sizes)))
    assert all(one == sorted(one) for one in bins)
    assert all(bins) or len(sizes) < count
    found = max(sum(sizes[i] for i in one) for one in bins)
    every = product(range(count), repeat=len(sizes))
    best = min(
        max(sum(s for s, b in zip(sizes, bins, strict=True) if b == one) for one in range(count)) for bins in every
    )
    # Michiels, Korst, Aarts and van Leeuwen, "Performance ratios of the Karmarkar-Karp differencing method", 2007.
    assert found <= best * ((7 / 6 if count == 2 else 4 / 3 - 1 / (3 * count)) if count > 1 else 1) + 1e-9


@pytest.mark.parametrize("seed", range(5))
def test_log_normal_lengths_over_32_ranks(seed):
    """512 responses of 5,000 tokens on average and at most 32,768, after prompts of 200."""
    rng = np.random.default_rng(seed)
    lengths = np.minimum(rng.lognormal(np.log(5000) - 1.2**2 / 2, 1.2, 512), 32768).astype(int) + 200
    [update] = plan_updates(lengths.tolist(), updates=1, ranks=32)
    tokens = [int(lengths[one].sum()) for one in update]
    sampled = [int(lengths[list(share_of(512, rank, 32))].sum()) for rank in range(32)]
    print(
        f"largest / mean: {max(sampled) / np.mean(sampled):.3f} as sampled, {max(tokens) / np.mean(tokens):.4f} balanced"
    )
    assert max(tokens) / np.mean(tokens) <= 1.1 < max(sampled) / np.mean(sampled)


@settings(max_examples=50)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=40), st.integers(1, 4), st.integers(1, 5))
def test_an_update_has_the_same_sequences_on_any_number_of_ranks(sizes, updates, ranks):
    plan = plan_updates(sizes, updates, ranks)
    alone = plan_updates(sizes, updates, 1)
    assert [sorted(i for one in update for i in one) for update in plan] == [one for [one] in alone]
    assert sorted(i for [one] in alone for i in one) == list(range(len(sizes)))
    if len(sizes) % updates == 0:
        assert {len(one) for [one] in alone} == {len(sizes) // updates}


@pytest.mark.parametrize(("world", "tensor"), [(3, 1), (4, 2)])
def test_all_that_belongs_to_a_sequence_moves_with_it(world, tensor):
    """Five prompts of three samples: leaders share groups, and their shares are of unequal size."""
    trajectories = make_trajectories(world, prompts=5, samples=3, vocab=64)
    rewards, groups = torch.tensor([t.reward for t in trajectories]), torch.tensor([t.group_id for t in trajectories])
    expected = group_relative(rewards, groups)
    by_rank = run_ranks(world, "balance_ranks:exchanges", (trajectories, tensor, Config()))
    copies = [by_rank[r : r + tensor] for r in range(0, world, tensor)]
    assert all(rank == copy[0] for copy in copies for rank in copy), "every process of a copy has the same"
    cuts = plan_updates([1] * len(trajectories), UPDATES, 1)
    for number, [indices] in enumerate(cuts):
        found = sorted(one for copy in copies for one in copy[0][number])
        assert [one[0] for one in found] == indices
        for index, advantage, tokens, hidden, kept in found:
            assert index == hidden == kept and tokens == len(trajectories[index].tokens) - 1
            assert advantage == pytest.approx(float(expected[index]), abs=1e-6)
        assert [one[0] for one in copies[0][0][number]] == sorted(one[0] for one in copies[0][0][number])


def test_a_balanced_update_is_the_update(tiny_model):
    """fp32, two data-parallel ranks, more leaders than prompts an update: weights after two updates."""
    model = str(tiny_model("qwen3_moe", "--layers", "2"))
    trajectories = make_trajectories(5, prompts=3, samples=6, vocab=64)
    overrides = {"parallel": {"expert": 2}, "batch": {"tokens_per_micro_batch": 96}}
    results = run_ranks(2, "balance_ranks:trains", (model, trajectories, overrides))[0]
    balanced, sampled = (results[how] for how in ("balanced", "sampled"))
    for ours, theirs in zip(balanced["tokens"], sampled["tokens"], strict=True):
        assert sum(ours) == sum(theirs) and max(ours) <= max(theirs)
    assert balanced["tokens"] != sampled["tokens"], "nothing was moved"
    for name, weight in sampled["weights"].items():
        worst = np.abs(balanced["weights"][name] - weight).mean()
        assert worst < 2e-5, f"{name} differs by {worst} on average"


def test_groups_are_whole_whoever_sampled_them():
    trajectories = make_trajectories(1, prompts=3, samples=5, vocab=64)
    for found in run_ranks(2, "balance_ranks:gathers_groups", (trajectories,)):
        assert found == [[t.reward for t in trajectories if t.group_id == p] for p in range(3)]
