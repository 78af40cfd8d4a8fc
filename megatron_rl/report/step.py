"""Metrics of a step: rewards, losses, mismatch and times, merged over all ranks."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from megatron_rl.data.packing import Batch
from megatron_rl.data.sequence import Sequence
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.errors import UserError
from megatron_rl.metrics.lengths import quantiles
from megatron_rl.metrics.reduce import Metrics, derived, figures, maximum, mean, over_ranks, total
from megatron_rl.report.hardware import hardware_metrics, per_second
from megatron_rl.report.mismatch_metrics import mismatch_metrics
from megatron_rl.report.samples import agent_metrics, choose, readable
from megatron_rl.run.run import Clock, Run
from megatron_rl.trainer.trainer import Update

MOST_IDLE_STEPS = 10
"""A run ends after this many successive steps without an update, because its weights and responses stay the same."""


def log_step(
    run: Run,
    trajectories: list[Trajectory],
    rollout_batch: list[list[Batch]],
    updates: list[Update],
    engine: Metrics,
    clock: Clock,
) -> None:
    """Log the training step that has just ended. All ranks call this function, and rank 0 writes.

    engine: rollout metrics that this process measured.
    """
    config = run.config
    measured = reward_metrics(trajectories, agents=config.rollout.program != "single_turn") | engine
    # Mismatch metrics use the first epoch, whose updates have each token once.
    learned, first = rollout_batch[: len(updates)], updates[: len(rollout_batch)]
    mismatch = mismatch_metrics(
        config.correction,
        learned,
        first,
        run.task.weights,
        pruned=config.pruning.enabled,
        max_new_tokens=config.rollout.max_new_tokens,
    )
    if run.trainer.reports:
        measured |= mismatch
    times = clock.times()
    tokens = sum(len(t.tokens) for t in trajectories)
    measured["throughput/tokens_per_s"] = per_second(run, tokens, times["time/step_s"])
    run.logger.log_samples(run.step, _samples(run, trajectories))
    log_line(run, measured, updates, trajectories, times, epochs=len(updates) / len(rollout_batch))


def log_line(
    run: Run,
    measured: Metrics,
    updates: list[Update],
    trained: Iterable[Sequence],
    times: dict[str, float],
    *,
    epochs: float = 1.0,
) -> None:
    """Merge the measurements of all processes, and write them as one line of metrics.jsonl. Collective.

    measured: metrics of this process. trained: sequences of this data-parallel rank. times: seconds by name, logged from
    rank 0. epochs: number of times that the updates use each sequence.
    """
    skipped = {"data/skipped_prompts": maximum(len(run.stream.skipped))}
    mine = [measured, skipped, hardware_metrics(run, trained, times, epochs)]
    if run.ranks.rank == 0:  # metrics of an update are already merged over all ranks
        mine += [{name: total(seconds) for name, seconds in times.items()}, *(update.metrics for update in updates)]
    found = figures(over_ranks(run.ranks, mine))
    run.logger.log_step(run.step, found)
    run.record_idle(idle_steps(run.idle_steps, len(updates), found))


def idle_steps(before: int, updates: int, found: Mapping[str, Any]) -> int:
    """Return the number of successive steps, up to this one, in which all updates were skipped.

    before: number of such steps up to the previous step. updates: number of updates of this step. found: metrics of this step's
    log line. Errors: UserError, the same on all processes, if the result reaches MOST_IDLE_STEPS.
    """
    if not updates:  # only the critic trains
        return before
    if found["update/skipped"] < updates:
        return 0
    if before + 1 < MOST_IDLE_STEPS:
        return before + 1
    raise UserError(
        f"nothing was learned in {MOST_IDLE_STEPS} steps: "
        + (
            "no token counts in any update, because all responses are masked; check response/truncated, agent.on_truncation"
            " and correction.mode with its bounds and its veto"
            if math.isfinite(found["update/grad_norm"])
            else "no gradient norm is finite (update/grad_norm); check mismatch/not_finite, and lower optimizer.lr"
        )
    )


def reward_metrics(trajectories: list[Trajectory], *, agents: bool) -> Metrics:
    """Return metrics of the rewards and lengths of this leader's trajectories in a step.

    agents: True if the trajectories are conversations.
    """
    samples = [t for t in trajectories if not t.part]
    return {
        "reward": derived(
            _reward_figures,
            tuple((t.group_id, t.reward, t.reward_parts) for t in trajectories if not t.masked and not t.part),
        ),
        "response/length": mean(sum(t.response_length for t in trajectories), len(trajectories)),
        "response/length_quantile": quantiles(t.response_length for t in trajectories),
        "response/truncated": mean(sum(t.truncated for t in samples), len(samples)),
        "tokens": total(sum(len(t.tokens) for t in trajectories)),
        **(agent_metrics(trajectories) if agents else {}),
    }


def _reward_figures(rows: tuple[tuple[int, float, dict[str, float]], ...]) -> dict[str, float]:
    """Return mean and std of the rewards, the share of groups with equal rewards, and the mean of each reward part.

    rows: (group, reward, parts) of each response of a step.
    """
    rewards = np.asarray([reward for _, reward, _ in rows])
    if not rows:  # all responses are masked
        return {"mean": math.nan, "std": math.nan, "zero_std": math.nan}
    groups: dict[int, list[float]] = {}
    for group, reward, _ in rows:
        groups.setdefault(group, []).append(reward)
    zero_std = np.mean([min(g) == max(g) for g in groups.values()])
    parts = {part: float(np.mean([of_row[part] for *_, of_row in rows])) for part in rows[0][2]}
    return {"mean": float(rewards.mean()), "std": float(rewards.std()), "zero_std": float(zero_std), **parts}


def _samples(run: Run, trajectories: list[Trajectory]) -> list[dict[str, Any]]:
    """Choose rollouts of all leaders for the report. Each rollout has the number of equal responses in the step."""
    trajectories = [t for t in trajectories if not t.part]  # the first sequence of a sample represents the sample
    places = [(t.group_id, hashlib.sha256(t.text.encode()).digest()) for t in trajectories]  # a hash is small to gather
    rollouts = [(*place, t.reward) for place, t in zip(places, trajectories, strict=True)]
    counts = choose(run.gather_from_leaders(rollouts), run.config.logging.samples)
    mine = {place: t for place, t in zip(places, trajectories, strict=True) if place in counts}
    samples = [{**readable(run.tokenizer, t), "count": counts[place]} for place, t in mine.items()]
    return run.gather_from_leaders(samples)
