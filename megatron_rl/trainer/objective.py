"""Objectives: the losses that passes over micro-batches minimize. An objective declares its needs and has no side effects.

An objective maps (micro-batch, outputs of the head) to a loss, metrics and per-token values. Its `needs` are the fields that
earlier passes compute before the updates.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple, Self

import torch
from torch import Tensor

from megatron_rl.algorithms import kl, losses
from megatron_rl.algorithms.correction import TokenWeights, counts, token_weights
from megatron_rl.algorithms.correction_choice import Correction
from megatron_rl.config import AlgorithmConfig, Config, CorrectionConfig, DistillationConfig
from megatron_rl.config.plan import policy_needs, ratio_from_old
from megatron_rl.config.registry import resolve
from megatron_rl.data.packing import Batch
from megatron_rl.metrics.reduce import Metrics, derived, mean, ratio

CLOSE = "mismatch/close"
"""Name of a metric: share of sampled tokens whose probabilities in engine and trainer differ by at most a factor of two."""


class HeadOutputs(NamedTuple):
    """Outputs of the head for each label under the current policy; all [T]."""

    log_probs: Tensor
    entropy: Tensor
    """Entropy; zeros if the objective does not request it."""
    pruned: Tensor
    """Probability mass outside the safe set; 0 without vocabulary pruning."""
    margin: Tensor | None = None
    """Logarithm of (the label's probability / the likeliest token's probability); None if not requested."""
    distance: Tensor | None = None
    """Divergence from the teacher (config section `distillation`); zeros without a teacher, None if not requested."""
    above_mean: Tensor | None = None
    """Logit of the label minus the mean logit over the vocabulary; None without label smoothing."""


class Values(NamedTuple):
    """Output of the head of a reward model or critic."""

    values: Tensor
    """Value of the state before the predicted token, at every position, [T] fp32."""


class HiddenStates(NamedTuple):
    """Output of a teacher model: hidden states, from which the teacher's head computes distributions."""

    hidden: Tensor
    """Hidden states at the rows that have a label, [n, hidden]."""


@dataclass(frozen=True)
class Result:
    """Result of an objective on one micro-batch."""

    loss: Tensor
    """Loss summed over the micro-batch, a scalar. Its gradient is divided by the sum of `counted` over the whole update."""
    metrics: Metrics = field(default_factory=dict)
    """Metrics of the micro-batch. All micro-batches have the same names."""
    tokens: Mapping[str, Tensor] = field(default_factory=dict)
    """Per-token values by name, [T] each, without gradient, for analysis after the update."""
    counted: Tensor | None = None
    """Contribution of the micro-batch to the loss's divisor, a scalar comparable to a number of tokens. None: the number of its
    counted labels."""


@dataclass(frozen=True)
class Totals:
    """Sums over a whole update: all micro-batches on all ranks."""

    tokens: int
    sequences: int
    inputs: int = 1
    """Number of all tokens of the sequences, prompts included."""


class Objective[Outputs: (HeadOutputs, Values, HiddenStates)]:
    """The loss that a pass minimizes. Subclasses override `__call__` and, if necessary, other members."""

    needs: frozenset[str] = frozenset()
    """Fields (`data.sequence.FIELDS`) that earlier passes over the batches have to compute."""
    per_token = False
    """True if the loss is a sum of one term per token (`ops.linear_log_probs` describes what this saves)."""
    with_entropy = True
    """True if the head computes entropies."""
    reads_hidden = False
    """True if the objective reads hidden states instead of the head's outputs."""
    teacher: DistillationConfig | None = None
    """Distillation settings. If set, the head also computes the divergence from the teacher at each label."""
    label_smoothing: float = 0.0
    """Share of each label's target probability that is spread over the vocabulary. If above 0, the head returns
    `above_mean`."""

    def for_update(self, totals: Totals) -> Self:
        """Return the objective for one update with these totals."""
        return self

    def divisor(self, totals: Totals) -> int:
        """Return the sum of `Result.counted` over the update, estimated before the passes by the number of counted labels."""
        return totals.tokens

    def __call__(self, batch: Batch, outputs: Outputs) -> Result:
        """Return the loss and metrics of one micro-batch."""
        raise NotImplementedError


class LogProbs(Objective[HeadOutputs]):
    """Objective without a loss: its pass computes log-probs."""

    with_entropy = False

    def __call__(self, batch: Batch, outputs: HeadOutputs) -> Result:
        """Return a result with the log-probs."""
        return Result(outputs.log_probs.new_zeros(()), tokens={"log_probs": outputs.log_probs})


class ComputeValues(Objective[Values]):
    """Objective without a loss: its pass computes values."""

    def __call__(self, batch: Batch, outputs: Values) -> Result:
        """Return a result with the values."""
        return Result(outputs.values.new_zeros(()), tokens={"values": outputs.values})


class ComputeHidden(Objective[HiddenStates]):
    """Objective without a loss: its pass computes hidden states."""

    with_entropy = False
    reads_hidden = True

    def __call__(self, batch: Batch, outputs: HiddenStates) -> Result:
        """Return a result with the hidden states."""
        return Result(outputs.hidden.new_zeros(()), tokens={"hidden": outputs.hidden})


@dataclass(frozen=True)
class SFT(Objective[HeadOutputs]):
    """Negative log-likelihood of the counted labels plus, with a teacher, their divergence from the teacher.

    With label smoothing e (Szegedy et al. 2016, section 7), the loss is the cross entropy to a mixed target: 1 - e on the
    label, and e spread evenly over the vocabulary, the label's token included (`ops.label_over_mean`).
    """

    teacher: DistillationConfig | None = None
    label_smoothing: float = 0.0
    per_token = True

    @property
    def needs(self) -> frozenset[str]:
        """Fields that earlier passes have to compute. A recorded teacher needs none, because its data comes with the batch."""
        runs = self.teacher is not None and not self.teacher.recorded
        return frozenset({"teacher_hidden"}) if runs else frozenset()

    def __call__(self, batch: Batch, outputs: HeadOutputs) -> Result:
        """Return the loss summed over the counted labels."""
        nll = -torch.where(batch.mask, outputs.log_probs, torch.zeros_like(outputs.log_probs)).sum()
        entropy = torch.where(batch.mask, outputs.entropy.detach(), 0.0).sum()
        sums, loss = {"loss/policy": nll.detach(), "entropy": entropy}, nll
        if outputs.above_mean is not None:
            above = torch.where(batch.mask, outputs.above_mean, torch.zeros_like(outputs.above_mean)).sum()
            loss = loss + self.label_smoothing * above
            sums["loss/smoothed"] = loss.detach()
        if self.teacher is None:
            return Result(loss, _token_means(batch, sums))
        loss = self.teacher.task_coefficient * loss
        if outputs.distance is not None:
            distance = torch.where(batch.mask, outputs.distance, torch.zeros_like(outputs.distance)).sum()
            loss = loss + self.teacher.coefficient * self.teacher.temperature**2 * distance
            sums["distillation/kl"] = distance.detach()
        return Result(loss, _token_means(batch, sums))


@dataclass(frozen=True)
class GivenGradients[Outputs: (HeadOutputs, Values)](Objective[Outputs]):
    """A loss over whole sequences, given by its gradient at each label's output. The output is a log-prob or a value.

    d loss / d weights = sum over labels of (d loss / d output) x (d output / d weights). The first factor is the field
    `loss_gradients`, which an earlier pass with the same weights computes. The second factor comes from this pass. So the loss
    can compare sequences that are in different micro-batches or on different ranks.
    """

    totals: Totals = Totals(1, 1)
    """Totals of the update, set by `for_update`."""
    per_token = True

    def for_update(self, totals: Totals) -> Self:
        """Return the objective with the totals."""
        return replace(self, totals=totals)

    def divisor(self, totals: Totals) -> int:
        """Return the number of all tokens."""
        return totals.inputs

    def __call__(self, batch: Batch, outputs: Outputs) -> Result:
        """Return a loss whose gradient is the given one. The value of the loss itself has no meaning."""
        output = outputs.values if isinstance(outputs, Values) else outputs.log_probs
        terms = torch.where(batch.mask, batch["loss_gradients"] * output, torch.zeros_like(output))
        metrics = {}
        if isinstance(outputs, HeadOutputs):
            metrics = _token_means(batch, {"entropy": torch.where(batch.mask, outputs.entropy.detach(), 0.0).sum()})
        # The trainer divides by `counted`. All tokens count here, as few labels may count in the loss (one per response).
        inputs = (batch.segments.ids >= 0).sum()
        return Result(terms.sum() * self.totals.inputs, metrics, counted=inputs)


@dataclass(frozen=True)
class CriticLoss(Objective[Values]):
    """PPO's value loss. Its targets are the field `returns` (see `losses.value_terms`)."""

    clip: float | None = None
    per_token = True

    def __call__(self, batch: Batch, outputs: Values) -> Result:
        """Return the loss and metrics."""
        mask, returns = batch.mask, torch.where(batch.mask, batch["returns"], 0.0)
        values = torch.where(mask, outputs.values, 0.0)  # other labels get no gradient and no error
        terms, clipped = losses.value_terms(values, torch.where(mask, batch["values"], 0.0), returns, clip=self.clip)
        sums = losses.explained_variance_sums(
            batch["values"], returns, mask
        )  # measured on the values from which the advantages were computed
        found = {"critic/loss": terms.detach().sum(), "critic/clip_fraction": clipped.sum()}
        metrics = _token_means(batch, found | {"critic/value": values.detach().sum()})
        return Result(terms.sum(), metrics | {"critic/explained_variance": derived(_explained_variance, sums)})


def _explained_variance(sums: object) -> float:
    return float(losses.explained_variance(torch.as_tensor(sums)))


def policy_loss(config: AlgorithmConfig) -> losses.PolicyLoss:
    """Return the configured loss. An external plain function gets per_token=False. Errors: UserError."""
    found = resolve("loss", config.loss, losses.POLICY_LOSSES, "algorithm.loss")
    return found if isinstance(found, losses.PolicyLoss) else losses.PolicyLoss(found, per_token=False)


def correction_of(correction: CorrectionConfig) -> Correction:
    """Return the configured correction. Errors: ValueError."""
    return Correction.of(correction)


@dataclass(frozen=True)
class Policy(Objective[HeadOutputs]):
    """A policy loss with rollout correction, KL to the reference and entropy bonus, as configured.

    Let x be a token's loss term times its importance weight, and c its contribution to the divisor (`correction.counts`). Let a
    be 1 or, with sequence_mean, 1 / (counted tokens of the token's sequence). The loss is sum(a x) / sum(a c) over the tokens
    of the update. With sequence_sum, the loss is sum(x) / (sequences x a constant).

    The division happens after the passes of all micro-batches. So the on-policy case needs no separate pass for log-probs: the
    update's own pass provides the importance weights.

    Other losses (load balancing, router z-loss, VP2O's orthogonality) are divided by sum(a c) too. If dropped tokens leave the
    divisor, these losses grow by the factor 1 / (share of tokens that stay). This share is known too late for a correction; the
    metric `loss/counted` reports it.
    """

    config: Config
    totals: Totals = Totals(1, 1)
    """Totals of the update, set by `for_update`."""
    kl_coefficient: float | None = None
    """Weight of the KL in the loss; None for the config's coefficient."""

    @cached_property
    def loss(self) -> losses.PolicyLoss:
        """Configured policy loss."""
        return policy_loss(self.config.algorithm)

    @property
    def per_token(self) -> bool:
        """True if loss, correction and denominator at a token depend only on the token's own log-prob."""
        return self.loss.per_token and correction_of(self.config.correction).per_token and not self._counts_kept

    @property
    def _counts_kept(self) -> bool:
        """True if a sequence's mean covers only its kept tokens. Which tokens are kept depends on the update's log-probs."""
        correction = self.config.correction
        drops = self.config.pruning.enabled or correction.mode == "mask" or correction.reject != "none"
        return (
            self.config.algorithm.aggregation == "sequence_mean" and correction.denominator == "kept_tokens" and drops
        )

    @property
    def teacher(self) -> DistillationConfig | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Settings of a teacher whose whole distributions enter the loss; None without such a teacher."""
        settings = self.config.distillation
        return settings if settings.teacher is not None and settings.placement == "loss" else None

    def divisor(self, totals: Totals) -> int:
        """Return the number of counted tokens; with sequence_sum, the number of sequences times a constant.

        With sequence_mean, the weights of the loss terms are scaled to add up to the number of counted tokens.
        """
        if self.config.algorithm.aggregation == "sequence_sum":
            return totals.sequences * self.config.rollout.max_new_tokens
        return totals.tokens

    @property
    def ratio_from_old(self) -> bool:
        """True if the policy ratio is relative to stored old log-probs.

        False if it is relative to the pass's own log-probs (a single update: ratio 1), or to the engine's (bypass).
        """
        return ratio_from_old(self.config)

    @property
    def needs(self) -> frozenset[str]:
        """Fields that earlier passes have to compute."""
        return policy_needs(self.config)

    def for_update(self, totals: Totals) -> Self:
        """Return the objective with the totals."""
        return replace(self, totals=totals)

    def weights(self, batch: Batch, train_log_probs: Tensor) -> TokenWeights:
        """Return the importance weights [T] for the difference between engine and trainer log-probs."""
        log_ratios = train_log_probs - batch["rollout_log_probs"]
        return token_weights(log_ratios, batch.mask, batch.segments, correction_of(self.config.correction))

    def __call__(self, batch: Batch, outputs: HeadOutputs) -> Result:
        """Return the loss and metrics. Errors: ValueError if the batch lacks a field."""
        algorithm, mask, log_probs = self.config.algorithm, batch.mask, outputs.log_probs
        for name in sorted(self.needs - {"teacher_hidden"} - batch.fields.keys()):
            raise ValueError(
                f"the batch has no {name}, which algorithm.loss = {algorithm.loss} needs: call"
                " Trainer.compute_fields(batches, objective.needs) before the update"
            )
        old = batch["old_log_probs"] if self.ratio_from_old else log_probs.detach()
        # A token outside the safe set, now or before, has ratio 0: no loss term, weight 0 ("Taming the Tail", theorem 5.3).
        inside = mask & (log_probs > -torch.inf) & (old > -torch.inf)
        corrected = self._without(mask & ~inside, batch, self.weights(batch, old))
        sums: dict[str, Tensor] = {}
        terms, of_ratios = losses.policy_terms(
            self.loss,
            losses.LossInputs(
                log_probs,
                batch["rollout_log_probs"] if self.config.correction.bypass else old,
                batch["advantages"],
                inside,
                batch.segments,
                math.inf if algorithm.clip_low is None else algorithm.clip_low,
                math.inf if algorithm.clip_high is None else algorithm.clip_high,
                algorithm.tau_pos,
                algorithm.tau_neg,
            ),
        )
        terms = terms * corrected.weights.to(terms)
        count = counts(corrected, mask, correction_of(self.config.correction))
        lengths = batch.segments.sums(count)[0] if self._counts_kept else batch.sequence_lengths
        weights = losses.loss_weights(mask, batch.segments, algorithm.aggregation, sequence_lengths=lengths) * (
            self.totals.tokens / self.totals.sequences if algorithm.aggregation == "sequence_mean" else 1.0
        )
        counted = (weights * count).sum()
        if algorithm.aggregation == "sequence_sum":
            counted = self._constant_total(batch, corrected)
        total = terms
        # A dropped token leaves all terms: if the trainer finds a token almost impossible, its KL explodes too.
        stays = torch.where(corrected.vetoed | corrected.rejected, 0.0, count).to(terms)
        of_reference: Metrics = {}
        if "reference_log_probs" in self.needs:
            estimate = kl.estimate(log_probs, batch["reference_log_probs"], algorithm.kl.estimator)
            estimate = torch.where(inside, estimate, torch.zeros_like(estimate))
            of_reference = {"kl/reference": ratio(estimate.detach().sum(), mask.sum())}  # empty without tokens
            sampler = batch["rollout_log_probs"] if self.config.correction.bypass else old
            distance = kl.estimate(sampler.detach(), batch["reference_log_probs"], algorithm.kl.estimator)
            known = torch.where(mask & (sampler > -torch.inf), distance, torch.zeros_like(distance))
            of_reference["kl/sampled"] = ratio(known.sum(), mask.sum())
            coefficient = algorithm.kl.coefficient if self.kl_coefficient is None else self.kl_coefficient
            if algorithm.kl.placement == "loss":
                total = total + coefficient * stays * torch.where(stays > 0, estimate, torch.zeros_like(estimate))
        entropy = outputs.entropy
        if algorithm.entropy_coefficient:
            total = total - algorithm.entropy_coefficient * stays * torch.where(
                stays > 0, entropy, torch.zeros_like(entropy)
            )
        if self.teacher is not None and outputs.distance is not None:
            distance = torch.where(stays > 0, outputs.distance, torch.zeros_like(outputs.distance))
            total = total + self.teacher.coefficient * self.teacher.temperature**2 * stays * distance
            sums["distillation/kl"] = torch.where(mask, outputs.distance.detach(), 0.0).sum()
        if "teacher_log_probs" in batch.fields:
            sums["distillation/reverse_kl"] = torch.where(inside, old - batch["teacher_log_probs"], 0.0).sum()
        sums["entropy"] = torch.where(mask, entropy.detach(), 0.0).sum()
        sums[CLOSE] = (mask & ((old - batch["rollout_log_probs"]).abs() <= math.log(2))).sum()
        # The mismatch to the engine is measured with the policy before its update.
        seen = {"old_log_probs": old.detach(), "pruned": outputs.pruned.detach(), **vars(corrected)}
        if self.config.pruning.measure and outputs.margin is not None:
            seen["safe"] = outputs.margin.detach() >= math.log(self.config.pruning.rho)
        metrics = _token_means(batch, sums) | of_reference
        metrics |= {name: mean(value, inside.sum()) for name, value in of_ratios.items()}  # over tokens with a ratio
        metrics["loss/policy"] = mean((terms.detach() * weights).sum(), counted)
        metrics["loss/counted"] = mean(counted, mask.sum())
        return Result((total * weights).sum(), metrics, seen, counted)

    def _constant_total(self, batch: Batch, corrected: TokenWeights) -> Tensor:
        """Return Dr. GRPO's divisor: a constant for each sequence, unless the correction drops the whole sequence."""
        correction = correction_of(self.config.correction)
        whole = correction if correction.denominator == "sampled" else replace(correction, denominator="kept_sequences")
        count = counts(corrected, batch.mask, whole)
        longest = self.config.rollout.max_new_tokens
        return losses.constant_total(count, batch.segments, batch.sequence_lengths, longest)

    def _without(self, gone: Tensor, batch: Batch, corrected: TokenWeights) -> TokenWeights:
        if not self.loss.per_token:
            (in_sequence,) = batch.segments.sums(gone.float())
            gone = batch.mask & (batch.segments.spread_out(in_sequence) > 0)
        return replace(corrected, weights=torch.where(gone, 0.0, corrected.weights))


def _token_means(batch: Batch, sums: dict[str, Tensor]) -> Metrics:
    tokens = batch.mask.sum()
    return {name: mean(value, tokens) for name, value in sums.items()}
