"""Files of Hugging Face model folders: checks of the weights, copies of all other files, and writing of safetensors."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from megatron_rl_plugin.fingerprint import describe
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from megatron_rl.config import ServerConfig
from megatron_rl.errors import UserError
from megatron_rl.models import fp8
from megatron_rl.models.families import family_of
from megatron_rl.models.parallel_check import reason
from megatron_rl.models.precision import ROLLOUT_DTYPES, torch_dtype

INDEX = "model.safetensors.index.json"
SHARD_BYTES = 5 * 1024**3
_DIGESTED_BYTES = 4096


def check_weight_files(folder: Path) -> None:
    """Open every safetensors file of the folder. Errors: UserError that names a missing or truncated file."""
    files = sorted(folder.glob("*.safetensors"))
    where: dict[str, str] = {}
    if (folder / INDEX).is_file():
        try:
            where = json.loads((folder / INDEX).read_text())["weight_map"]
            files = [folder / name for name in sorted(set(where.values()))]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise UserError(f"model folder {folder}: {INDEX} is damaged") from None
        if outside := [file for file in files if file.parent != folder]:
            raise UserError(f"model folder {folder}: {INDEX} names {outside[0]}, which is not a file of the folder")
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


def weights_digest(folder: Path) -> str:
    """Return a digest of a folder's weights, computed from the files' headers and the first 4096 bytes of each tensor.

    The first bytes suffice, because training changes every number of a trained weight. Errors: UserError for a damaged file.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.glob("*.safetensors")):
        try:
            with path.open("rb") as file:
                size = int.from_bytes(file.read(8), "little")
                if size > path.stat().st_size:
                    raise ValueError(f"a header of {size} bytes")
                header = file.read(size)
                digest.update(path.name.encode() + header)
                for name, tensor in sorted(json.loads(header).items()):
                    if name != "__metadata__":
                        start, end = tensor["data_offsets"]
                        file.seek(8 + len(header) + start)
                        digest.update(file.read(min(end - start, _DIGESTED_BYTES)))
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise UserError(f"model folder {folder}: {path.name} cannot be read ({error})") from None
    return digest.hexdigest()


def check_same_tokenizer(folder: str | Path, other: str | Path, key: str) -> None:
    """Raise UserError if the models in `folder` and `other` have different tokens for the same ids.

    The vocabularies must be equal, including added special tokens. The tokens for end of sequence and padding may differ, as
    between a base model and its instruct model, because models get only token ids. key: config key of `other`, for the message.
    """
    if Path(folder).resolve() == Path(other).resolve():
        return
    ours, theirs = (read_tokenizer(each).get_vocab() for each in (folder, other))
    if different := sorted(ours.items() ^ theirs.items(), key=lambda item: (item[1], item[0])):
        token = different[0][0]
        found = (f"{what} {names.get(token, 'none')}" for what, names in (("here", theirs), ("there", ours)))
        raise UserError(
            f"config: {key} = {other}: has another tokenizer than {folder} (token {token!r} is {', '.join(found)}); use a"
            " model with the same tokenizer"
        )
    config = AutoConfig.from_pretrained(other, local_files_only=True, trust_remote_code=False)
    vocabulary = getattr(config, "vocab_size", 0)
    if vocabulary <= max(ours.values(), default=0):
        raise UserError(
            f"config: {key} = {other}: has embeddings for {vocabulary} tokens, but the tokenizer has"
            f" {max(ours.values()) + 1}; use a model with an embedding for each token"
        )


def read_tokenizer(folder: str | Path) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a local model folder, read with transformers' classes. Code in the folder is never run.

    Errors: UserError if the tokenizer cannot be read this way.
    """
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"model folder {folder}: its tokenizer cannot be read ({reason(error)})") from None


def vocabulary_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a digest of a tokenizer's vocabulary (tokens and their ids): 16 hexadecimal digits."""
    items = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(items).encode()).hexdigest()[:16]


def read_weights(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the folder's tensors one at a time. Call check_weight_files first."""
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt", backend="pread") as opened:  # mapped pages would stay in memory
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                yield name, opened.get_tensor(name)


class OpenFiles(Mapping[str, torch.Tensor]):
    """A folder's tensors by name. Each file is opened once, because opening a file reads the names of all its tensors."""

    def __init__(self, folder: Path, file_of: Mapping[str, str]) -> None:
        """Create the mapping. file_of: for each tensor, the name of the file that holds it."""
        self._folder, self._file_of = folder, file_of
        self._opened: dict[str, Any] = {}

    def __getitem__(self, name: str) -> torch.Tensor:
        file = self._file_of[name]
        if file not in self._opened:
            self._opened[file] = safe_open(self._folder / file, "pt", backend="pread")  # see read_weights
        return self._opened[file].get_tensor(name)

    def __contains__(self, name: object) -> bool:
        return name in self._file_of  # Mapping's own method would read the tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._file_of)

    def __len__(self) -> int:
        return len(self._file_of)


_OF_WEIGHTS = ["*.safetensors", "*.index.json", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.onnx", "*.onnx_data", "*.h5"]
_OF_WEIGHTS += ["*.msgpack", "*.npz", "*.ot", "*.distcp", "*model*.bin", "*weights*.bin", "adapter_config.json"]
_OF_WEIGHTS += ["hf_quant_config.json", "quant_config.json", "quantize_config.json", "quantization_config.json"]
_OF_WEIGHTS += ["*.index.*.json"]
_OF_TRAINING = [
    "training_args.bin",
    "trainer_state.json",
    "optimizer.bin",
    "scheduler.bin",
    "events.out.tfevents.*",
    "latest",
]
_OF_TRAINING += ["*.pkl", "*.pickle"]
LEFT_OUT = [*_OF_WEIGHTS, *_OF_TRAINING, "*.py", ".*"]
"""Patterns of files that are not copied: files about weights or training, hidden files, and code, which is never run."""
LEFT_OUT_FOLDERS = [".*", "__pycache__", "*.partial", "checkpoint-*", "checkpoints", "global_step*", "step_*"]
LEFT_OUT_FOLDERS += ["runs", "logs", "wandb", "tensorboard"]


def _beside_weights(source: Path, out: Path) -> Iterator[Path]:
    """Yield the files of a model folder and its subfolders that do not depend on the weights, as relative paths.

    out: the folder that is being written. A subfolder of `source` that holds `out`, such as runs/, is skipped.
    """
    for here, folders, files in os.walk(source):
        folder = Path(here)
        folders[:] = [n for n in folders if not _is_any(n, LEFT_OUT_FOLDERS) and not out.is_relative_to(folder / n)]
        folders[:] = [n for n in folders if not any((folder / n).glob("*.safetensors"))]  # another model's folder
        for name in files:
            if not _is_any(name, LEFT_OUT) and (folder / name).is_file():
                yield (folder / name).relative_to(source)


def _is_any(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name.lower(), pattern) for pattern in patterns)


def copy_metadata(source: Path, out: Path, dtype: torch.dtype, changes: dict[str, Any] | None = None) -> None:
    """Copy config.json (set to `dtype` and with `changes`) and the other files that do not depend on the weights.

    These are, for example, the generation config, tokenizer files and chat templates, also in subfolders. Files that match
    `LEFT_OUT` are not copied.
    """
    source, out = source.resolve(), out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    for file in _beside_weights(source, out):
        (out / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source / file, out / file)
    config = json.loads((source / "config.json").read_text())
    config.pop("quantization_config", None)  # weights are written unquantized
    key = "torch_dtype" if "torch_dtype" in config else "dtype"
    config[key] = str(dtype).removeprefix("torch.")
    config |= changes or {}
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


class ShardWriter:
    """Writes tensors to safetensors files of at most `shard_bytes` each, and an index if there are several files.

    It holds the tensors of one file in memory. `close` writes the last file and renames all files to their final names.
    """

    def __init__(self, folder: Path, shard_bytes: int = SHARD_BYTES) -> None:
        self._folder = folder
        self._limit = shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._pending_bytes = 0
        self._shards: list[list[str]] = []
        self._total_bytes = 0

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Add a copy of the tensor. If the current file is full, write the file first."""
        size = tensor.numel() * tensor.element_size()
        if self._pending and self._pending_bytes + size > self._limit:
            self._flush()
        self._pending[name] = tensor.detach().to("cpu", copy=True).contiguous()
        self._pending_bytes += size

    def close(self) -> None:
        """Write the last file and the index, and rename all files to their final names."""
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


@contextlib.contextmanager
def whole_folder(out: Path, kind: str = "model folder", *, replace: bool = False) -> Iterator[Path]:
    """Yield a folder to fill, and rename it to `out` at the end. After an error, the folder is removed.

    replace: remove an existing `out` before the renaming. Errors: UserError if the folder cannot be written.
    """
    partial = out.with_name(out.name + ".partial")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        yield partial
        if replace:
            shutil.rmtree(out, ignore_errors=True)
        partial.rename(out)
    except OSError as error:
        raise UserError(f"{kind} {out}: could not be written ({error.strerror or error})") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def write_weights(folder: Path, tensors: Iterable[tuple[str, torch.Tensor]], shard_bytes: int = SHARD_BYTES) -> None:
    """Write all tensors of an iterator. After a disk error, read the rest of the iterator, then raise OSError."""
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


# -- verify --------------------------------------------------------------------------------------------------------------
# Check that what was written can be read back: a checksum over each tensor's bits, dtype and shape.


class Checksums:
    """Checksums of tensors by name, computed when the tensors are written and compared when they are read."""

    def __init__(self) -> None:
        self.of: dict[str, str] = {}

    def watch(self, named_tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors unchanged and add the checksum of each."""
        for name, tensor in named_tensors:
            self.of[name] = describe(tensor)
            yield name, tensor

    def take(self, named_tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Add the checksums of all tensors."""
        for _ in self.watch(named_tensors):
            pass

    def compare(self, named_tensors: Iterable[tuple[str, Tensor]], where: str) -> None:
        """Read all tensors and compare their checksums. Errors: UserError that names the first missing or different tensor."""
        found = Checksums()
        found.take(named_tensors)
        if wrong := sorted({name for name, _ in self.of.items() ^ found.of.items()}):
            raise UserError(
                f"{where}: tensor {wrong[0]} was not read back as it was written ({len(wrong)} of {len(self.of)} tensors);"
                " check the disk, and convert again"
            )

    @classmethod
    def of_ranks(cls, ranks: Sequence[Checksums]) -> Checksums:
        """Return the checksums of all ranks. With several ranks, the names start with the rank."""
        whole = cls()
        for rank, checksums in enumerate(ranks):
            whole.of |= {name if len(ranks) == 1 else f"{rank}.{name}": value for name, value in checksums.of.items()}
        return whole

    def __str__(self) -> str:
        """Return one digest of all checksums: 16 hexadecimal digits."""
        return hashlib.sha256(repr(sorted(self.of.items())).encode()).hexdigest()[:16]


# -- served --------------------------------------------------------------------------------------------------------------
# Checks if SGLang serves a model folder with exactly the weights that the trainer pushes or the folder holds.


def check_served(path: str, precision: str, server: ServerConfig, hf_config: PreTrainedConfig, *, pushes: bool) -> None:
    """Check that SGLang can serve a folder and receive weight pushes. precision: precision.rollout.

    Errors: UserError if SGLang would store the weights in another format than the trainer pushes, or would crash at the first
    request.
    """
    family = family_of(hf_config)
    name = family.architecture
    on_gpu = torch.cuda.is_available()
    if precision == "fp8":
        fp8.check_folder(Path(path), server.tensor, server.expert, simulate=not on_gpu)
    if getattr(hf_config, "tie_word_embeddings", False) and not family.tied_in_sglang:
        raise UserError(
            f"model: SGLang serves {name} only without tied embeddings: write the embedding also as lm_head.weight, and set"
            " tie_word_embeddings to false in config.json"
        )
    quantized = getattr(hf_config, "quantization_config", None)
    method = quantized and quantized["quant_method"]
    if method and (pushes or (method == "fp8" and not on_gpu)):
        reason = "which a weight push cannot fill" if pushes else "whose matrix products need a GPU"
        raise UserError(
            f"model {path}: SGLang would hold its weights as {method} (quantization_config in config.json), {reason}; write"
            f" plain weights: megatron-rl convert {path} CHECKPOINT, then megatron-rl convert CHECKPOINT FOLDER"
        )
    dtype = getattr(hf_config, "dtype", None)
    if family.served_in_folder_dtype and dtype not in (None, torch_dtype(ROLLOUT_DTYPES[precision])):
        found = str(dtype).removeprefix("torch.")
        raise UserError(
            f"model {path}: SGLang serves {name} only in the dtype of config.json, which is {found}, but precision.rollout is"
            f" {precision}: set precision.rollout to match, or dtype in config.json"
        )
