"""Checkpoints that somebody else wrote: nothing in them is executed, and one line names the file that would have been."""

from __future__ import annotations

import io
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader, Metadata, load

from megatron_rl.config import ParallelConfig
from megatron_rl.errors import UserError
from megatron_rl.models.checkpoint_reader import CheckpointReader, untrusted
from megatron_rl.models.convert import convert
from megatron_rl.trainer.checkpoint import read_common
from tools.make_tiny_model import Sizes, make_tiny_model

from megatron.core.dist_checkpointing.core import CheckpointingException  # isort: skip (after megatron_rl)
from megatron.core.dist_checkpointing.validation import save_integrity_manifest  # isort: skip


class Planted:
    """An object whose pickle writes a file when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple:
        return open, (self.mark, "w")


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    return convert(
        make_tiny_model("qwen3", folder / "hf", sizes=Sizes(layers=1)), folder / "checkpoint", ParallelConfig()
    )


@pytest.fixture
def checkpoint(made, tmp_path) -> Path:
    return shutil.copytree(made, tmp_path / "step_000001")


def metadata_of(checkpoint: Path) -> Metadata:
    return FileSystemReader(checkpoint).read_metadata()


def write_metadata(checkpoint: Path, metadata: object) -> None:
    (checkpoint / ".metadata").write_bytes(pickle.dumps(metadata))
    save_integrity_manifest(str(checkpoint))


def plant(checkpoint: Path, where: str, planted: object) -> str:
    """Put the object where it is read, as whoever owns the folder can; returns the name of its file."""
    metadata = metadata_of(checkpoint)
    if where == "metadata":
        write_metadata(checkpoint, planted)
    elif where == "planner data":
        metadata.planner_data = {"a": [planted]}
        write_metadata(checkpoint, metadata)
    elif where == "common.pt":
        torch.save({"run": planted}, checkpoint / where)
        save_integrity_manifest(str(checkpoint))
        return where
    else:  # an object among the tensors
        index = next(index for index in metadata.storage_data if where in index.fqn)
        info, content = metadata.storage_data[index], io.BytesIO()
        torch.save(planted, content)
        file = checkpoint / info.relative_path
        metadata.storage_data[index] = replace(info, offset=file.stat().st_size, length=len(content.getvalue()))
        file.write_bytes(file.read_bytes() + content.getvalue())
        write_metadata(checkpoint, metadata)
        return info.relative_path
    return ".metadata"


@pytest.mark.parametrize("where", ["metadata", "planner data", "common_state", "common.pt"])
def test_nothing_of_a_checkpoint_is_executed(where, checkpoint, tmp_path):
    file = plant(checkpoint, where, Planted(tmp_path / "written"))
    with pytest.raises(UserError, match=rf"checkpoint {checkpoint}: damaged.*\({file} cannot be read: .*open") as told:
        convert(checkpoint, tmp_path / "out", ParallelConfig())
    assert "\n" not in str(told.value) and "weights_only" not in str(told.value)
    with pytest.raises(UserError, match=rf"checkpoint {checkpoint}: .*\({file} cannot be read: .*open"):
        read_common(checkpoint)
    assert not (tmp_path / "written").exists() and not (tmp_path / "out").exists()


def test_an_object_of_one_process_is_not_executed(checkpoint, tmp_path):
    """As random states are, and what a layer keeps beside its weights."""
    file = plant(checkpoint, "linear_proj._extra_state", Planted(tmp_path / "written"))
    found = next(index.fqn for index in metadata_of(checkpoint).storage_data if "linear_proj._extra_state" in index.fqn)
    with pytest.raises(CheckpointingException, match=rf"^{file} cannot be read: {found}.*open"), untrusted():
        load({found: io.BytesIO()}, storage_reader=CheckpointReader(checkpoint), no_dist=True)
    assert not (tmp_path / "written").exists()


@pytest.mark.parametrize(
    "content",
    [b"", b"x", b"garbage\n" * 9, pickle.dumps([1]), pickle.dumps(Metadata(storage_data=3, state_dict_metadata={}))],
)
def test_a_file_that_is_no_metadata(content, checkpoint):
    (checkpoint / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointingException, match=r"^\.metadata cannot be read: "):
        CheckpointReader(checkpoint)


@pytest.mark.parametrize("name", ["metadata.json", "integrity.json"])
@pytest.mark.parametrize("content", [b"5", b"[" * 50_000, b"null", b"\xff", b""])
def test_json_that_is_none_is_one_line(name, content, checkpoint, tmp_path):
    (checkpoint / name).write_bytes(content)
    if name != "integrity.json":
        save_integrity_manifest(str(checkpoint))
    with pytest.raises(UserError, match=rf"checkpoint {checkpoint}: ") as told:
        convert(checkpoint, tmp_path / "out", ParallelConfig())
    assert "\n" not in str(told.value) and not (tmp_path / "out").exists()


def test_metadata_may_not_name_files_elsewhere(checkpoint, tmp_path):
    for elsewhere in ("../other.distcp", str(tmp_path / "other.distcp"), "hf/../../other.distcp"):
        metadata = metadata_of(checkpoint)
        index, info = next(iter(metadata.storage_data.items()))
        metadata.storage_data[index] = replace(info, relative_path=elsewhere)
        write_metadata(checkpoint, metadata)
        with pytest.raises(CheckpointingException, match="outside of the checkpoint"):
            CheckpointReader(checkpoint)


def test_metadata_are_those_that_torch_reads(made):
    ours, theirs = CheckpointReader(made).read_metadata(), metadata_of(made)
    assert ours.storage_data and ours.state_dict_metadata == theirs.state_dict_metadata
    assert ours.storage_data == theirs.storage_data
