"""Direct preference optimization and related losses: they train a policy on preferences without a reward model.

This is the command `megatron-rl dpo`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import partial
from typing import cast

import numpy as np
from torch import Tensor

from megatron_rl.algorithms import preference
from megatron_rl.config import Config, DPOConfig
from megatron_rl.data.sequence import Sequence
from megatron_rl.metrics.preference_metrics import pair_metrics
from megatron_rl.metrics.reduce import Metrics, figures, mean
from megatron_rl.offline import StepResult, check_kind, train_offline
from megatron_rl.run.run import Run
from megatron_rl.tasks.preferences import Comparison, Kind
from megatron_rl.tasks.stream import held_out_comparisons
from megatron_rl.trainer.scored_spans import Loss, Places, Reference, ScoredSpans, UnitPasses

LOG_PROBS = "old_log_probs"
TAKES: dict[str, tuple[Kind, ...]] = {
    **dict.fromkeys(("sigmoid", "ipo", "hinge", "robust"), ("pair", "list")),
    "kto": ("label", "pair"),
}
"""{loss: kinds of preferences that it can learn from}."""


def dpo(config: Config) -> None:
    """Run config.steps updates on batch.prompts_per_step comparisons each. Writes a Hugging Face folder `hf/`."""
    with Run(config, kind="dpo") as run:
        check_kind(run, TAKES, "dpo.loss", config.dpo.loss)
        trainer = run.build()
        held_out = held_out_comparisons(run.eval_sets[0].held_out, run.program, config.rollout.context_length)
        folder = config.dpo.reference or config.model.path
        file = run.folder / "reference_log_probs.npz"
        reference = Reference(folder, file, run.ranks, precision=config.precision.train)
        if config.dpo.precompute_reference:
            reference.precompute(upcoming(run, held_out), lambda: run.scorer(folder))

        def compare(comparisons: list[Comparison]) -> tuple[UnitPasses, Loss]:
            """Return the model's forward and backward passes over the responses, and the loss function for them."""
            table, *crossed = tables_of(config.dpo, comparisons)
            passes, baseline = UnitPasses(trainer, table), None
            for other in crossed:  # KTO
                of_other = UnitPasses(trainer, other)
                baseline = preference.kto_baseline(of_other.sums(LOG_PROBS)[LOG_PROBS], reference(other, of_other))
            return passes, partial(dpo_loss, config.dpo, table, reference(table, passes), baseline)

        def learn() -> StepResult:
            passes, loss = compare(draw(run, run.step))
            update, measured = passes.learn(loss, LOG_PROBS)
            return StepResult(update, passes.mine, measured)

        def evaluate() -> dict[str, float]:
            if not held_out:
                return {}
            passes, loss = compare(held_out)
            found = figures(loss(passes.sums(LOG_PROBS))[1])
            return {f"eval/{name.rpartition('/')[2]}": value for name, value in found.items()}

        train_offline(run, learn, evaluate)


def draw(run: Run, step: int) -> list[Comparison]:
    """Return the comparisons of a step. The stream of prompts must be at this step."""
    rng = random.Random(f"{run.config.seed}/{step}")
    return run.stream.next_comparisons(run.config.batch.prompts_per_step, rng)


def upcoming(run: Run, held_out: list[Comparison]) -> Iterator[ScoredSpans]:
    """Yield tables of all responses for which the run still needs reference log-probs; then restore the stream's position."""
    here = run.stream.state_dict()
    if held_out:
        yield from tables_of(run.config.dpo, held_out)
    for step in range(run.step, run.config.steps):
        yield from tables_of(run.config.dpo, draw(run, step))
    run.stream.load_state_dict(here)


def tables_of(config: DPOConfig, comparisons: list[Comparison]) -> list[ScoredSpans]:
    """Return the table of the responses and, for KTO, a second table: each prompt with the response to the next prompt."""
    crossed = [mismatched(comparisons)] if config.loss == "kto" else []
    return [ScoredSpans.of(some, whole_response) for some in (comparisons, *crossed)]


def whole_response(comparison: Comparison, index: int) -> tuple[Sequence, list[tuple[Places, float]]]:
    """Return a response and its only scored unit: all its tokens with loss mask 1, and the response's score."""
    sequence = comparison.sequences[index]
    return sequence, [(np.flatnonzero(sequence["loss_mask"]), comparison.scores[index])]


def mismatched(comparisons: list[Comparison]) -> list[Comparison]:
    """Return each prompt with the first response to the next prompt.

    KTO uses these pairs to estimate the KL to the reference.
    """
    longest = max(len(s.tokens) for one in comparisons for s in one.sequences)  # known to fit into a micro-batch
    crossed = []
    for one, other in zip(comparisons, [*comparisons[1:], comparisons[0]], strict=True):
        prompt, response = one.sequences[0], other.sequences[0]
        room = longest - prompt.prompt_length
        tokens = prompt.tokens[: prompt.prompt_length].tolist()
        answer = response.tokens[response.prompt_length :][:room].tolist()
        sequence = Sequence.demonstration(tokens, answer)
        sequence["loss_mask"] = response["loss_mask"][:room]  # tool results stay masked out
        crossed.append(Comparison(one.prompt_id, "label", [sequence], [0.0]))
    return crossed


def dpo_loss(
    config: DPOConfig, table: ScoredSpans, reference: Tensor, baseline: Tensor | None, sums: dict[str, Tensor]
) -> tuple[Tensor, Metrics]:
    """Return the configured loss of the responses' summed log-probs, and its metrics. baseline: KTO's estimate of the KL."""
    policy, lengths = sums[LOG_PROBS], sums["labels"]
    better, worse, weights = preference.pairs(table.groups, -table.scores)
    if baseline is None:
        of_lengths = (lengths[better], lengths[worse]) if config.length_normalized else (None, None)
        found = preference.dpo(
            policy[better],
            policy[worse],
            reference[better],
            reference[worse],
            beta=config.beta,
            kind=cast("preference.DPOKind", config.loss),
            label_smoothing=config.label_smoothing,
            chosen_lengths=of_lengths[0],
            rejected_lengths=of_lengths[1],
            weights=weights,
        )
        metrics = pair_metrics(found.chosen_rewards, found.rejected_rewards)
    else:
        found = preference.kto(
            policy,
            reference,
            table.scores > 0.5,
            beta=config.beta,
            baseline=baseline,
            desirable_weight=config.desirable_weight,
            undesirable_weight=config.undesirable_weight,
        )
        good = table.scores > 0.5
        metrics = {
            "preference/chosen": mean(found.rewards[good].sum(), int(good.sum())),
            "preference/rejected": mean(found.rewards[~good].sum(), int((~good).sum())),
            "preference/baseline": mean(baseline, 1),
        }
    best = table.scores > 0.5 if config.loss == "kto" else table.best  # for KTO: a single response has no better one
    sft = -policy[best].sum() / lengths[best].sum().clamp(min=1)
    loss = found.loss + config.sft_coefficient * sft if config.sft_coefficient else found.loss
    metrics |= {"preference/loss": mean(loss.detach(), 1), "preference/sft_loss": mean(sft.detach(), 1)}
    for name, chosen in (("chosen", best), ("rejected", ~best)):
        metrics[f"preference/{name}_log_probs"] = mean(policy.detach()[chosen].sum(), int(chosen.sum()))
    return loss, metrics
