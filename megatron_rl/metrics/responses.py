"""Responses as people read them: what a trajectory says in words, one JSON line each."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_rl.data.trajectory import Trajectory, Turn
from megatron_rl.errors import UserError


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
    """A turn of a conversation, its tokens decoded with the template's; whether it trains."""
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
