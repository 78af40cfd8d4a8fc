"""Seeded sampling: one draw for each row of a batch, with the row's own seed."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor


def multinomial_with_seed(logprobs: Tensor, seed: Tensor, positions: Tensor) -> Tensor:
    """Draw one index per row from the probabilities exp(logprobs), with the row's seed and position: [n, 1] int64.

    logprobs: [n, m]; the probabilities of a row need not add up to 1. seed, positions: [n] integers. The draw of a row depends
    only on this row. It compares one uniform number with the cumulative probabilities, in float64. SGLang instead hashes each
    of the n x m entries.
    """
    below = logprobs.to(torch.float64).exp_().cumsum_(-1)
    drawn = torch.from_numpy(uniform(seed.numpy(), positions.numpy()))[:, None]
    return torch.searchsorted(below, drawn * below[:, -1:], right=True)


def uniform(seed: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Return [n] float64 in [0, 1), multiples of 2**-32: splitmix64 (Steele et al., 2014) of splitmix64(seed) + position."""
    return (_mix(_mix(seed.astype(np.uint64)) + positions.astype(np.uint64)) >> np.uint64(32)) / 2.0**32


def _mix(state: np.ndarray) -> np.ndarray:
    state = state + np.uint64(0x9E3779B97F4A7C15)
    state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return state ^ (state >> np.uint64(31))
