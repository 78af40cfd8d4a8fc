"""Which rollouts a step keeps for the report, and which of a run's it shows first, so that a gamed reward is seen."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_rl.data.trajectory import Trajectory, Turn
from megatron_rl.errors import UserError
from megatron_rl.metrics.reduce import Metrics, mean

Place = tuple[int, Hashable]
"""(group, response or what stands for it): samples of one prompt share the group."""


def choose(rollouts: Sequence[tuple[int, Hashable, float]], most: int) -> dict[Place, int]:
    """{place: how many of the step's rollouts have its response} of at most `most` (group, response, reward) to keep.

    A quarter of them (rounded up) are the best-paid responses, then a quarter the most frequent ones, and the rest go from
    prompt to prompt.
    """
    counts = Counter(response for _, response, _ in rollouts)
    groups: dict[int, list[Place]] = {}
    for group, response, _ in rollouts:
        groups.setdefault(group, []).append((group, response))
    best = sorted(rollouts, key=lambda r: (-r[2], -counts[r[1]]))
    paid = {response: (group, response) for group, response, _ in reversed(best)}  # where each is paid best
    quarter = -(-most // 4)
    chosen = [paid[response] for response in list(dict.fromkeys(r[1] for r in best))[:quarter]]
    chosen += [paid[response] for response, count in counts.most_common(quarter) if count > 1]
    chosen += [place for turn in zip_longest(*groups.values()) for place in turn if place]
    return {place: counts[place[1]] for place in list(dict.fromkeys(chosen))[:most]}


# -- responses -----------------------------------------------------------------------------------------------------------
# Responses as people read them: what a trajectory says in words, one JSON line each.


def readable(tokenizer: PreTrainedTokenizerBase, trajectory: Trajectory) -> dict[str, Any]:
    """Prompt and response as text, the reward and its parts, how the response ended and whose weights sampled it."""
    t = trajectory
    return {
        "prompt_id": t.prompt_id,
        "prompt": tokenizer.decode(t.tokens[: t.prompt_length]),
        "response": t.text,
        "reward": t.reward,
        **{f"reward/{part}": value for part, value in t.reward_parts.items()},
        "finish": t.finish_reason,
        "weights": ",".join(span.version for span in t.weight_spans),
        **({"turns": [_turn(tokenizer, t, turn) for turn in t.turns]} if t.turns else {}),
        **({"masked": t.masked} if t.turns or t.masked else {}),
    }


def _turn(tokenizer: PreTrainedTokenizerBase, trajectory: Trajectory, turn: Turn) -> dict[str, Any]:
    labels = trajectory.tokens[trajectory.prompt_length :][turn.start : turn.end]
    trains = bool(trajectory["loss_mask"][turn.start : turn.end].any())
    note = {"malformed": turn.malformed} if turn.malformed else {}
    return {"role": turn.role, "text": str(tokenizer.decode(labels.tolist())), "trains": trains} | note


def write_responses(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write a file of JSON lines, whole or not at all. Errors: UserError naming the file."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; free some space and start again") from None


# -- agents --------------------------------------------------------------------------------------------------------------
# What conversations did: turns, calls, how they ended, and what of them trains.


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
