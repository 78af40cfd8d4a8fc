"""Losses on preferences: of a policy (DPO, KTO), and of a reward model's scores (Bradley-Terry, Plackett-Luce).

Log-probs are sums over a response's tokens; those of the reference are without gradient. Arithmetic is in fp32 at least. A mean
over nothing is 0, with zero gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_rl.algorithms.kl import check_positive

DPOKind = Literal["sigmoid", "ipo", "hinge", "robust"]
"""Loss of a pair's difference of log-ratios; `dpo` has the formulas."""


@dataclass(frozen=True)
class DPOLoss:
    """A loss on pairs and the rewards that the policy gives by it."""

    loss: Tensor
    """Scalar: mean over pairs, differentiable."""
    chosen_rewards: Tensor
    """[N], detached: beta x log-ratio, divided by the length where the loss divides by it."""
    rejected_rewards: Tensor
    """[N], likewise."""


@dataclass(frozen=True)
class KTOLoss:
    """A loss on single responses and the rewards that the policy gives by it."""

    loss: Tensor
    """Scalar: mean over responses, differentiable."""
    rewards: Tensor
    """[N], detached: beta x log-ratio."""


def _same_length(**tensors: Tensor) -> None:
    shapes = [list(tensor.shape) for tensor in tensors.values()]
    if len(shapes[0]) != 1 or any(shape != shapes[0] for shape in shapes):
        *names, last = tensors
        raise ValueError(f"{', '.join(names)} and {last} must share one shape [N]; found {shapes}")


def _exact(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _mean(terms: Tensor, weights: Tensor | None = None) -> Tensor:
    if weights is None:
        return terms.sum() / max(len(terms), 1)
    weights = weights.to(terms.dtype)
    total = weights.sum()
    return (weights * terms).sum() / torch.where(total > 0, total, 1.0)


def _check_smoothing(label_smoothing: float) -> None:
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing = {label_smoothing:g}: must be in [0, 1/2)")


# -- policies ---------------------------------------------------------------------------------------------------------


def dpo(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float,
    kind: DPOKind = "sigmoid",
    label_smoothing: float = 0.0,
    chosen_lengths: Tensor | None = None,
    rejected_lengths: Tensor | None = None,
    weights: Tensor | None = None,
) -> DPOLoss:
    """Direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290, eq. 7) and its kin.

    All log-probs [N]. With d = (policy - reference of the chosen) - (policy - reference of the rejected), e = label_smoothing:

        sigmoid   -(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d)
        robust    (-(1 - e) log sigmoid(beta d) + e log sigmoid(-beta d)) / (1 - 2 e)
        ipo       (d - 1 / (2 beta))^2
        hinge     max(0, 1 - beta d)

    sigmoid with e > 0 is conservative DPO (Mitchell 2023): labels are flipped with probability e, and the loss says so. robust
    (Chowdhury et al. 2024) is unbiased under such labels: its mean over the flips is sigmoid's loss on the true ones. ipo: Azar
    et al. 2023, eq. 17. hinge: SLiC (Zhao et al. 2023) with log-ratios.

    chosen_lengths, rejected_lengths: [N], tokens of the responses; the log-ratios are divided by them first, and so are means
    over tokens (TRL's ipo and sigmoid_norm). A response without tokens has the log-ratio 0. weights: [N], as of `pairs`; the
    mean is weighted by them.

    Errors: ValueError for shapes that differ, an unknown kind, a beta that is not positive, a label_smoothing outside of
    [0, 1/2) or for a kind that has none, and lengths of one side alone.
    """
    if kind not in get_args(DPOKind):
        raise ValueError(f"kind '{kind}': choose sigmoid, ipo, hinge or robust")
    check_positive(beta=beta)
    _check_smoothing(label_smoothing)
    if label_smoothing and kind in ("ipo", "hinge"):
        raise ValueError(f"label_smoothing = {label_smoothing:g}: kind '{kind}' has none")
    log_probs = {"policy_chosen": policy_chosen, "policy_rejected": policy_rejected}
    log_probs |= {"reference_chosen": reference_chosen, "reference_rejected": reference_rejected}
    _same_length(**log_probs)
    chosen = _exact(policy_chosen) - _exact(reference_chosen.detach())
    rejected = _exact(policy_rejected) - _exact(reference_rejected.detach())
    if (chosen_lengths is None) != (rejected_lengths is None):
        raise ValueError("chosen_lengths and rejected_lengths: give both or neither")
    if chosen_lengths is not None and rejected_lengths is not None:
        _same_length(policy_chosen=policy_chosen, chosen_lengths=chosen_lengths, rejected_lengths=rejected_lengths)
        chosen, rejected = chosen / chosen_lengths.clamp(min=1), rejected / rejected_lengths.clamp(min=1)

    difference = chosen - rejected
    if kind == "ipo":
        terms = (difference - 1 / (2 * beta)).square()
    elif kind == "hinge":
        terms = F.relu(1 - beta * difference)
    else:
        right, flipped = -F.logsigmoid(beta * difference), -F.logsigmoid(-beta * difference)
        sign = 1 if kind == "sigmoid" else -1
        terms = ((1 - label_smoothing) * right + sign * label_smoothing * flipped) if label_smoothing else right
        terms = terms / (1 - 2 * label_smoothing) if kind == "robust" else terms
    return DPOLoss(_mean(terms, weights), (beta * chosen).detach(), (beta * rejected).detach())


def kto(
    policy: Tensor,
    reference: Tensor,
    desirable: Tensor,
    *,
    beta: float,
    baseline: Tensor | float,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
) -> KTOLoss:
    """Kahneman-Tversky optimization (Ethayarajh et al. 2024, eq. 7 and 8): responses judged one by one.

    With r = policy - reference and z = baseline, a scalar from `kto_baseline`, the mean of
    desirable_weight x (1 - sigmoid(beta (r - z))) over the desirable and undesirable_weight x (1 - sigmoid(beta (z - r))) over
    the others. No gradient flows through z.

    policy, reference: [N] log-probs; desirable: [N] bool. Errors: ValueError for shapes that differ, and for a beta or a weight
    that is not positive.
    """
    check_positive(beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    _same_length(policy=policy, reference=reference, desirable=desirable)
    desirable = desirable.bool()
    log_ratios = _exact(policy) - _exact(reference.detach())
    baseline = baseline.detach() if isinstance(baseline, Tensor) else baseline
    above = beta * (log_ratios - baseline)
    regret = torch.sigmoid(torch.where(desirable, -above, above))  # 1 - sigmoid(x), without its cancellation
    terms = torch.where(desirable, desirable_weight * regret, undesirable_weight * regret)
    return KTOLoss(_mean(terms), (beta * log_ratios).detach())


def kto_baseline(policy_mismatched: Tensor, reference_mismatched: Tensor) -> Tensor:
    """KTO's estimate z0 of KL(policy || reference), a detached scalar: max(0, mean of the log-ratios); 0 without responses.

    [N] log-probs of responses to *other* prompts: each prompt of the batch with the response of its neighbor.
    """
    _same_length(policy_mismatched=policy_mismatched, reference_mismatched=reference_mismatched)
    return _mean(_exact(policy_mismatched.detach()) - _exact(reference_mismatched.detach())).clamp(min=0)


# -- scores of a reward model -----------------------------------------------------------------------------------------


def _beyond(chosen: Tensor, rejected: Tensor, weights: Tensor | None, **target: Tensor | float) -> Tensor:
    """Chosen - rejected - the target, whose name errors give; all [N], the target may be one number."""
    tensors = {"chosen": chosen, "rejected": rejected} | ({} if weights is None else {"weights": weights})
    ((name, wanted),) = target.items()
    if isinstance(wanted, Tensor) and wanted.ndim:
        tensors[name] = wanted
    _same_length(**tensors)
    return _exact(chosen) - _exact(rejected) - wanted


def bradley_terry(
    chosen: Tensor,
    rejected: Tensor,
    *,
    margin: Tensor | float | None = None,
    center: float = 0.0,
    label_smoothing: float = 0.0,
    weights: Tensor | None = None,
) -> Tensor:
    """Mean of -log sigmoid(chosen - rejected - margin), a scalar (Bradley and Terry 1952; Ouyang et al. 2022, eq. 1).

    chosen, rejected: [N] scores; margin: one, or [N], by how much the chosen must be better (Touvron et al. 2023, eq. 2).
    center: adds center x mean of (chosen + rejected)^2, which ties down the constant that differences leave free (Eisenstein
    et al. 2023). weights: [N], as of `pairs`; the means are weighted by them.

    label_smoothing e: -(1 - e) log sigmoid(x) - e log sigmoid(-x), with x the difference less the margin: a label is wrong with
    probability e, and the loss says so, as conservative DPO's does (Mitchell 2023). It is least where sigmoid(x) = 1 - e.

    Errors: ValueError for shapes that differ, and for a label_smoothing outside of [0, 1/2).
    """
    _check_smoothing(label_smoothing)
    beyond = _beyond(chosen, rejected, weights, margin=0.0 if margin is None else margin)
    loss = _mean(-F.logsigmoid(beyond), weights)
    if label_smoothing:  # -log sigmoid(-x) = x - log sigmoid(x)
        loss = loss + label_smoothing * _mean(beyond, weights)
    if center:
        loss = loss + center * _mean((_exact(chosen) + _exact(rejected)).square(), weights)
    return loss


def hinge(chosen: Tensor, rejected: Tensor, *, margin: Tensor | float, weights: Tensor | None = None) -> Tensor:
    """Mean of max(0, margin - (chosen - rejected)), a scalar (Herbrich et al. 2000): no gradient beyond the margin.

    [N] scores; margin: one, or [N]; weights: [N], as in `bradley_terry`. Errors: ValueError for shapes that differ.
    """
    return _mean(F.relu(-_beyond(chosen, rejected, weights, margin=margin)), weights)


def squared_gap(chosen: Tensor, rejected: Tensor, *, gap: Tensor | float, weights: Tensor | None = None) -> Tensor:
    """Mean of (chosen - rejected - gap)^2, a scalar: for gaps that are known.

    [N] scores; gap: one, or [N]; weights: [N], as in `bradley_terry`. Errors: ValueError for shapes that differ.
    """
    return _mean(_beyond(chosen, rejected, weights, gap=gap).square(), weights)


def plackett_luce(scores: Tensor, group_ids: Tensor, ranks: Tensor, *, top: int | None = None) -> Tensor:
    """Mean over groups of -log probability of their ranking, a scalar (Plackett 1975; ListMLE, Xia et al. 2008).

    The best is drawn with the probabilities softmax(scores) of its group, the next one likewise from what is left, and so on:
    the sum over i of log(sum over the pool of i of exp(s_j)) - s_i. The pool of i are all of its group whose rank is not better
    than its own: itself, the worse ones, and those that it is tied with. Tied ones thus share one pool, and none is placed
    before the other (Breslow 1974). Their terms are least where their scores are equal, and that is all that a group of nothing
    but ties asks for. A group of one has the term 0, and counts.

    top: only the first so many places count: those of whom fewer than `top` of their group are better. 1 is ListNet's
    (Cao et al. 2007) with all probability on the best. Two that are not tied have the loss of `bradley_terry`.

    scores: [N]; group_ids: [N] in any order; ranks: [N], 0 is the best; only their order counts. Makes N x N scores.
    Errors: ValueError for shapes that differ and for a top below 1.
    """
    _same_length(scores=scores, group_ids=group_ids, ranks=ranks)
    if top is not None and top < 1:
        raise ValueError(f"top = {top}: must be at least 1")
    same = group_ids[:, None] == group_ids
    better = same & (ranks < ranks[:, None])  # [i, j]: j is better than i
    exact = _exact(scores)
    pools = exact.expand(len(exact), -1).masked_fill(~same | better, -torch.inf).logsumexp(1)
    terms = pools - exact
    if top is not None:
        terms = torch.where(better.sum(1) < top, terms, 0.0)
    return terms.sum() / max(len(group_ids.unique()), 1)


def pairs(group_ids: Tensor, ranks: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """All pairs of one group whose ranks differ: (better [P] and worse [P], indices; weights [P] fp32).

    A weight is 1 / (pairs of that group): their sum is the number of groups that have a pair, and a group counts once whatever
    its size (InstructGPT, Ouyang et al. 2022, section 3.5, eq. 1).

    group_ids: [N] in any order; ranks: [N], 0 is the best. Errors: ValueError for shapes that differ.
    """
    _same_length(group_ids=group_ids, ranks=ranks)
    same = group_ids[:, None] == group_ids
    better, worse = (same & (ranks[:, None] < ranks)).nonzero(as_tuple=True)
    of_group = group_ids.unique(return_inverse=True)[1][better]
    return better, worse, 1.0 / of_group.bincount()[of_group].float()


@torch.no_grad()
def pair_calibration(chosen: Tensor, rejected: Tensor, bins: int = 10) -> Tensor:
    """Sums over N pairs, for `calibration_error`: [3, bins] fp64 that add up over micro-batches and ranks.

    With p = sigmoid(chosen - rejected), a pair's confidence is max(p, 1 - p), and it is right (1) where p > 1/2, wrong (0)
    where p < 1/2, and 1/2 where the scores are equal. Rows: pairs, sum of confidences, sum of right ones; bins of equal width
    from a confidence of 1/2 to 1. Errors: ValueError for shapes that differ and for bins below 1.
    """
    if bins < 1:
        raise ValueError(f"bins = {bins}: must be at least 1")
    _same_length(chosen=chosen, rejected=rejected)
    gaps = chosen.double() - rejected.double()
    confidence = torch.sigmoid(gaps.abs())
    right = (gaps.sign() + 1) / 2
    places = ((2 * confidence - 1) * bins).long().clamp(max=bins - 1)
    rows = torch.stack([torch.ones_like(right), confidence, right])
    return rows.new_zeros(3, bins).index_add_(1, places, rows)


@torch.no_grad()
def label_calibration(scores: Tensor, labels: Tensor, bins: int = 10) -> Tensor:
    """Sums over N labels from 0 to 1 that `calibration_error` is made of: [3, bins] fp64, which may be added up.

    A score is the logit of p, the probability of a yes. Rows: labels, sum of p, sum of the labels themselves; bins of equal
    width of p from 0 to 1. Errors: ValueError for shapes that differ and for bins below 1.
    """
    if bins < 1:
        raise ValueError(f"bins = {bins}: must be at least 1")
    _same_length(scores=scores, labels=labels)
    p = torch.sigmoid(scores.double())
    rows = torch.stack([torch.ones_like(p), p, labels.double()])
    return rows.new_zeros(3, bins).index_add_(1, (p * bins).long().clamp(max=bins - 1), rows)


@torch.no_grad()
def area_under_curve(positives: Tensor, negatives: Tensor) -> Tensor:
    """Area under the ROC curve, a scalar fp64: share of the pairs of one of each in which the positive has the higher score.

    Equal scores count half (Mann and Whitney 1947). [P] and [N] scores; NaN where there are none of either, or one is NaN.
    """
    if not len(positives) or not len(negatives) or bool(torch.cat([positives, negatives]).isnan().any()):
        return torch.tensor(torch.nan, dtype=torch.float64)
    values, places = torch.cat([positives, negatives]).unique(return_inverse=True)
    counts = [part.bincount(minlength=len(values)).double() for part in places.tensor_split([len(positives)])]
    below = counts[1].cumsum(0) - counts[1] / 2  # negatives with a lower score, and half of those with the same
    return (counts[0] * below).sum() / (len(positives) * len(negatives))


def calibration_error(sums: Tensor) -> Tensor:
    """Expected calibration error (Guo et al. 2017, eq. 3), a scalar between 0 and 1; NaN without pairs, or labels.

    The mean over pairs of |mean confidence - share of right ones| of their bin, or over labels of |mean p - mean label|. sums:
    [3, bins], added up `pair_calibration` or `label_calibration`.
    """
    count, confidence, right = sums
    return (confidence - right).abs().sum() / count.sum()
