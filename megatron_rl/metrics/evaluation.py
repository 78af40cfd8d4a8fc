"""Scores of an evaluation with n responses to each prompt. All functions are pure."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence


def average_at_n(rewards: Sequence[Sequence[float]]) -> float:
    """Return avg@n: mean over prompts of the mean reward of their responses. rewards: [prompts][n]."""
    return _mean([_mean(row) for row in rewards])


def pass_at_k(rewards: Sequence[Sequence[float]], k: int, *, threshold: float = 1.0) -> float:
    """Return pass@k: the probability that at least one of k responses is right (arXiv 2107.03374, equation 1).

    The estimate 1 - C(n - c, k) / C(n, k) is unbiased for n >= k responses, of which c have a reward of at least `threshold`.
    rewards: [prompts][n]. Errors: ValueError if n < k.
    """
    estimates = []
    for row in rewards:
        n, right = len(row), sum(reward >= threshold for reward in row)
        if not 1 <= k <= n:
            raise ValueError(f"pass@{k} needs at least {k} responses to each prompt, there are {n}")
        estimates.append(1.0 - math.comb(n - right, k) / math.comb(n, k))
    return _mean(estimates)


def distinct_right(
    answers: Sequence[Sequence[Hashable]], rewards: Sequence[Sequence[float]], *, threshold: float = 1.0
) -> list[int]:
    """Return the number of distinct right answers to each prompt. answers, rewards: [prompts][n]."""
    return [
        len({answer for answer, reward in zip(row, row_rewards, strict=True) if reward >= threshold})
        for row, row_rewards in zip(answers, rewards, strict=True)
    ]


def collision(
    answers: Sequence[Sequence[Hashable]], rewards: Sequence[Sequence[float]], *, threshold: float = 1.0
) -> float | None:
    """Return an unbiased estimate of the probability that two right answers to a prompt are equal.

    It is a mean over the prompts with at least two right answers; None if there is no such prompt. Unlike `distinct_right`, it
    does not depend on the number of right answers. answers, rewards: [prompts][n].
    """
    chances = []
    for row, row_rewards in zip(answers, rewards, strict=True):
        counts = Counter(answer for answer, reward in zip(row, row_rewards, strict=True) if reward >= threshold)
        if (right := counts.total()) > 1:
            chances.append(sum(n * (n - 1) for n in counts.values()) / (right * (right - 1)))
    return _mean(chances) if chances else None


def majority_at_n(answers: Sequence[Sequence[Hashable]], rewards: Sequence[Sequence[float]]) -> float:
    """Return maj@n: the mean reward of each prompt's most frequent answer (of ties: their mean).

    answers, rewards: [prompts][n]. Equal answers have equal rewards, unless some of their responses are truncated. Then the
    mean of their rewards is used.
    """
    scores = []
    for row, row_rewards in zip(answers, rewards, strict=True):
        counts = Counter(row)
        top = max(counts.values(), default=0)
        # Equally frequent answers have equal weights, so the mean of their means is the mean over their responses.
        scores.append(_mean([r for answer, r in zip(row, row_rewards, strict=True) if counts[answer] == top]))
    return _mean(scores)


def _mean(values: Sequence[float]) -> float:
    if not len(values):
        raise ValueError("an evaluation needs at least one prompt and one response")
    return math.fsum(values) / len(values)
