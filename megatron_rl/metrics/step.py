"""What a step leaves in the log: rewards, losses, mismatch and times, put together over all ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from megatron_rl.data.packing import Batch
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.launch.run import Clock, Run
from megatron_rl.metrics.hardware import hardware_metrics
from megatron_rl.metrics.mismatch_metrics import mismatch_metrics
from megatron_rl.metrics.reduce import figures, merge
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
    measured = figures(merge(update.metrics for update in updates))
    metrics = reward_metrics(run, trajectories) | measured | mismatch_metrics(run, rollout_batch, updates) | engine
    metrics |= fallback_metrics(run, rollout_batch)
    times = clock.times()
    metrics["throughput/tokens_per_s"] = metrics["tokens"] / times["time/step_s"]
    sequences = [(len(t.tokens) - 1, t.response_length) for t in trajectories]
    metrics |= hardware_metrics(run, sequences, times, metrics["tokens"])
    run.logger.log_samples(run.step, _samples(run, trajectories))
    run.logger.log_step(run.step, metrics | times)


def reward_metrics(run: Run, trajectories: list[Trajectory]) -> dict[str, Any]:
    """Rewards and lengths of one step's trajectories."""
    rows = run.gather_from_leaders(
        [
            (t.group_id, t.reward, t.response_length, len(t.tokens), t.finish_reason, t.reward_parts)
            for t in trajectories
        ]
    )
    rewards = np.asarray([r[1] for r in rows])
    groups: dict[int, list[float]] = {}
    for row in rows:
        groups.setdefault(row[0], []).append(row[1])
    metrics: dict[str, Any] = {
        "reward/mean": rewards.mean(),
        "reward/std": rewards.std(),
        "reward/zero_std": np.mean([min(g) == max(g) for g in groups.values()]),
        "response/length": np.mean([r[2] for r in rows]),
        "response/truncated": np.mean([r[4] == "length" for r in rows]),
        "tokens": int(sum(r[3] for r in rows)),
        "data/skipped_prompts": len(run.stream.skipped),
    }
    for part in rows[0][5]:
        metrics[f"reward/{part}"] = np.mean([r[5][part] for r in rows])
    return metrics


def fallback_metrics(run: Run, rollout_batch: list[list[Batch]]) -> dict[str, int]:
    """Tokens that were routed freely although the engine's routes were to be replayed: it did not tell them."""
    if run.config.routing.source not in FROM_ENGINE:
        return {}
    mine = sum(b.without_route for batches in rollout_batch for b in batches) if run.trainer.reports else 0
    return {"routing/fallback_tokens": run.ranks.total(mine)}


def _samples(run: Run, trajectories: list[Trajectory]) -> Iterator[dict[str, Any]]:
    """Rollouts for the report's table."""
    for t in trajectories:
        yield {
            "prompt": run.tokenizer.decode(t.tokens[: t.prompt_length]),
            "response": t.text,
            "reward": t.reward,
            **{f"reward/{part}": value for part, value in t.reward_parts.items()},
            "finish": t.finish_reason,
            "weights": ",".join(span.version for span in t.weight_spans),
        }
