"""Chooses the rollouts of a step that the report shows, so that reward hacking is visible, and measures conversations."""

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
"""(group, response or its hash). The samples of one prompt have the same group."""


def choose(rollouts: Sequence[tuple[int, Hashable, float]], most: int) -> dict[Place, int]:
    """Choose at most `most` of the (group, response, reward) rollouts, and return {place: number of equal responses}.

    The first quarter of the choice (rounded up) holds the responses with the highest rewards. The second quarter holds the most
    frequent responses. The remaining ones are taken from the prompts in turn.
    """
    counts = Counter(response for _, response, _ in rollouts)
    groups: dict[int, list[Place]] = {}
    for group, response, _ in rollouts:
        groups.setdefault(group, []).append((group, response))
    best = sorted(rollouts, key=lambda r: (-r[2], -counts[r[1]]))
    paid = {response: (group, response) for group, response, _ in reversed(best)}  # the group with its highest reward
    quarter = -(-most // 4)
    chosen = [paid[response] for response in list(dict.fromkeys(r[1] for r in best))[:quarter]]
    chosen += [paid[response] for response, count in counts.most_common(quarter) if count > 1]
    chosen += [place for turn in zip_longest(*groups.values()) for place in turn if place]
    return {place: counts[place[1]] for place in list(dict.fromkeys(chosen))[:most]}


# -- responses -----------------------------------------------------------------------------------------------------------
# Trajectories in readable form: one JSON line for each response.


def readable(tokenizer: PreTrainedTokenizerBase, trajectory: Trajectory) -> dict[str, Any]:
    """Return prompt and response as text, the reward and its parts, how the response ended, and the weight versions used."""
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
    """Write a file of JSON lines atomically. Errors: UserError naming the file."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}; free some disk space and start again") from None


# -- agents --------------------------------------------------------------------------------------------------------------
# Statistics of conversations: turns, tool calls, reasons of ending, and tokens that train.


ENDINGS = ("stop", "turns", "tokens", "time", "failure")


def agent_metrics(trajectories: Sequence[Trajectory]) -> Metrics:
    """Return means over this leader's conversations of a step.

    agent/turns: number of the model's replies. calls: number of well-formed tool calls. malformed: share of malformed calls
    among all attempted calls. tool_seconds: time of the tools in seconds. end_X: share of the samples that ended for reason X.
    response/trained: number of tokens that the policy sampled and trains on; response/length also counts observations.
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
