"""Hugging Face model folders as files: check what is read, copy what belongs to the tokenizer, write safetensors."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from megatron_rl.errors import UserError

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 1024**3


def check_weight_files(folder: Path) -> None:
    """Open every safetensors file of the folder. Errors: UserError naming a file that is missing or truncated."""
    files = sorted(folder.glob("*.safetensors"))
    where: dict[str, str] = {}
    if (folder / INDEX).is_file():
        try:
            where = json.loads((folder / INDEX).read_text())["weight_map"]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"model folder {folder}: {INDEX} is damaged") from None
        files = [folder / name for name in sorted(set(where.values()))]
    if not files:
        raise UserError(
            f"model folder {folder}: has no .safetensors files (other formats: save it again with transformers)"
        )
    for file in files:
        if not file.is_file():
            raise UserError(f"model folder {folder}: {file.name} is missing, though {INDEX} names it")
        try:
            with safe_open(file, "pt") as opened:
                present = set(opened.keys())
        except (SafetensorError, OSError) as error:
            raise UserError(
                f"model folder {folder}: {file.name} is truncated or not a safetensors file ({error})"
            ) from None
        lost = sorted(name for name, holder in where.items() if holder == file.name and name not in present)
        if lost:
            raise UserError(f"model folder {folder}: {file.name} lacks tensor {lost[0]}, which {INDEX} places there")


def read_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the folder's tensors one at a time, after check_weight_files."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                yield name, opened.get_tensor(name)


def copy_metadata(source: Path, out: Path, dtype: torch.dtype, changes: dict[str, Any] | None = None) -> None:
    """Copy config.json (for weights of `dtype`, and with `changes`), generation_config.json and the tokenizer's files."""
    out.mkdir(parents=True, exist_ok=True)
    for file in source.iterdir():
        if file.suffix in (".json", ".jinja", ".txt", ".model", ".tiktoken") and not file.name.endswith(".index.json"):
            shutil.copyfile(file, out / file.name)
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config", None)  # weights are written as they are trained
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = str(dtype).removeprefix("torch.")
    config |= changes or {}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


class ShardWriter:
    """Writes tensors as they come into safetensors files of at most `shard_bytes`, with an index for several files.

    Holds one file's tensors in memory; `close` writes the rest and gives the files their names.
    """

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = folder
        self._limit = shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Take a copy of the tensor; write a file when it is full."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._limit:
            self._flush()
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += size

    def close(self) -> None:
        """Write the last file and the index, and give the files their names."""
        if self._pending:
            self._flush()
        count = len(self._shards)
        names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
        if count == 1:
            names = ["model.safetensors"]
        for index, name in enumerate(names):
            (self._folder / f"{index}.part").rename(self._folder / name)
        if count > 1:
            weight_map = {tensor: name for shard, name in zip(self._shards, names, strict=True) for tensor in shard}
            index = {"metadata": {"total_size": self._total_bytes}, "weight_map": dict(sorted(weight_map.items()))}
            (self._folder / INDEX).write_text(json.dumps(index, indent=2) + "\n")

    def _flush(self) -> None:
        save_file(self._pending, self._folder / f"{len(self._shards)}.part", metadata={"format": "pt"})
        self._shards.append(list(self._pending))
        self._total_bytes += self._pending_bytes
        self._pending, self._pending_bytes = {}, 0


def write_weights(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int = SHARD_BYTES) -> None:
    """Write all tensors of an iterator. It is run to its end even if the disk fails. Errors: OSError, at the end."""
    writer, failure = ShardWriter(folder, shard_bytes), None
    for name, tensor in tensors:
        if failure is None:
            try:
                writer.add(name, tensor)
            except (OSError, SafetensorError) as error:
                failure = error
    if failure is not None:
        raise OSError(*failure.args)
    writer.close()
