"""The mismatch panel of one step: engine against trainer before and after correction, and what the pruning took away."""

from __future__ import annotations

from dataclasses import replace

import torch

from megatron_rl.algorithms.correction import TokenWeights
from megatron_rl.algorithms.losses import sequence_sums
from megatron_rl.algorithms.pruning import bias_bound
from megatron_rl.data.packing import Batch
from megatron_rl.launch.run import Run
from megatron_rl.metrics import mismatch


def panel_metrics(run: Run, updates: list[list[Batch]]) -> dict[str, float]:
    """Figures of all micro-batches of the step, after their updates. Every process calls it.

    mismatch/*: the policy that the updates started from, against the engine. corrected/*: the same over the tokens that
    stayed in the update, with the importance weight in the place of the ratio where there is one (correction.mode), and
    what became of the others.
    """
    trainer, config = run.trainer, run.config
    scored = [_on_host(batch) for batches in updates for batch in batches if batch.corrected is not None]
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


def _on_host(batch: Batch) -> Batch:
    """What the figures are made of: many small steps that depend on values, which a GPU would be waited for each time."""
    names = ("mask", "rollout_log_probs", "sequence_ids")
    host = {name: getattr(batch, name).cpu() for name in names}
    corrected = TokenWeights(*(value.cpu() for value in vars(batch.corrected).values()))
    return replace(batch, **host, corrected=corrected, scored={name: v.cpu() for name, v in batch.scored.items()})


def _before(run: Run, batch: Batch) -> mismatch.Mismatch:
    return _measure(run, batch, batch.mask, batch.scored["old"].double() - batch.rollout_log_probs.double())


def _after(run: Run, batch: Batch) -> mismatch.Mismatch:
    used, correction = batch.corrected.weights > 0, run.config.correction
    if correction.mode == "none":
        return _measure(run, batch, used, batch.scored["old"].double() - batch.rollout_log_probs.double())
    # Above the token's level every token has its sequence's weight.
    return _measure(run, batch, used, batch.corrected.weights.log(), of_sequences=correction.level != "token")


def _measure(
    run: Run, batch: Batch, mask: torch.Tensor, log_ratios: torch.Tensor, *, of_sequences: bool = False
) -> mismatch.Mismatch:
    """Of the tokens in the mask. Sequences are counted on the first context-parallel rank, which all of them add to."""
    parts = torch.stack([torch.where(mask, log_ratios, 0.0), mask.double()])
    sums = [sequence_sums(part, batch.sequence_ids, batch.num_sequences) for part in parts]
    total, tokens = run.trainer.context_sum(torch.stack(sums))
    total = total / tokens.clamp(min=1) if of_sequences else total
    sequences = total[tokens > 0].tolist() if run.trainer.layout.context_rank == 0 else []
    engine = batch.rollout_log_probs.double()
    return mismatch.measure(engine + log_ratios, engine, mask, sequences)


def _correction_sums(batch: Batch) -> dict[str, float]:
    corrected, mask = batch.corrected, batch.mask
    weights = corrected.weights[mask]
    outside = mask & (batch.scored["old"] == -torch.inf)
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


def _coverage(batch: Batch) -> tuple[float, float, int]:
    """Sum, smallest, number."""
    found = batch.scored["coverage"][batch.mask].double()
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
