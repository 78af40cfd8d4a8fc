"""The loop of megatron_rl/train.py in simulation: what a step waits for, and where its seconds go."""

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
    """Seconds of the clock, by part, and what was learned."""

    rollout_s: float
    """The trainer waits for responses."""
    log_probs_s: float
    train_s: float
    sync_s: float
    """The push, and with partial_rollout: false the wait for what is being sampled."""
    other_s: float
    tokens: float
    """Tokens of prompts and responses."""
    staleness: np.ndarray
    """Steps between the oldest weights of each response and those that learn from it."""
    overlap_s: float
    """Seconds in which trainer and servers both worked, if neither had slowed the other down."""

    @property
    def step_s(self) -> float:
        """All of it."""
        return self.rollout_s + self.log_probs_s + self.train_s + self.sync_s + self.other_s


@dataclass(frozen=True)
class Simulated:
    """A run, as far as it was looked at."""

    steps: list[Step]
    idle: float
    """Share of the servers' time in which they run nothing; a push counts."""
    tail: float
    """Share of the time in which some responses run, but fewer than a tenth of as many as ran at most."""
    work: list[Work]
    """Work of each server."""


@dataclass(frozen=True)
class TrainerWork:
    """Work of the slowest rank in an epoch, in units of which `Costs` has the seconds; waits for stages count."""

    tokens: float
    pairs: float
    micro_batches: float
    updates: int

    @classmethod
    def of(cls, setting: Setting, lengths: Sequence[int] | np.ndarray) -> TrainerWork:
        """Sequences are shared out evenly, but none is cut: the slowest rank has the longest one at least."""
        whole = np.asarray(lengths, float) + setting.prompt_tokens
        ranks, updates = setting.leaders, setting.updates_per_step
        tokens = max(whole.sum() / ranks / updates, whole.max())
        pairs = max((whole**2).sum() / ranks / updates, whole.max() ** 2) / 2
        micro_batches = max(1, math.ceil(tokens / setting.tokens_per_micro_batch - 1e-9))
        # Stages of a pipeline wait for one another: as if there were more to do.
        times = updates / (1 - pipeline_bubble(setting.pipeline, micro_batches, setting.virtual_pipeline))
        return cls(tokens * times, pairs * times, micro_batches * times, updates)

    def times(self, epochs: int) -> TrainerWork:
        """Give what it does in so many epochs."""
        return TrainerWork(
            epochs * self.tokens, epochs * self.pairs, epochs * self.micro_batches, epochs * self.updates
        )

    def passes_s(self, costs: Costs) -> float:
        """Forwards and backwards."""
        return (
            costs.train_token_s * self.tokens
            + costs.train_pair_s * self.pairs
            + costs.micro_batch_s * self.micro_batches
        )


def simulate(setting: Setting, costs: Costs, lengths: Sequence[Sequence[int] | np.ndarray], skip: int = 0) -> Simulated:
    """Steps that learn from responses of these lengths, [responses] of each step, in order.

    skip: steps at the beginning, and as many as max_staleness at the end, that are left out: there the servers have nothing
    to be ahead of.
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
        while asked <= min(step + setting.max_staleness, len(lengths) - 1):  # as megatron_rl/rollout/buffer.py asks
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
