"""Objectives: what a pass over micro-batches minimizes, as values that say what they need and touch nothing.

An objective maps (micro-batch, outputs of the head) to a loss, metrics and values of each token. What has to be computed
before the updates follows from its `needs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor

from megatron_rl.algorithms import kl, losses
from megatron_rl.algorithms.correction import Correction, TokenWeights, token_weights
from megatron_rl.config import AlgorithmConfig, Config
from megatron_rl.data.packing import Batch
from megatron_rl.metrics.reduce import Metrics, mean
from megatron_rl.registry import resolve

CLOSE = "mismatch/close"
"""Name of a metric: share of the sampled tokens whose log-probs engine and trainer have within a factor of two."""


class HeadOutputs(NamedTuple):
    """What the head says of each label of the policy as it is; all [T]."""

    log_probs: Tensor
    entropy: Tensor
    """Zeros where the objective does not ask for it."""
    coverage: Tensor
    """Probability of the safe set of a pruned vocabulary; 1 elsewhere."""


@dataclass(frozen=True)
class Result:
    """What an objective makes of one micro-batch."""

    loss: Tensor
    """Scalar sum over the micro-batch; Megatron divides it by the counted tokens of the whole update."""
    metrics: Metrics = field(default_factory=dict)
    """The same names on every micro-batch."""
    tokens: Mapping[str, Tensor] = field(default_factory=dict)
    """[T] values of each token, without gradient, for whoever looks at the update afterwards."""


@dataclass(frozen=True)
class Totals:
    """Sums over a whole update: all micro-batches of all ranks."""

    tokens: int
    sequences: int


class Objective:
    """What a pass minimizes. Subclasses override `__call__`, and of the rest what differs."""

    needs: frozenset[str] = frozenset()
    """Fields (`data.sequence.FIELDS`) that a pass over the batches has to compute before."""
    per_token = False
    """The loss is a sum of terms of one token each (`ops.linear_log_probs` says what this saves)."""
    with_entropy = True
    """Whether the head computes entropies."""

    def for_update(self, batches: list[Batch], totals: Totals, total: Callable[[float], float]) -> Self:
        """The objective of one update. total: sums a number of these batches over all ranks. Every process calls it."""
        return self

    def __call__(self, batch: Batch, outputs: HeadOutputs) -> Result:
        """Return the loss and metrics of one micro-batch."""
        raise NotImplementedError


class LogProbs(Objective):
    """No loss: the log-probs themselves."""

    with_entropy = False

    def __call__(self, batch: Batch, outputs: HeadOutputs) -> Result:
        """Return the log-probs."""
        return Result(outputs.log_probs.new_zeros(()), tokens={"log_probs": outputs.log_probs})


class SFT(Objective):
    """Negative log-likelihood of the counted labels."""

    per_token = True

    def __call__(self, batch: Batch, outputs: HeadOutputs) -> Result:
        """Return the sum over the counted labels."""
        nll = -torch.where(batch.mask, outputs.log_probs, torch.zeros_like(outputs.log_probs)).sum()
        entropy = torch.where(batch.mask, outputs.entropy.detach(), 0.0).sum()
        return Result(nll, _token_means(batch, {"loss/policy": nll.detach(), "entropy": entropy}))


def policy_loss(config: AlgorithmConfig) -> losses.PolicyLoss:
    """The configured loss; of a plain function from outside nothing is taken for granted. Errors: UserError."""
    found = resolve("loss", config.loss, losses.POLICY_LOSSES, "algorithm.loss")
    return found if isinstance(found, losses.PolicyLoss) else losses.PolicyLoss(found, per_token=False)


def correction_of(config: Config) -> Correction:
    """The configured correction. Errors: ValueError."""
    return Correction(**{f.name: getattr(config.correction, f.name) for f in fields(Correction)})


@dataclass(frozen=True)
class Policy(Objective):
    """A policy loss with rollout correction, KL to the reference and entropy bonus, as the config says."""

    config: Config
    totals: Totals = Totals(1, 1)
    """Those of the update; `for_update` sets them."""
    mean_weight: float = 1.0
    """Divisor of the importance weights: with correction.normalize their mean over the tokens of the update."""

    @cached_property
    def loss(self) -> losses.PolicyLoss:
        """The configured policy loss."""
        return policy_loss(self.config.algorithm)

    @property
    def per_token(self) -> bool:
        """Whether both the loss and the correction depend on a token's own log-prob alone."""
        return self.loss.per_token and correction_of(self.config).per_token

    @property
    def ratio_from_old(self) -> bool:
        """Whether the ratio starts from stored log-probs, and not from its own (one update: 1) or the engine's (bypass)."""
        return self.config.batch.updates_per_step > 1 and not self.config.correction.bypass

    @property
    def needs(self) -> frozenset[str]:
        """Fields that have to be computed before."""
        old = self.ratio_from_old or self.config.correction.normalize
        wanted = {"old_log_probs": old, "reference_log_probs": self.config.algorithm.kl.coefficient > 0}
        return frozenset(name for name, needed in wanted.items() if needed)

    def for_update(self, batches: list[Batch], totals: Totals, total: Callable[[float], float]) -> Self:
        """Return the objective with the totals, and the mean weight where weights are normalized."""
        if not self.config.correction.normalize:
            return replace(self, totals=totals)
        # Of another pipeline stage there are no log-probs.
        scored = [batch for batch in batches if "old_log_probs" in batch.fields]
        weight = total(float(sum(self.weights(batch, batch["old_log_probs"]).weights.sum() for batch in scored)))
        return replace(self, totals=totals, mean_weight=weight / totals.tokens if weight else 1.0)

    def weights(self, batch: Batch, train_log_probs: Tensor) -> TokenWeights:
        """Importance weights [T] between the engine's log-probs and the trainer's, not normalized."""
        log_ratios = train_log_probs - batch["rollout_log_probs"]
        return token_weights(log_ratios, batch.mask, batch.segments, correction_of(self.config))

    def __call__(self, batch: Batch, outputs: HeadOutputs) -> Result:
        """Return the loss and metrics. Errors: ValueError for a field that is missing in the batch."""
        algorithm, mask, log_probs = self.config.algorithm, batch.mask, outputs.log_probs
        for name in sorted(self.needs - batch.fields.keys()):
            raise ValueError(
                f"the batch has no {name}, which algorithm.loss = {algorithm.loss} needs: call"
                " Trainer.compute_fields(batches, objective.needs) before the update"
            )
        old = batch["old_log_probs"] if self.ratio_from_old else log_probs.detach()
        # A token outside the safe set, now or then, has ratio 0: no term, and a weight of 0 (papers/000, theorem 5.3).
        inside = mask & (log_probs > -torch.inf) & (old > -torch.inf)
        corrected = self._without(mask & ~inside, batch, self.weights(batch, old))
        terms, sums = losses.policy_terms(
            self.loss,
            losses.LossInputs(
                log_probs,
                batch["rollout_log_probs"] if self.config.correction.bypass else old,
                batch["advantages"],
                inside,
                batch.segments,
                algorithm.clip_low,
                algorithm.clip_high,
            ),
        )
        terms = terms * (corrected.weights / self.mean_weight).to(terms)
        lengths = {"sequence_lengths": batch.sequence_lengths}
        weights = losses.loss_weights(mask, batch.segments, algorithm.aggregation, **lengths) * (
            self.totals.tokens / self.totals.sequences if algorithm.aggregation == "sequence_mean" else 1.0
        )
        sums["loss/policy"] = (terms.detach() * weights).sum()
        total = terms
        # What is dropped leaves the whole update: where the trainer finds a token next to impossible, its KL explodes too.
        stays = mask & ~corrected.vetoed & ~corrected.rejected
        if "reference_log_probs" in self.needs:
            estimate = kl.estimate(log_probs, batch["reference_log_probs"], algorithm.kl.estimator)
            estimate = torch.where(inside, estimate, torch.zeros_like(estimate))
            sums["kl/reference"] = estimate.detach().sum()
            total = total + algorithm.kl.coefficient * torch.where(stays, estimate, torch.zeros_like(estimate))
        entropy = outputs.entropy
        if algorithm.entropy_coefficient:
            total = total - algorithm.entropy_coefficient * torch.where(stays, entropy, torch.zeros_like(entropy))
        sums["entropy"] = torch.where(mask, entropy.detach(), 0.0).sum()
        sums[CLOSE] = (mask & ((old - batch["rollout_log_probs"]).abs() <= math.log(2))).sum()
        # The mismatch to the engine is that of the policy before its update.
        seen = {"old_log_probs": old.detach(), "coverage": outputs.coverage.detach(), **vars(corrected)}
        metrics = _token_means(batch, sums)
        metrics["loss/ratio"] = mean(sums["loss/ratio"], inside.sum())  # of those that have one: on-policy exactly 1
        return Result((total * weights).sum(), metrics, seen)

    def _without(self, gone: Tensor, batch: Batch, corrected: TokenWeights) -> TokenWeights:
        """Weights of 0 for the tokens `gone` [T], and for their sequences where the loss's ratio is a sequence's."""
        if not self.loss.per_token:
            (in_sequence,) = batch.segments.sums(gone.float())
            gone = batch.mask & (batch.segments.spread_out(in_sequence) > 0)
        return replace(corrected, weights=torch.where(gone, 0.0, corrected.weights))


def _token_means(batch: Batch, sums: dict[str, Tensor]) -> Metrics:
    tokens = batch.mask.sum()
    return {name: mean(value, tokens) for name, value in sums.items()}
