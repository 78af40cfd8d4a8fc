"""Trajectories on disk: one .npz a step and data-parallel rank, written whole or not at all; no pickles."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import torch

from megatron_rl.data.sequence import FIELDS, RouterFeatures
from megatron_rl.data.trajectory import Trajectory, Turn, WeightSpan
from megatron_rl.errors import UserError

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
    """What write_trajectories wrote, from np.load's mapping. Errors: KeyError and others for what it did not."""
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
