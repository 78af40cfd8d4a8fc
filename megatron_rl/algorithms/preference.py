"""Losses on preferences: for a policy (DPO, KTO) and for the scores of a reward model (Bradley-Terry, Plackett-Luce).

Log-probs are sums over the tokens of a response. Log-probs of the reference have no gradient. Arithmetic is at least fp32. A
mean over no elements is 0, with zero gradients.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor
from torch.nn import functional as F

from megatron_rl.algorithms.kl import check_positive

DPOKind = Literal["sigmoid", "ipo", "hinge", "robust"]
"""Form of the loss on a pair's difference of log-ratios; the formulas are in `dpo`."""


@dataclass(frozen=True)
class DPOLoss:
    """A loss on pairs, and the implicit rewards of the policy."""

    loss: Tensor
    """Scalar: mean over pairs, differentiable."""
    chosen_rewards: Tensor
    """Implicit rewards of the chosen responses, [N] without gradient: beta x log-ratio, per token if lengths are given."""
    rejected_rewards: Tensor
    """Implicit rewards of the rejected responses, like `chosen_rewards`."""


@dataclass(frozen=True)
class KTOLoss:
    """A loss on single responses, and the implicit rewards of the policy."""

    loss: Tensor
    """Scalar: mean over responses, differentiable."""
    rewards: Tensor
    """Implicit rewards of the responses, [N] without gradient: beta x log-ratio."""


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
    """Return the loss of direct preference optimization (Rafailov et al. 2023, arXiv 2305.18290, eq. 7) or a variant.

    All log-probs are [N]. With d = (policy - reference of the chosen) - (policy - reference of the rejected) and
    e = label_smoothing, the kinds are:

        sigmoid:  -(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d)
        robust:   (-(1 - e) log sigmoid(beta d) + e log sigmoid(-beta d)) / (1 - 2 e)
        ipo:      (d - 1 / (2 beta))^2
        hinge:    max(0, 1 - beta d)

    sigmoid with e > 0 is conservative DPO (Mitchell 2023): it assumes that labels are flipped with probability e. robust
    (Chowdhury et al. 2024) is unbiased under such labels: its expectation over the flips is the sigmoid loss on the true
    labels. ipo: Azar et al. 2023, eq. 17. hinge: SLiC (Zhao et al. 2023) with log-ratios.

    chosen_lengths, rejected_lengths: [N], tokens of the responses. If given, log-ratios are divided by them, so that they
    become means over tokens (TRL's ipo and sigmoid_norm). A response without tokens has the log-ratio 0. weights: [N], for
    example from `pairs`; weights of the mean over pairs.

    Errors: ValueError if shapes differ, the kind is unknown, beta is not positive, label_smoothing is outside of [0, 1/2) or
    not supported by the kind, or only one of the two lengths is given.
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
    """Return the loss of Kahneman-Tversky optimization (Ethayarajh et al. 2024, eq. 7 and 8), for single judged responses.

    With r = policy - reference and z = baseline (a scalar from `kto_baseline`), the loss is a mean over all responses:
    desirable_weight x (1 - sigmoid(beta (r - z))) for a desirable response, and
    undesirable_weight x (1 - sigmoid(beta (z - r))) for any other. No gradient flows through z.

    policy, reference: [N] log-probs; desirable: [N] bool. Errors: ValueError if shapes differ, or if beta or a weight is not
    positive.
    """
    check_positive(beta=beta, desirable_weight=desirable_weight, undesirable_weight=undesirable_weight)
    _same_length(policy=policy, reference=reference, desirable=desirable)
    desirable = desirable.bool()
    log_ratios = _exact(policy) - _exact(reference.detach())
    baseline = baseline.detach() if isinstance(baseline, Tensor) else baseline
    above = beta * (log_ratios - baseline)
    regret = torch.sigmoid(torch.where(desirable, -above, above))  # 1 - sigmoid(x), without cancellation
    terms = torch.where(desirable, desirable_weight * regret, undesirable_weight * regret)
    return KTOLoss(_mean(terms), (beta * log_ratios).detach())


def kto_baseline(policy_mismatched: Tensor, reference_mismatched: Tensor) -> Tensor:
    """Return KTO's estimate z0 of KL(policy || reference): max(0, mean of the log-ratios), a scalar without gradient.

    The arguments are [N] log-probs of mismatched responses: each prompt of the batch with the response of its neighbor. Without
    responses the result is 0.
    """
    _same_length(policy_mismatched=policy_mismatched, reference_mismatched=reference_mismatched)
    return _mean(_exact(policy_mismatched.detach()) - _exact(reference_mismatched.detach())).clamp(min=0)


# -- scores of a reward model -----------------------------------------------------------------------------------------


def _beyond(chosen: Tensor, rejected: Tensor, weights: Tensor | None, **target: Tensor | float) -> Tensor:
    """Return chosen - rejected - target, all [N]. target: one keyword argument, [N] or scalar; errors use its name."""
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
    """Return the mean of -log sigmoid(chosen - rejected - margin), a scalar.

    Source: Bradley and Terry 1952; Ouyang et al. 2022, eq. 1.

    chosen, rejected: [N] scores; margin: a scalar or [N], the required difference (Touvron et al. 2023, eq. 2).
    center: adds center x mean of (chosen + rejected)^2. This term fixes the constant offset of the scores, on which
    differences do not depend (Eisenstein et al. 2023). weights: [N], for example from `pairs`; weights of the means.

    label_smoothing e: the term is -(1 - e) log sigmoid(x) - e log sigmoid(-x), with x = chosen - rejected - margin. It
    assumes that a label is wrong with probability e, as conservative DPO does (Mitchell 2023). Its minimum is at
    sigmoid(x) = 1 - e.

    Errors: ValueError if shapes differ, or if label_smoothing is outside of [0, 1/2).
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
    """Return the mean of max(0, margin - (chosen - rejected)), a scalar (Herbrich et al. 2000).

    A pair whose difference exceeds the margin has no gradient. chosen, rejected: [N] scores; margin: a scalar or [N];
    weights: [N], as in `bradley_terry`. Errors: ValueError if shapes differ.
    """
    return _mean(F.relu(-_beyond(chosen, rejected, weights, margin=margin)), weights)


def squared_gap(chosen: Tensor, rejected: Tensor, *, gap: Tensor | float, weights: Tensor | None = None) -> Tensor:
    """Return the mean of (chosen - rejected - gap)^2, a scalar, for data that gives the gap of each pair.

    chosen, rejected: [N] scores; gap: a scalar or [N]; weights: [N], as in `bradley_terry`. Errors: ValueError if shapes
    differ.
    """
    return _mean(_beyond(chosen, rejected, weights, gap=gap).square(), weights)


def plackett_luce(scores: Tensor, group_ids: Tensor, ranks: Tensor, *, top: int | None = None) -> Tensor:
    """Return the mean over groups of the negative log probability of their ranking, a scalar.

    Source: Plackett 1975; ListMLE, Xia et al. 2008. The model draws the best response with the probabilities
    softmax(scores) of the group, then the next response in the same way from the remaining ones, and so on. The pool P_i
    of a response i contains all responses of the group whose rank is not better than the rank of i: i itself, all worse
    ones, and all that are tied with i. The loss of a group is the sum over its responses i of
    log(sum over j in P_i of exp(s_j)) - s_i.

    Tied responses share one pool, and none of them is placed before another (Breslow 1974). Their terms are smallest if
    their scores are equal, so a group of ties alone is trained toward equal scores. A group of one response has the term 0 and
    is included in the mean.

    top: count only the first `top` places, that is, responses for which fewer than `top` others of the group are better.
    top = 1 is ListNet (Cao et al. 2007) with all probability on the best response. For two responses that are not tied the
    loss equals `bradley_terry`.

    scores: [N]; group_ids: [N] in any order; ranks: [N], 0 is the best; only the order of the ranks matters. Memory: N x N
    scores. Errors: ValueError if shapes differ or `top` is below 1.
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
    """Return all pairs within groups whose ranks differ: (better [P] and worse [P], indices; weights [P] fp32).

    The weight of a pair is 1 / (number of pairs of its group). Each group with a pair therefore counts once, whatever its
    size (InstructGPT, Ouyang et al. 2022, section 3.5, eq. 1), and the weights add up to the number of these groups.

    group_ids: [N] in any order; ranks: [N], 0 is the best. Errors: ValueError if shapes differ.
    """
    _same_length(group_ids=group_ids, ranks=ranks)
    same = group_ids[:, None] == group_ids
    better, worse = (same & (ranks[:, None] < ranks)).nonzero(as_tuple=True)
    of_group = group_ids.unique(return_inverse=True)[1][better]
    return better, worse, 1.0 / of_group.bincount()[of_group].float()


@torch.no_grad()
def pair_calibration(chosen: Tensor, rejected: Tensor, bins: int = 10) -> Tensor:
    """Return sums over N pairs for `calibration_error`: [3, bins] fp64, to be added over micro-batches and ranks.

    With p = sigmoid(chosen - rejected), the confidence of a pair is max(p, 1 - p). The pair is right (1) if p > 1/2, wrong
    (0) if p < 1/2, and counts 1/2 if the scores are equal. The rows hold the number of pairs, the sum of confidences and the
    number of right pairs. The bins divide the confidences from 1/2 to 1 into equal widths. Errors: ValueError if shapes
    differ or `bins` is below 1.
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
    """Return sums over N labels between 0 and 1 for `calibration_error`: [3, bins] fp64, to be added over ranks.

    A score is the logit of p, the probability of "yes". The rows hold the number of labels, the sum of p and the sum of the
    labels. The bins divide p from 0 to 1 into equal widths. Errors: ValueError if shapes differ or `bins` is below 1.
    """
    if bins < 1:
        raise ValueError(f"bins = {bins}: must be at least 1")
    _same_length(scores=scores, labels=labels)
    p = torch.sigmoid(scores.double())
    rows = torch.stack([torch.ones_like(p), p, labels.double()])
    return rows.new_zeros(3, bins).index_add_(1, (p * bins).long().clamp(max=bins - 1), rows)


@torch.no_grad()
def area_under_curve(positives: Tensor, negatives: Tensor) -> Tensor:
    """Return the area under the ROC curve, an fp64 scalar: the share of (positive, negative) pairs that are in order.

    A pair is in order if the positive has the higher score; equal scores count half (Mann and Whitney 1947). positives: [P],
    negatives: [N] scores. NaN if one of the two is empty, or if a score is NaN.
    """
    if not len(positives) or not len(negatives) or bool(torch.cat([positives, negatives]).isnan().any()):
        return torch.tensor(torch.nan, dtype=torch.float64)
    values, places = torch.cat([positives, negatives]).unique(return_inverse=True)
    counts = [part.bincount(minlength=len(values)).double() for part in places.tensor_split([len(positives)])]
    below = counts[1].cumsum(0) - counts[1] / 2  # negatives with a lower score, plus half of the ties
    return (counts[0] * below).sum() / (len(positives) * len(negatives))


def calibration_error(sums: Tensor) -> Tensor:
    """Return the expected calibration error (Guo et al. 2017, eq. 3), a scalar between 0 and 1; NaN without data.

    It is the mean over pairs of |mean confidence - share of right pairs| of their bin, or the mean over labels of
    |mean p - mean label| of their bin. sums: [3, bins], added results of `pair_calibration` or `label_calibration`.
    """
    count, confidence, right = sums
    return (confidence - right).abs().sum() / count.sum()
