"""Mismatch metrics of one step: engine against trainer before and after correction, and what the pruning took away."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace

import torch

from megatron_rl.algorithms.correction import TokenWeights
from megatron_rl.algorithms.pruning import bias_bound
from megatron_rl.algorithms.segments import Segments
from megatron_rl.data.packing import Batch
from megatron_rl.launch.run import Run
from megatron_rl.metrics import mismatch
from megatron_rl.trainer.trainer import Update


def mismatch_metrics(run: Run, rollout_batch: list[list[Batch]], updates: list[Update]) -> dict[str, float]:
    """Figures of all micro-batches of the step, after their updates. Every process calls it.

    mismatch/*: the policy that the updates started from, against the engine. corrected/*: the same over the tokens that
    stayed in the update, with the importance weight in the place of the ratio where there is one (correction.mode), and
    what became of the others.
    """
    trainer, config = run.trainer, run.config
    pairs = [
        pair
        for batches, one in zip(rollout_batch, updates, strict=True)
        for pair in zip(batches, one.tokens, strict=True)
    ]
    scored = [_Scored.of(batch, tokens) for batch, tokens in pairs if tokens]
    before = [_before(run, batch) for batch in scored]
    after = [_after(run, batch) for batch in scored]
    sums = [_correction_sums(batch) for batch in scored]
    mine: tuple[list, ...] = ([], [], [], [])
    if trainer.reports:
        together = [mismatch.merge(before)], [mismatch.merge(after)]
        mine = (*together, sums, [_coverage(batch) for batch in scored])
    before, after, sums, coverage = (
        [x for part in parts for x in part] for parts in zip(*run.ranks.gather(mine), strict=True)
    )

    together = mismatch.merge(before)
    metrics = mismatch.metrics(together) | mismatch.law_metrics(together)
    if (
        config.correction.mode != "none"
        or config.correction.veto
        or config.correction.reject != "none"
        or config.pruning.enabled
    ):
        metrics |= mismatch.metrics(mismatch.merge(after), "corrected") | _correction_metrics(sums)
    if config.pruning.enabled:
        metrics |= _pruning_metrics(run, coverage, sum(s["outside"] for s in sums))
    return metrics


@dataclass(frozen=True)
class _Scored:
    """One micro-batch and what its update said of each token; on the host, for many small steps that depend on values, which a
    GPU would be waited for each time. All [T]."""

    mask: torch.Tensor
    rollout_log_probs: torch.Tensor
    segments: Segments
    old_log_probs: torch.Tensor
    coverage: torch.Tensor
    corrected: TokenWeights

    @classmethod
    def of(cls, batch: Batch, tokens: Mapping[str, torch.Tensor]) -> _Scored:
        host = {name: values.cpu() for name, values in tokens.items()}
        corrected = TokenWeights(**{f.name: host.pop(f.name) for f in fields(TokenWeights)})
        segments = replace(batch.segments, ids=batch.segments.ids.cpu())
        return cls(batch.mask.cpu(), batch["rollout_log_probs"].cpu(), segments, **host, corrected=corrected)


def _before(run: Run, batch: _Scored) -> mismatch.Mismatch:
    return _measure(run, batch, batch.mask, batch.old_log_probs.double() - batch.rollout_log_probs.double())


def _after(run: Run, batch: _Scored) -> mismatch.Mismatch:
    used, correction = batch.corrected.weights > 0, run.config.correction
    if correction.mode == "none":
        return _measure(run, batch, used, batch.old_log_probs.double() - batch.rollout_log_probs.double())
    # Above the token's level every token has its sequence's weight.
    return _measure(run, batch, used, batch.corrected.weights.log(), of_sequences=correction.level != "token")


def _measure(
    run: Run, batch: _Scored, mask: torch.Tensor, log_ratios: torch.Tensor, *, of_sequences: bool = False
) -> mismatch.Mismatch:
    """Of the tokens in the mask. Sequences are counted on the first context-parallel rank, which all of them add to."""
    total, tokens = batch.segments.sums(torch.where(mask, log_ratios, 0.0), mask.double())
    total = total / tokens.clamp(min=1) if of_sequences else total
    sequences = total[tokens > 0].tolist() if run.trainer.layout.context_rank == 0 else []
    engine = batch.rollout_log_probs.double()
    return mismatch.measure(engine + log_ratios, engine, mask, sequences)


def _correction_sums(batch: _Scored) -> dict[str, float]:
    corrected, mask = batch.corrected, batch.mask
    weights = corrected.weights[mask]
    outside = mask & (batch.old_log_probs == -torch.inf)
    return {
        "tokens": float(mask.sum()),
        "weight": float(weights.sum()),
        "weight_squared": float(weights.square().sum()),
        "weight_max": float(weights.max()) if len(weights) else 0.0,
        "vetoed": float(corrected.vetoed.sum()),
        "rejected": float(corrected.rejected.sum()),
        "bounded": float(corrected.bounded.sum()),
        "masked": float((weights == 0).sum()),
        "outside": float(outside.sum()),
    }


def _correction_metrics(parts: list[dict[str, float]]) -> dict[str, float]:
    """corrected/vetoed, rejected, bounded, masked: shares of the tokens that the veto dropped, that the rejection dropped,
    whose ratio the mode changed, and that have a weight of 0 for whatever reason; corrected/weight_*: of the weights."""
    total = {name: sum(part[name] for part in parts) for name in parts[0]} if parts else {}
    tokens = max(total.get("tokens", 0.0), 1.0)
    shares = {
        f"corrected/{name}": total.get(name, 0.0) / tokens for name in ("vetoed", "rejected", "bounded", "masked")
    }
    squared = total.get("weight_squared", 0.0)
    return shares | {
        "corrected/weight_mean": total.get("weight", 0.0) / tokens,
        "corrected/weight_max": max((part["weight_max"] for part in parts), default=0.0),
        "corrected/weight_ess": total["weight"] ** 2 / (tokens * squared) if squared else 0.0,
    }


def _coverage(batch: _Scored) -> tuple[float, float, int]:
    """Sum, smallest, number."""
    found = batch.coverage[batch.mask].double()
    return float(found.sum()), float(found.min()) if len(found) else 1.0, len(found)


def _pruning_metrics(run: Run, parts: list[tuple[float, float, int]], outside: float) -> dict[str, float]:
    """pruning/coverage: mean probability of the safe set, pruning/coverage_min its smallest; pruning/pruned_mass,
    pruned_mass_max: what is left of 1; pruning/out_of_set: sampled tokens outside the trainer's set.

    pruning/bias_bound: R_max T (1 - Z_min), which bounds how far the expected reward of the pruned policy is from that of
    the whole one (papers/000, proposition 5.5), with T = rollout.max_new_tokens, the smallest coverage in the states that
    were sampled, and R_max the sum of the reward weights, as parts lie between 0 and 1; pruning/bias_mean: R_max T mean(1 - Z),
    its form before the minimum is taken (eq. 26).
    """
    tokens = max(sum(number for *_, number in parts), 1)
    mass = 1.0 - sum(total for total, *_ in parts) / tokens
    smallest = min((least for _, least, _ in parts), default=1.0)
    largest = sum(abs(weight) for weight in run.task.weights.values())
    horizon = run.config.rollout.max_new_tokens
    return {
        "pruning/coverage": 1.0 - mass,
        "pruning/coverage_min": smallest,
        "pruning/pruned_mass": mass,
        "pruning/pruned_mass_max": 1.0 - smallest,
        "pruning/out_of_set": outside,
        "pruning/bias_bound": bias_bound(largest, horizon, smallest),
        "pruning/bias_mean": bias_bound(largest, horizon, 1.0 - mass),
    }
