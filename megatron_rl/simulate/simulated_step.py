"""Simulation of the training loop in megatron_rl/train.py: how long the parts of a step take, including waits."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from megatron_rl.config.plan import pipeline_bubble
from megatron_rl.simulate.costs import Costs, Setting
from megatron_rl.simulate.servers import Servers, Work


@dataclass(frozen=True)
class Step:
    """Seconds of wall-clock time of each part of a step, and the step's tokens."""

    rollout_s: float
    """Seconds in which the trainer waits for responses."""
    log_probs_s: float
    train_s: float
    sync_s: float
    """Seconds of the weight sync. With partial_rollout: false, they include the wait for running responses."""
    other_s: float
    tokens: float
    """Number of prompt and response tokens."""
    staleness: np.ndarray
    """For each response, the number of steps between its oldest weights and the step that trains on it."""
    overlap_s: float
    """Seconds in which trainer and servers both worked, before overlap_slowdown is applied."""

    @property
    def step_s(self) -> float:
        """Whole time of the step in seconds."""
        return self.rollout_s + self.log_probs_s + self.train_s + self.sync_s + self.other_s


@dataclass(frozen=True)
class Simulated:
    """The simulated steps of a run, without the steps at its start and end that `simulate` skips."""

    steps: list[Step]
    idle: float
    """Share of the servers' time in which a server runs nothing, including weight syncs."""
    tail: float
    """Share of the run's time during which responses run, but fewer than a tenth of the most that ever run at once."""
    work: list[Work]
    """Work that each server has done."""


@dataclass(frozen=True)
class TrainerWork:
    """Work of the slowest data-parallel rank in an epoch, in the units of `Costs`. Waits for pipeline stages count as work."""

    tokens: float
    pairs: float
    micro_batches: float
    updates: int

    @classmethod
    def of(cls, setting: Setting, lengths: Sequence[int] | np.ndarray) -> TrainerWork:
        """Compute the work. Sequences are balanced but not cut, so the slowest rank has at least the longest sequence."""
        whole = np.asarray(lengths, float) + setting.prompt_tokens
        ranks, updates = setting.leaders, setting.updates_per_step
        tokens = max(whole.sum() / ranks / updates, whole.max())
        pairs = max((whole**2).sum() / ranks / updates, whole.max() ** 2) / 2
        micro_batches = max(1, math.ceil(tokens / setting.tokens_per_micro_batch - 1e-9))
        # Waits of pipeline stages for each other count as additional work.
        times = updates / (1 - pipeline_bubble(setting.pipeline, micro_batches, setting.virtual_pipeline))
        return cls(tokens * times, pairs * times, micro_batches * times, updates)

    def times(self, epochs: int) -> TrainerWork:
        """Return the work of this number of epochs."""
        return TrainerWork(
            epochs * self.tokens, epochs * self.pairs, epochs * self.micro_batches, epochs * self.updates
        )

    def passes_s(self, costs: Costs) -> float:
        """Return the seconds of the forward and backward passes."""
        return (
            costs.train_token_s * self.tokens
            + costs.train_pair_s * self.pairs
            + costs.micro_batch_s * self.micro_batches
        )


def simulate(setting: Setting, costs: Costs, lengths: Sequence[Sequence[int] | np.ndarray], skip: int = 0) -> Simulated:
    """Simulate steps that train on responses of these lengths, given as [responses] for each step, in order.

    skip: number of steps at the start to leave out, because the servers are not yet ahead of the trainer. If `skip` is not 0,
    the last max_staleness steps are left out too.
    """
    servers, steps, asked = Servers(setting, costs), [], 0
    last = len(lengths) - setting.max_staleness if skip else len(lengths)
    idle_s = wall = 0.0
    for step, of_step in enumerate(lengths):
        if step == skip:
            servers.seconds_with.clear()
            idle_s, wall = servers.idle_s, servers.wall
        if step == last:
            break
        times, overlapped = [servers.wall], servers.overlap_s
        while asked <= min(step + setting.max_staleness, len(lengths) - 1):  # as megatron_rl/rollout/buffer.py does
            servers.ask(asked, lengths[asked])
            asked += 1
        responses = servers.finish(step)
        times.append(servers.wall)
        work = TrainerWork.of(setting, of_step)
        score = setting.scoring_passes * costs.log_probs_share * work.passes_s(costs)
        servers.pass_time(costs.log_probs_s + score)
        times.append(servers.wall)
        learning = work.times(setting.epochs)
        servers.pass_time(learning.passes_s(costs) + costs.update_s * learning.updates)
        times.append(servers.wall)
        if not setting.partial_rollout:
            servers.wait_for_all()
        servers.pause()
        servers.pass_time(costs.push_s + costs.push_server_s * setting.servers)
        servers.resume(version=step + 1)
        times.append(servers.wall)
        servers.pass_time(costs.other_s + costs.turns_s * setting.colocated)
        times.append(servers.wall)
        if step >= skip:
            rollout_s, log_probs_s, train_s, sync_s, other_s = np.diff(times).tolist()
            steps.append(
                Step(
                    rollout_s=rollout_s,
                    log_probs_s=log_probs_s,
                    train_s=train_s,
                    sync_s=sync_s,
                    other_s=other_s,
                    tokens=float(np.sum(of_step)) + setting.prompt_tokens * len(of_step),
                    staleness=np.asarray([step - response.version for response in responses]),
                    overlap_s=servers.overlap_s - overlapped,
                )
            )
    wall = servers.wall - wall
    most = max((count for count, seconds in servers.seconds_with.items() if seconds), default=0)
    tail = sum(seconds for count, seconds in servers.seconds_with.items() if 0 < count < most / 10)
    return Simulated(
        steps=steps,
        idle=(servers.idle_s - idle_s) / (wall * setting.servers) if wall else 0.0,
        tail=tail / wall if wall else 0.0,
        work=servers.work,
    )
