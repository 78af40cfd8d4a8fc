"""What a step leaves in the log: rewards, losses, mismatch and times, put together over all ranks."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_rl.data.packing import Batch
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.launch.run import Clock, Run
from megatron_rl.metrics.hardware import hardware_metrics
from megatron_rl.metrics.mismatch_metrics import panel_metrics
from megatron_rl.metrics.responses import readable
from megatron_rl.routing.metrics import PREFIX, route_metrics
from megatron_rl.routing.replay import FROM_ENGINE
from megatron_rl.vp2o import transform as stein

COUNTED = ("update/skipped", "update/predictors_skipped", "update/rejected", "update/backtracks")
"""Of the updates of a step these are added up."""


def log_step(
    run: Run,
    trajectories: list[Trajectory],
    updates: list[list[Batch]],
    update_sums: list[dict[str, float]],
    engine: dict[str, float],
    clock: Clock,
) -> None:
    """Write the line of the step that has just ended (all ranks call; rank 0 writes)."""
    metrics = reward_metrics(run, trajectories) | update_metrics(update_sums) | panel_metrics(run, updates) | engine
    metrics |= route_metrics(update_sums) | fallback_metrics(run, updates) | stein.vp2o_metrics(update_sums)
    times = clock.times()
    metrics["throughput/tokens_per_s"] = metrics["tokens"] / times["time/step_s"]
    sequences = [(len(t.tokens) - 1, t.response_length) for t in trajectories]
    metrics |= hardware_metrics(run, sequences, times, metrics["tokens"])
    run.logger.log_samples(run.step, (readable(run.tokenizer, t) for t in trajectories))
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


def update_metrics(updates: list[dict[str, float]]) -> dict[str, float]:
    """Sums over tokens become means; per-update figures (update/...) are averaged, skipped updates are counted."""
    tokens = sum(u["tokens"] for u in updates)
    metrics = {}
    for key in updates[0]:
        total = sum(u[key] for u in updates)
        if key in COUNTED:
            metrics[key] = total
        elif key.startswith("update/"):
            metrics[key] = total / len(updates)
        elif key != "tokens" and not key.startswith((PREFIX, stein.PREFIX)):
            metrics[key] = total / max(tokens, 1)
    return metrics


def fallback_metrics(run: Run, updates: list[list[Batch]]) -> dict[str, int]:
    """Tokens that were routed freely although the engine's routes were to be replayed: it did not tell them."""
    if run.config.routing.source not in FROM_ENGINE:
        return {}
    mine = sum(b.without_route for batches in updates for b in batches) if run.trainer.reports else 0
    return {"routing/fallback_tokens": run.ranks.total(mine)}
