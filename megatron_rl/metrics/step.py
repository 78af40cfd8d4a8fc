"""What a step leaves in the log: rewards, losses, mismatch and times, put together over all ranks."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from megatron_rl.config import Config
from megatron_rl.data.packing import Batch
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.launch.run import Clock, Run
from megatron_rl.metrics.hardware import hardware_metrics
from megatron_rl.metrics.mismatch_metrics import mismatch_metrics
from megatron_rl.metrics.reduce import Metrics, derived, figures, mean, merge, over_ranks, total
from megatron_rl.metrics.responses import readable
from megatron_rl.metrics.samples import choose
from megatron_rl.routing.replay import FROM_ENGINE
from megatron_rl.trainer.trainer import Update


def log_step(
    run: Run,
    trajectories: list[Trajectory],
    rollout_batch: list[list[Batch]],
    updates: list[Update],
    engine: dict[str, float],
    clock: Clock,
) -> None:
    """Write the line of the step that has just ended (all ranks call; rank 0 writes)."""
    mine = reward_metrics(trajectories)
    mismatch = mismatch_metrics(run.config, rollout_batch, updates, run.task.weights)
    if run.trainer.reports:
        mine |= mismatch | fallback_metrics(run.config, rollout_batch)
    metrics = figures(over_ranks(run.ranks, [mine])) | figures(merge(update.metrics for update in updates)) | engine
    metrics["data/skipped_prompts"] = len(run.stream.skipped)
    times = clock.times()
    metrics["throughput/tokens_per_s"] = metrics["tokens"] / times["time/step_s"]
    sequences = [(len(t.tokens) - 1, t.response_length) for t in trajectories]
    metrics |= hardware_metrics(run, sequences, times, metrics["tokens"])
    run.logger.log_samples(run.step, _samples(run, trajectories))
    run.logger.log_step(run.step, metrics | times)


def reward_metrics(trajectories: list[Trajectory]) -> Metrics:
    """Rewards and lengths of this leader's trajectories of a step."""
    return {
        "reward": derived(_reward_figures, tuple((t.group_id, t.reward, t.reward_parts) for t in trajectories)),
        "response/length": mean(sum(t.response_length for t in trajectories), len(trajectories)),
        "response/truncated": mean(sum(t.finish_reason == "length" for t in trajectories), len(trajectories)),
        "tokens": total(sum(len(t.tokens) for t in trajectories)),
    }


def _reward_figures(rows: tuple[tuple[int, float, dict[str, float]], ...]) -> dict[str, float]:
    """Of (group, reward, parts) of a step: mean and std over responses, share of groups whose rewards are all equal, mean of
    each part."""
    rewards = np.asarray([reward for _, reward, _ in rows])
    groups: dict[int, list[float]] = {}
    for group, reward, _ in rows:
        groups.setdefault(group, []).append(reward)
    zero_std = np.mean([min(g) == max(g) for g in groups.values()])
    parts = {part: float(np.mean([of_row[part] for *_, of_row in rows])) for part in rows[0][2]}
    return {"mean": float(rewards.mean()), "std": float(rewards.std()), "zero_std": float(zero_std), **parts}


def fallback_metrics(config: Config, rollout_batch: list[list[Batch]]) -> Metrics:
    """Tokens that were routed freely although the engine's routes were to be replayed: it did not tell them."""
    if config.routing.source not in FROM_ENGINE:
        return {}
    return {"routing/fallback_tokens": total(sum(b.without_route for batches in rollout_batch for b in batches))}


def _samples(run: Run, trajectories: list[Trajectory]) -> list[dict[str, Any]]:
    """Rollouts for the report, chosen among those of all leaders; each says how many of the step are the same."""
    places = [(t.group_id, hashlib.sha256(t.text.encode()).digest()) for t in trajectories]  # what travels is small
    rollouts = [(*place, t.reward) for place, t in zip(places, trajectories, strict=True)]
    counts = choose(run.gather_from_leaders(rollouts), run.config.logging.samples)
    mine = {place: t for place, t in zip(places, trajectories, strict=True) if place in counts}
    samples = [{**readable(run.tokenizer, t), "count": counts[place]} for place, t in mine.items()]
    return run.gather_from_leaders(samples)
