"""Objectives: what a pass over micro-batches minimizes, as values that say what they need and touch nothing.

An objective maps (micro-batch, outputs of the head) to a loss, metrics and values of each token. What has to be computed
before the updates follows from its `needs`.
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
"""Name of a metric: share of the sampled tokens whose log-probs engine and trainer have within a factor of two."""


class HeadOutputs(NamedTuple):
    """Outputs of the head for each label of the policy as it is; all [T]."""

    log_probs: Tensor
    entropy: Tensor
    """Zeros where the objective does not ask for it."""
    pruned: Tensor
    """Probability outside of the safe set of a pruned vocabulary; 0 elsewhere."""
    margin: Tensor | None = None
    """Logarithm of the label's probability over that of the likeliest token; None: nobody has asked."""
    distance: Tensor | None = None
    """Divergence from the teacher (section distillation); zeros without one, None where nobody has asked."""
    above_mean: Tensor | None = None
    """Logit of the label less the mean logit of the vocabulary; None where no labels are smoothed."""


class Values(NamedTuple):
    """Outputs of the head of a reward model or critic."""

    values: Tensor
    """[T] fp32, of every position: of the state before the token that it predicts."""


class HiddenStates(NamedTuple):
    """A teacher's output: no numbers of labels, but the hidden states from which its head computes them."""

    hidden: Tensor
    """[n, hidden], at the rows that have a label."""


@dataclass(frozen=True)
class Result:
    """Result of an objective on one micro-batch."""

    loss: Tensor
    """Scalar sum over the micro-batch; its gradient is divided by the sum of `counted` over the whole update."""
    metrics: Metrics = field(default_factory=dict)
    """The same names on every micro-batch."""
    tokens: Mapping[str, Tensor] = field(default_factory=dict)
    """[T] values of each token, without gradient, for whoever looks at the update afterwards."""
    counted: Tensor | None = None
    """Scalar: what the micro-batch adds to the divisor, of the size of a number of tokens; None: its counted labels."""


@dataclass(frozen=True)
class Totals:
    """Sums over a whole update: all micro-batches of all ranks."""

    tokens: int
    sequences: int
    inputs: int = 1
    """All tokens of the sequences, prompts included."""


class Objective[Outputs: (HeadOutputs, Values, HiddenStates)]:
    """The loss that a pass minimizes. Subclasses override `__call__`, and of the rest what differs."""

    needs: frozenset[str] = frozenset()
    """Fields (`data.sequence.FIELDS`) that a pass over the batches has to compute before."""
    per_token = False
    """The loss is a sum of terms of one token each (`ops.linear_log_probs` says what this saves)."""
    with_entropy = True
    """True if the head computes entropies."""
    reads_hidden = False
    """True if it asks for hidden states, and not for what the head makes of them."""
    teacher: DistillationConfig | None = None
    """How far from the teacher the head says each label to be; None: it does not."""
    label_smoothing: float = 0.0
    """Share of each label that is spread over the vocabulary; above 0 the head tells its logit above the mean."""

    def for_update(self, totals: Totals) -> Self:
        """The objective of one update."""
        return self

    def divisor(self, totals: Totals) -> int:
        """Sum of `Result.counted` over the update, as far as it is known before the passes: the counted labels."""
        return totals.tokens

    def __call__(self, batch: Batch, outputs: Outputs) -> Result:
        """Return the loss and metrics of one micro-batch."""
        raise NotImplementedError


class LogProbs(Objective[HeadOutputs]):
    """No loss: the log-probs themselves."""

    with_entropy = False

    def __call__(self, batch: Batch, outputs: HeadOutputs) -> Result:
        """Return the log-probs."""
        return Result(outputs.log_probs.new_zeros(()), tokens={"log_probs": outputs.log_probs})


class ComputeValues(Objective[Values]):
    """No loss: the values themselves."""

    def __call__(self, batch: Batch, outputs: Values) -> Result:
        """Return the values."""
        return Result(outputs.values.new_zeros(()), tokens={"values": outputs.values})


class ComputeHidden(Objective[HiddenStates]):
    """No loss: the hidden states themselves."""

    with_entropy = False
    reads_hidden = True

    def __call__(self, batch: Batch, outputs: HiddenStates) -> Result:
        """Return the hidden states."""
        return Result(outputs.hidden.new_zeros(()), tokens={"hidden": outputs.hidden})


@dataclass(frozen=True)
class SFT(Objective[HeadOutputs]):
    """Negative log-likelihood of the counted labels, and their divergence from a teacher where there is one.

    With label smoothing e (Szegedy et al. 2016, section 7) it is the cross entropy to 1 - e on the label and e spread evenly
    over the vocabulary, the label's token included (`ops.label_over_mean`).
    """

    teacher: DistillationConfig | None = None
    label_smoothing: float = 0.0
    per_token = True

    @property
    def needs(self) -> frozenset[str]:
        """Fields that have to be computed before; those of a recorded teacher come with the batch."""
        runs = self.teacher is not None and not self.teacher.recorded
        return frozenset({"teacher_hidden"}) if runs else frozenset()

    def __call__(self, batch: Batch, outputs: HeadOutputs) -> Result:
        """Return the sum over the counted labels."""
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
    """A loss over whole sequences, or over several of them, whose gradient at each label's output is known already.

    d loss / d weights = sum over labels of (d loss / d output) x (d output / d weights). The first factor, the field
    `loss_gradients`, comes from a pass of the same weights; the second one from this one. So what a loss compares may lie in
    any micro-batch of any rank. The output is a log-prob, or a value.
    """

    totals: Totals = Totals(1, 1)
    """Totals of the update, set by `for_update`."""
    per_token = True

    def for_update(self, totals: Totals) -> Self:
        """Return the objective with the totals."""
        return replace(self, totals=totals)

    def divisor(self, totals: Totals) -> int:
        """All tokens."""
        return totals.inputs

    def __call__(self, batch: Batch, outputs: Outputs) -> Result:
        """Return a loss of that gradient; its own value says nothing."""
        output = outputs.values if isinstance(outputs, Values) else outputs.log_probs
        terms = torch.where(batch.mask, batch["loss_gradients"] * output, torch.zeros_like(output))
        metrics = {}
        if isinstance(outputs, HeadOutputs):
            metrics = _token_means(batch, {"entropy": torch.where(batch.mask, outputs.entropy.detach(), 0.0).sum()})
        # The trainer divides by what is counted. Here that is all tokens, as those that count may be few (one a response).
        inputs = (batch.segments.ids >= 0).sum()
        return Result(terms.sum() * self.totals.inputs, metrics, counted=inputs)


@dataclass(frozen=True)
class CriticLoss(Objective[Values]):
    """PPO's loss of the values of states, whose targets are the field `returns` (`losses.value_terms`)."""

    clip: float | None = None
    per_token = True

    def __call__(self, batch: Batch, outputs: Values) -> Result:
        """Return the loss and metrics."""
        mask, returns = batch.mask, torch.where(batch.mask, batch["returns"], 0.0)
        values = torch.where(mask, outputs.values, 0.0)  # what does not count has no gradient, and no error
        terms, clipped = losses.value_terms(values, torch.where(mask, batch["values"], 0.0), returns, clip=self.clip)
        sums = losses.explained_variance_sums(
            batch["values"], returns, mask
        )  # by the values that advantages were made of
        found = {"critic/loss": terms.detach().sum(), "critic/clip_fraction": clipped.sum()}
        metrics = _token_means(batch, found | {"critic/value": values.detach().sum()})
        return Result(terms.sum(), metrics | {"critic/explained_variance": derived(_explained_variance, sums)})


def _explained_variance(sums: object) -> float:
    return float(losses.explained_variance(torch.as_tensor(sums)))


def policy_loss(config: AlgorithmConfig) -> losses.PolicyLoss:
    """The configured loss; of a plain function from outside nothing is taken for granted. Errors: UserError."""
    found = resolve("loss", config.loss, losses.POLICY_LOSSES, "algorithm.loss")
    return found if isinstance(found, losses.PolicyLoss) else losses.PolicyLoss(found, per_token=False)


def correction_of(correction: CorrectionConfig) -> Correction:
    """The configured correction. Errors: ValueError."""
    return Correction.of(correction)


@dataclass(frozen=True)
class Policy(Objective[HeadOutputs]):
    """A policy loss with rollout correction, KL to the reference and entropy bonus, as the config says.

    The loss is sum(a x) / sum(a c) over the update, with x a token's term times its weight, c what it counts
    (`correction.counts`), and a = 1, or with sequence_mean 1 / (counted tokens of its sequence); with sequence_sum it is sum(x)
    / (sequences x a constant). Both sums are known once the
    passes of all micro-batches are done, so that on-policy, where weights come from the very pass, none is needed before.
    Other losses (load balancing, the routers' z-loss, VP2O's orthogonality) share the divisor: where what is dropped leaves it,
    which is known only then, they are larger by the inverse of what stays (`loss/counted`).
    """

    config: Config
    totals: Totals = Totals(1, 1)
    """Totals of the update, set by `for_update`."""
    kl_coefficient: float | None = None
    """Weight of the KL in the loss; None: the config's."""

    @cached_property
    def loss(self) -> losses.PolicyLoss:
        """The configured policy loss."""
        return policy_loss(self.config.algorithm)

    @property
    def per_token(self) -> bool:
        """True if loss, correction and denominator depend on a token's own log-prob alone."""
        return self.loss.per_token and correction_of(self.config.correction).per_token and not self._counts_kept

    @property
    def _counts_kept(self) -> bool:
        """True if a sequence's mean is over fewer tokens than it has, which its log-probs alone tell."""
        correction = self.config.correction
        drops = self.config.pruning.enabled or correction.mode == "mask" or correction.reject != "none"
        return (
            self.config.algorithm.aggregation == "sequence_mean" and correction.denominator == "kept_tokens" and drops
        )

    @property
    def teacher(self) -> DistillationConfig | None:  # pyright: ignore[reportIncompatibleVariableOverride]
        """The teacher whose whole distributions count in the loss."""
        settings = self.config.distillation
        return settings if settings.teacher is not None and settings.placement == "loss" else None

    def divisor(self, totals: Totals) -> int:
        """Return the counted tokens, which both means are brought to; of sequence_sum its constant for each sequence."""
        if self.config.algorithm.aggregation == "sequence_sum":
            return totals.sequences * self.config.rollout.max_new_tokens
        return totals.tokens

    @property
    def ratio_from_old(self) -> bool:
        """True if the ratio starts from stored log-probs, not its own (one update: 1) or the engine's (bypass)."""
        return ratio_from_old(self.config)

    @property
    def needs(self) -> frozenset[str]:
        """Fields that have to be computed before."""
        return policy_needs(self.config)

    def for_update(self, totals: Totals) -> Self:
        """Return the objective with the totals."""
        return replace(self, totals=totals)

    def weights(self, batch: Batch, train_log_probs: Tensor) -> TokenWeights:
        """Importance weights [T] between the engine's log-probs and the trainer's."""
        log_ratios = train_log_probs - batch["rollout_log_probs"]
        return token_weights(log_ratios, batch.mask, batch.segments, correction_of(self.config.correction))

    def __call__(self, batch: Batch, outputs: HeadOutputs) -> Result:
        """Return the loss and metrics. Errors: ValueError for a field that is missing in the batch."""
        algorithm, mask, log_probs = self.config.algorithm, batch.mask, outputs.log_probs
        for name in sorted(self.needs - {"teacher_hidden"} - batch.fields.keys()):
            raise ValueError(
                f"the batch has no {name}, which algorithm.loss = {algorithm.loss} needs: call"
                " Trainer.compute_fields(batches, objective.needs) before the update"
            )
        old = batch["old_log_probs"] if self.ratio_from_old else log_probs.detach()
        # A token outside the safe set, now or then, has ratio 0: no term, and a weight of 0 ("Taming the Tail", theorem 5.3).
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
        # What is dropped leaves the whole update: where the trainer finds a token next to impossible, its KL explodes too.
        stays = torch.where(corrected.vetoed | corrected.rejected, 0.0, count).to(terms)
        of_reference: Metrics = {}
        if "reference_log_probs" in self.needs:
            estimate = kl.estimate(log_probs, batch["reference_log_probs"], algorithm.kl.estimator)
            estimate = torch.where(inside, estimate, torch.zeros_like(estimate))
            of_reference = {"kl/reference": ratio(estimate.detach().sum(), mask.sum())}  # of no token there is none
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
        # The mismatch to the engine is that of the policy before its update.
        seen = {"old_log_probs": old.detach(), "pruned": outputs.pruned.detach(), **vars(corrected)}
        if self.config.pruning.measure and outputs.margin is not None:
            seen["safe"] = outputs.margin.detach() >= math.log(self.config.pruning.rho)
        metrics = _token_means(batch, sums) | of_reference
        metrics |= {name: mean(value, inside.sum()) for name, value in of_ratios.items()}  # of those that have one
        metrics["loss/policy"] = mean((terms.detach() * weights).sum(), counted)
        metrics["loss/counted"] = mean(counted, mask.sum())
        return Result((total * weights).sum(), metrics, seen, counted)

    def _constant_total(self, batch: Batch, corrected: TokenWeights) -> Tensor:
        """Return Dr. GRPO's divisor: a constant for each sequence, but for those that the correction drops whole."""
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
