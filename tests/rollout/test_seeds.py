"""The same seed draws the same tokens, whatever else the server does, and draws them from the right distribution."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch
from sglang_on_cpu import seeded_sampling

from megatron_rl.algorithms.sampling_support import SamplingSupport, request_seed
from megatron_rl.rollout.collect import Collection
from tests.rollout.conftest import client_of
from tests.rollout.test_engine import questions

SUPPORTS = {
    "plain": SamplingSupport(),
    "pruned": SamplingSupport(min_p=0.05),
    "truncated": SamplingSupport(top_p=0.9, top_k=64),
}
TOKENS, SAMPLES = 16, 4


def sample(server, support, seed: str | None, *, shares: int, concurrency: int) -> list[list[int]]:
    """Responses to the same prompts, asked for in so many parts one after the other, the parts in a random order."""
    prompts = questions(12)
    total = len(prompts) * SAMPLES
    parts = [range(i * total // shares, (i + 1) * total // shares) for i in range(shares)]
    found: dict[int, list[int]] = {}
    for part in random.sample(parts, shares):
        collection = Collection(
            prompts, support, samples_per_prompt=SAMPLES, max_new_tokens=TOKENS, share=part, seed=seed
        )
        collection.run(client_of(server, concurrency=concurrency))
        tokens = [t.tokens[t.prompt_length :].tolist() for t in collection.trajectories()]
        found |= zip(part, tokens, strict=True)
    return [found[i] for i in range(total)]


@pytest.mark.parametrize("name", SUPPORTS)
def test_the_order_of_arrival_does_not_matter(name, server):
    """Logits in fp32 differ by 1e-6 between batches: a draw in some hundred thousand falls between two of them."""
    whole = sample(server, SUPPORTS[name], "0/train/3", shares=1, concurrency=512)
    again = sample(server, SUPPORTS[name], "0/train/3", shares=5, concurrency=8)
    assert sum(a == b for a, b in zip(whole, again, strict=True)) >= len(whole) - 1
    other = sample(server, SUPPORTS[name], "0/train/4", shares=1, concurrency=512)
    assert sum(a == b for a, b in zip(whole, other, strict=True)) < len(whole) / 4
    assert len({tuple(tokens) for tokens in whole}) > len(whole) * 0.75, "samples of a prompt are different draws"


def test_requests_with_and_without_seeds_share_a_batch(server):
    """A batch of both kinds is merged and filtered without an error, and those with a seed keep it."""
    seeded: list[list[list[int]]] = []
    beside = threading.Thread(
        target=sample, args=(server, SUPPORTS["plain"], None), kwargs={"shares": 1, "concurrency": 512}
    )
    beside.start()
    seeded.append(sample(server, SUPPORTS["plain"], "7", shares=2, concurrency=512))
    beside.join()
    seeded.append(sample(server, SUPPORTS["plain"], "7", shares=1, concurrency=512))
    assert sum(a == b for a, b in zip(*seeded, strict=True)) >= len(seeded[0]) - 1


def test_draws_have_the_distribution_of_the_row():
    """Chi-square over 60,000 seeds at one position, and over as many positions of one seed; places of weight 0 never."""
    generator = torch.Generator().manual_seed(random.SystemRandom().getrandbits(31))
    weights = torch.rand(32, generator=generator) + 0.05
    weights[torch.randperm(32, generator=generator)[:8]] = 0.0  # rows need not add up to 1
    draws = 60_000
    seeds = torch.randint(1 << 62, (draws,), generator=generator)
    same = torch.full((draws,), int(seeds[0]))
    for seed, position in ((seeds, torch.full((draws,), 17)), (same, torch.arange(draws))):
        found = seeded_sampling.multinomial_with_seed(weights.log().expand(draws, -1), seed, position)
        assert found.shape == (draws, 1)
        counts = torch.bincount(found[:, 0], minlength=32).double()
        assert not counts[weights == 0].any()
        expected = (weights / weights.sum() * draws)[weights > 0].double()
        chi_square = float(((counts[weights > 0] - expected) ** 2 / expected).sum())
        # Of 23 degrees of freedom: above 23 + 2 sqrt(23 x) + 2 x with a chance below e^-x (Laurent and Massart, 2000).
        x = 23.0
        assert chi_square < 23 + 2 * (23 * x) ** 0.5 + 2 * x


def test_the_last_place_can_be_drawn_and_nothing_behind_it():
    seeds = torch.arange(1000)
    only_last = torch.tensor([-torch.inf, -torch.inf, 0.0]).expand(1000, -1)
    assert (seeded_sampling.multinomial_with_seed(only_last, seeds, seeds) == 2).all()
    numbers = seeded_sampling.uniform(np.arange(100_000), np.zeros(100_000, np.int64))
    assert numbers.min() >= 0 and numbers.max() < 1 and len(np.unique(numbers)) > 99_990


def test_seeds_of_requests_are_apart():
    seeds = {request_seed(key, number) for key in ("0/train/0", "0/train/1", "1/train/0") for number in range(10_000)}
    assert len(seeds) == 30_000 and min(seeds) >= 0 and max(seeds) < 1 << 63
