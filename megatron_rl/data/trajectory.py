"""One sampled response as it comes back from the engine with everything that the trainer needs to know about it."""

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
"""Endings that a limit brought about, before the policy ended."""
OVERLONG = "overlong"
"""The part of a reward that is about the response's length alone."""


@dataclass
class WeightSpan:
    """Response tokens [start, end) were sampled from the weights `version`."""

    version: str
    start: int
    end: int


@dataclass
class Turn:
    """A stretch of a conversation's response tokens: what the policy said, or what it was answered."""

    role: str
    """assistant: sampled; tool or user: an observation."""
    start: int
    end: int
    calls: list[str] = field(default_factory=list)
    """Tools that a reply calls."""
    malformed: str = ""
    """Error in a reply's call."""
    seconds: float = 0.0
    """The tools' time, of an observation."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The same in OpenAI's form, for readers with another tokenizer."""


@dataclass(kw_only=True)
class Trajectory(Sequence):
    """A prompt with a sampled response. Of its fields the engine gives loss_mask and rollout_log_probs."""

    prompt_id: str
    """Identifies the prompt in its data set."""
    group_id: int
    """Samples of one prompt in one step share it."""
    finish_reason: str = "stop"
    """stop | length | abort; of a conversation stop | turns | tokens | time | failure."""
    support: dict[str, float] = field(default_factory=dict)
    """Fields of the `SamplingSupport` that it was sampled under; empty where a record does not say."""
    weight_spans: list[WeightSpan] = field(default_factory=list)
    weights: str = ""
    """Digest of the weights that its last token, and so its routes, came from; of a recorded trajectory with routes."""
    text: str = ""
    """The response, decoded; of a conversation its final answer."""
    reward: float = 0.0
    outcome_reward: float = 0.0
    """The reward of the whole as advantages see it: clipped, whitened, without what is paid at the ends of steps; in fp32."""
    reward_parts: dict[str, float] = field(default_factory=dict)
    masked: bool = False
    """Nothing of it trains, and its group's baseline leaves it out: what went wrong was not the policy's fault."""
    turns: list[Turn] = field(default_factory=list)
    """Turns of a conversation."""
    part: int = 0
    """Which sequence of its sample it is: an agent may lead several conversations for one prompt. Those behind the first, 0,
    have its reward and its advantage."""

    @property
    def truncated(self) -> bool:
        """True if a limit ended it before the policy did."""
        return self.finish_reason in TRUNCATED


# -- record --------------------------------------------------------------------------------------------------------------
# Trajectories on disk: one .npz a step and data-parallel rank, written whole or not at all; no pickles.


_PLAIN = (
    *("prompt_id", "group_id", "prompt_length", "finish_reason", "support", "weights", "text", "reward"),
    *("reward_parts", "masked", "part"),
)


def file_of(folder: Path, step: int, data_rank: int) -> Path:
    """File of the trajectories that data-parallel rank `data_rank` trained on in step `step` (0-based)."""
    return folder / f"step_{step:06d}.rank{data_rank}.npz"


def save_trajectories(path: Path, trajectories: list[Trajectory]) -> None:
    """Write trajectories to `path` (a temporary file that is renamed). Errors: UserError naming it, of a full disk."""
    temporary = path.with_name(path.name + ".tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, "wb") as file:
            write_trajectories(file, trajectories)
        os.replace(temporary, path)
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}; free some space, or leave rollout.record out") from None


def write_trajectories(file: IO[bytes], trajectories: list[Trajectory], **more: np.ndarray) -> None:
    """Write trajectories to a file that is open; more: arrays that go with them, by name."""
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
            bf16 = t.features.hidden.dtype == torch.bfloat16  # which numpy does not have
            arrays[f"{index}.positions"] = t.features.positions.numpy()
            arrays[f"{index}.hidden"] = (t.features.hidden.view(torch.int16) if bf16 else t.features.hidden).numpy()
            arrays[f"{index}.logits"] = t.features.logits.numpy()
        if t.kept is not None:
            arrays[f"{index}.kept"] = np.concatenate([np.zeros(0, np.int32), *t.kept])
    arrays["rows"] = np.frombuffer(json.dumps(rows).encode(), np.uint8)
    np.savez(file, **cast("dict[str, Any]", arrays | more))


def read_trajectories(arrays: Mapping[str, np.ndarray]) -> list[Trajectory]:
    """Read trajectories that `write_trajectories` wrote, from np.load's mapping.

    Errors: KeyError and others for anything else.
    """
    rows = json.loads(arrays["rows"].tobytes())
    return [_trajectory(arrays, index, row) for index, row in enumerate(rows)]


def load_trajectories(path: Path) -> list[Trajectory]:
    """Read what save_trajectories wrote. Errors: UserError naming the file that is missing or damaged."""
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
        # np.split makes one part of no borders, where a response without tokens has none.
        kept = np.split(arrays[f"{index}.kept"], np.cumsum(row["kept"])[:-1]) if row["kept"] else []
    fields = {name: arrays[f"{index}.{name}"] for name in FIELDS if f"{index}.{name}" in arrays}
    if f"{index}.log_probs" in arrays:  # what an older record calls them
        fields["rollout_log_probs"] = arrays[f"{index}.log_probs"]
    features = None
    if f"{index}.positions" in arrays:
        features = RouterFeatures(
            *(torch.from_numpy(arrays[f"{index}.{key}"]) for key in ("positions", "hidden", "logits"))
        )
        if features.hidden.dtype == torch.int16:
            features.hidden = features.hidden.view(torch.bfloat16)
    return Trajectory(
        **{key: row[key] for key in _PLAIN if key in row},  # what an older record does not know has a default
        tokens=arrays[f"{index}.tokens"],
        fields=fields,
        kept=kept,
        routes=arrays.get(f"{index}.routes"),
        gates=arrays.get(f"{index}.gates"),
        features=features,
        weight_spans=[WeightSpan(*span) for span in row["weight_spans"]],
        turns=[Turn(**turn) for turn in row.get("turns", [])],
    )
