"""A sampled response with all data from the engine that the trainer needs, and its record on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch

from megatron_rl.data.sequence import FIELDS, RouterFeatures, Sequence
from megatron_rl.errors import UserError

TRUNCATED = ("length", "turns", "tokens", "time")
"""Finish reasons of a response that a limit ended, not the policy."""
OVERLONG = "overlong"
"""Name of the reward part that depends only on the response's length."""


@dataclass
class WeightSpan:
    """Range [start, end) of response tokens that were sampled with the weights `version`."""

    version: str
    start: int
    end: int


@dataclass
class Turn:
    """A range of a conversation's response tokens: a reply of the policy, or an observation that answers a reply."""

    role: str
    """Role in the conversation: "assistant" for sampled tokens; "tool" or "user" for an observation."""
    start: int
    end: int
    calls: list[str] = field(default_factory=list)
    """Names of the tools that a reply calls."""
    malformed: str = ""
    """Error in a tool call of the reply; empty without an error."""
    seconds: float = 0.0
    """Time that the tools took for an observation, in seconds."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """Messages of the turn in OpenAI's form, for models with another tokenizer."""


@dataclass(kw_only=True)
class Trajectory(Sequence):
    """A prompt with a sampled response. The engine sets the fields loss_mask and rollout_log_probs."""

    prompt_id: str
    """Id of the prompt in its data set."""
    group_id: int
    """Id of the group: all samples of one prompt in one step."""
    finish_reason: str = "stop"
    """Why the response ended: stop | length | abort. Why a conversation ended: stop | turns | tokens | time | failure."""
    support: dict[str, float] = field(default_factory=dict)
    """Fields of the `SamplingSupport` that sampled the response; empty if a record does not have them."""
    weight_spans: list[WeightSpan] = field(default_factory=list)
    weights: str = ""
    """Digest of the weights that sampled the last token and computed the routes; set only in trajectories with routes on
    disk."""
    text: str = ""
    """Decoded text of the response; in a conversation, the final answer."""
    reward: float = 0.0
    outcome_reward: float = 0.0
    """Reward of the whole response as advantages use it, fp32: clipped and whitened, without the rewards of single steps."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    masked: bool = False
    """True if the response had a failure that was not the policy's fault. The loss and the group's baseline ignore this
    response."""
    turns: list[Turn] = field(default_factory=list)
    """Turns of a conversation."""
    part: int = 0
    """Index of the sequence within its sample. A sample has several sequences if an agent holds several conversations for one
    prompt. Later sequences have the reward and the advantage of the first (0)."""

    @property
    def truncated(self) -> bool:
        """True if a limit ended the response before the policy did."""
        return self.finish_reason in TRUNCATED


# -- record --------------------------------------------------------------------------------------------------------------
# Trajectories on disk: one .npz file per step and data-parallel rank, written atomically, without pickles.


_PLAIN = (
    *("prompt_id", "group_id", "prompt_length", "finish_reason", "support", "weights", "text", "reward"),
    *("reward_parts", "masked", "part"),
)


def file_of(folder: Path, step: int, data_rank: int) -> Path:
    """Return the file of the trajectories that data-parallel rank `data_rank` sampled for step `step` (0-based)."""
    return folder / f"step_{step:06d}.rank{data_rank}.npz"


def save_trajectories(path: Path, trajectories: list[Trajectory]) -> None:
    """Write trajectories to `path` atomically. Errors: UserError naming the file if the disk is full."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            write_trajectories(file, trajectories)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; free some disk space, or turn off rollout.record") from None


def write_trajectories(file: IO[bytes], trajectories: list[Trajectory], **more: np.ndarray) -> None:
    """Write trajectories to an open file. more: additional arrays, stored under their names."""
    arrays: dict[str, np.ndarray] = {}
    rows = []
    for index, t in enumerate(trajectories):
        row = {key: getattr(t, key) for key in _PLAIN}
        row["weight_spans"] = [[s.version, s.start, s.end] for s in t.weight_spans]
        row["turns"] = [asdict(turn) for turn in t.turns]
        row["kept"] = None if t.kept is None else [len(k) for k in t.kept]
        rows.append(row)
        arrays[f"{index}.tokens"] = t.tokens
        arrays |= {f"{index}.{name}": values for name, values in t.fields.items()}
        if t.routes is not None:
            arrays[f"{index}.routes"] = t.routes
        if t.gates is not None:
            arrays[f"{index}.gates"] = t.gates
        if t.features is not None:
            bf16 = t.features.hidden.dtype == torch.bfloat16  # numpy does not have this type
            arrays[f"{index}.positions"] = t.features.positions.numpy()
            arrays[f"{index}.hidden"] = (t.features.hidden.view(torch.int16) if bf16 else t.features.hidden).numpy()
            arrays[f"{index}.logits"] = t.features.logits.numpy()
        if t.kept is not None:
            arrays[f"{index}.kept"] = np.concatenate([np.zeros(0, np.int32), *t.kept])
    arrays["rows"] = np.frombuffer(json.dumps(rows).encode(), np.uint8)
    np.savez(file, **cast("dict[str, Any]", arrays | more))


def read_trajectories(arrays: Mapping[str, np.ndarray]) -> list[Trajectory]:
    """Read trajectories that `write_trajectories` wrote. arrays: the mapping that np.load returns.

    Errors: KeyError and other exceptions for other content.
    """
    rows = json.loads(arrays["rows"].tobytes())
    return [_trajectory(arrays, index, row) for index, row in enumerate(rows)]


def load_trajectories(path: Path) -> list[Trajectory]:
    """Read trajectories that `save_trajectories` wrote. Errors: UserError naming the file if it is missing or damaged."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            return read_trajectories(arrays)
    except FileNotFoundError:
        raise UserError(f"rollout.load: {path} does not exist (recorded on other data-parallel ranks?)") from None
    except Exception as error:
        raise UserError(f"rollout.load: {path} is damaged ({type(error).__name__}: {error})") from None


def _trajectory(arrays: Mapping[str, np.ndarray], index: int, row: dict) -> Trajectory:
    kept = None
    if row.get("kept") is not None:
        # Without borders, np.split would return one part, but a response without tokens has none.
        kept = np.split(arrays[f"{index}.kept"], np.cumsum(row["kept"])[:-1]) if row["kept"] else []
    fields = {name: arrays[f"{index}.{name}"] for name in FIELDS if f"{index}.{name}" in arrays}
    if f"{index}.log_probs" in arrays:  # name of the field in older records
        fields["rollout_log_probs"] = arrays[f"{index}.log_probs"]
    features = None
    if f"{index}.positions" in arrays:
        features = RouterFeatures(
            *(torch.from_numpy(arrays[f"{index}.{key}"]) for key in ("positions", "hidden", "logits"))
        )
        if features.hidden.dtype == torch.int16:
            features.hidden = features.hidden.view(torch.bfloat16)
    return Trajectory(
        **{key: row[key] for key in _PLAIN if key in row},  # keys that an older record lacks get their defaults
        tokens=arrays[f"{index}.tokens"],
        fields=fields,
        kept=kept,
        routes=arrays.get(f"{index}.routes"),
        gates=arrays.get(f"{index}.gates"),
        features=features,
        weight_spans=[WeightSpan(*span) for span in row["weight_spans"]],
        turns=[Turn(**turn) for turn in row.get("turns", [])],
    )
