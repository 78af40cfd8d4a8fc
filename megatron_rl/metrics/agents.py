"""What conversations did: turns, calls, how they ended, and what of them trains."""

from __future__ import annotations

from collections.abc import Sequence

from megatron_rl.data.trajectory import Trajectory
from megatron_rl.metrics.reduce import Metrics, mean

ENDINGS = ("stop", "turns", "tokens", "time", "failure")


def agent_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Means over this leader's conversations of a step.

    agent/turns: replies; calls: calls of tools that were well formed; malformed: share of malformed ones among all that were
    tried; tool_seconds: time of tools; end_X: share of samples that ended for reason X; response/trained: tokens that train
    (those that the policy sampled), of the response/length with observations.
    """
    count = len(trajectories)
    samples = [t for t in trajectories if not t.part]
    replies = [turn for t in trajectories for turn in t.turns if turn.role == "assistant"]
    calls = sum(len(turn.calls) for turn in replies)
    malformed = sum(bool(turn.malformed) for turn in replies)
    return {
        "agent/turns": mean(len(replies), count),
        "agent/calls": mean(calls, count),
        "agent/malformed": mean(malformed, calls + malformed),
        "agent/tool_seconds": mean(sum(turn.seconds for t in trajectories for turn in t.turns), count),
        **{f"agent/end_{end}": mean(sum(t.finish_reason == end for t in samples), len(samples)) for end in ENDINGS},
        "response/trained": mean(sum(int(t["loss_mask"].sum()) for t in trajectories), count),
    }
