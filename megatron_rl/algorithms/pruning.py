"""The cost of pruning the vocabulary (Li et al., "Taming the Tail"); `ops.masked_log_softmax` does it."""

from __future__ import annotations


def bias_bound(largest_reward: float, horizon: int, coverage: float) -> float:
    """R_max T (1 - Z): bounds |J_pruned - J|, how far pruning moves the expected reward (proposition 5.5).

    largest_reward: R_max, of rewards between 0 and it (or the width of their range); horizon: T, the longest response in
    tokens; coverage: Z, the smallest share of the softmax that a safe set holds in any state. With the mean of Z over the
    states that either of the policies visits it bounds the same, more tightly (eq. 26).
    """
    return largest_reward * horizon * (1.0 - coverage)
