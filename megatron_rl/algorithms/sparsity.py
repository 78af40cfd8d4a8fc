"""Zeros among the weights of a linear layer y = W x, W [out, in]: which ones, and what becomes of the others.

Every row is pruned alike: the paper of Wanda finds that better than one threshold for all of them, and rows that tensor
parallelism gives to different processes need to know nothing of each other.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pattern:
    """Which weights of a row may stay: `keep` of every `of` neighbors, or without these all but a share `ratio`."""

    keep: int | None = None
    of: int = 1
    ratio: float = 0.5

    def kept(self, scores: Tensor) -> Tensor:
        """Scores [out, in] -> bool: the highest that the pattern leaves. in is a multiple of `of`."""
        groups = scores.unflatten(1, (-1, self.of)) if self.keep is not None else scores.unsqueeze(1)
        size = groups.shape[-1]
        count = self.keep if self.keep is not None else size - int(self.ratio * size)
        places = groups.argsort(dim=-1, descending=True, stable=True)[..., :count]
        return torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, places, True).flatten(1)


def magnitude(weight: Tensor, pattern: Pattern) -> Tensor:
    """The weights with the smallest ones zero."""
    return weight.where(pattern.kept(weight.abs()), 0)


def wanda(weight: Tensor, squares: Tensor, pattern: Pattern) -> Tensor:
    """The weights with those of the smallest |W| x norm of X zero (arXiv 2306.11695).

    squares: [in], sum of the squares of each input, in any unit. Without inputs it is `magnitude`.
    """
    norms = squares.sqrt() if squares.any() else torch.ones_like(squares)
    return weight.where(pattern.kept(weight.double().abs() * norms), 0)


def sparsegpt(weight: Tensor, gram: Tensor, pattern: Pattern, *, block: int = 128, damp: float = 0.01) -> Tensor:
    """The weights with those zero whose loss the others make up for best, and these changed so that they do (arXiv 2301.00774).

    Column after column, in order: a weight w_j that goes costs w_j^2 / (U_jj)^2, where U is the upper Cholesky factor of the
    inverse Hessian, and what it contributed is taken over by the weights behind it, so that ||W X - W' X|| is the smallest
    with those up to j as they are. gram: X X^T [in, in] in any unit, to whose diagonal damp times its mean is added. Without
    a pattern N:M the columns that a row loses are chosen in blocks. Without inputs it is `magnitude`.
    """
    if not gram.any():
        return magnitude(weight, pattern)
    hessian = gram.double() + damp * gram.diagonal().double().mean() * torch.eye(len(gram), device=gram.device)
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
    rest = weight.to(torch.float64, copy=True)  # the caller's stay as they are, also those that are fp64
    size = pattern.of if pattern.keep is not None else block
    block = max(size, block // size * size)  # groups of neighbors are not torn
    for start in range(0, weight.shape[1], block):
        columns = range(start, min(start + block, weight.shape[1]))
        errors = rest.new_zeros(weight.shape[0], len(columns))
        for place, j in enumerate(columns):
            if place % size == 0:
                chosen = slice(j, min(j + size, columns.stop))
                kept = pattern.kept(rest[:, chosen].square() / upper.diagonal()[chosen].square())
            lost = rest[:, j].where(~kept[:, place % size], 0)
            errors[:, place] = lost / upper[j, j]
            rest[:, j : columns.stop] -= errors[:, place, None] * upper[j, j : columns.stop]
            rest[:, j] = rest[:, j].where(kept[:, place % size], 0)
        rest[:, columns.stop :] -= errors @ upper[columns.start : columns.stop, columns.stop :]
    return rest.to(weight.dtype)
