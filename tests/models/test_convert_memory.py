"""A conversion by one process holds some tensors at a time; what was written is read back and compared."""

from __future__ import annotations

import gc
import re
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from megatron_rl.config import ParallelConfig
from megatron_rl.errors import UserError
from megatron_rl.models import convert, streamed_convert
from tools.make_tiny_model import Sizes, make_tiny_model

ALONE = ParallelConfig()
MIB = 2**20
LARGE = Sizes(hidden=512, layers=24, expert_intermediate=1024, experts=2)
EXPERT_BYTES = 3 * 2 * LARGE.hidden * LARGE.expert_intermediate  # bf16
READ, FILE = 4 * MIB, 8 * MIB


def resident(field: str) -> int:
    """Bytes of this process: VmRSS, now, or VmHWM, most since the last reset."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found
    return int(found[1]) * 1024


def growth(source: Path, out: Path) -> int:
    """Most bytes that a conversion holds beyond what was resident before."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    before = resident("VmRSS")
    convert.convert(source, out, ALONE)
    return resident("VmHWM") - before


def assert_same_bits(folder: Path, other: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    for file in other.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (no mapping)
                ours, theirs = opened.get_tensor(name), tensors.pop(name)
                assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), name
    assert not tensors


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss"])
def test_a_model_is_never_whole_in_memory(family, tmp_path, monkeypatch):
    monkeypatch.setattr(streamed_convert, "READ_BYTES", READ)
    monkeypatch.setattr(streamed_convert, "STREAMED_SHARD_BYTES", FILE)
    tiny = make_tiny_model(family, tmp_path / "tiny", sizes=Sizes(layers=1), dtype=torch.bfloat16)
    for source, out in (tiny, "tiny.checkpoint"), (tmp_path / "tiny.checkpoint", "tiny.back"):
        convert.convert(source, tmp_path / out, ALONE)  # imports what is imported when it is needed
    source = make_tiny_model(family, tmp_path / "hf", sizes=LARGE, dtype=torch.bfloat16)
    grown = [
        growth(source, tmp_path / "checkpoint"),
        growth(tmp_path / "checkpoint", tmp_path / "back"),
    ]
    assert_same_bits(source, tmp_path / "back")
    # Parts that are read, and merged where a checkpoint has them apart; the file that fills up; gpt-oss's tensor of a layer's
    # experts as it comes, stacked, transposed, and copied; Megatron's modules and plan.
    largest = LARGE.experts * EXPERT_BYTES * 2 // 3
    bound = 2 * READ + FILE + 4 * largest + 32 * MIB
    whole = LARGE.layers * LARGE.experts * EXPERT_BYTES
    assert bound < whole / 2
    assert max(grown) < bound, [f"{size / MIB:.0f} of {bound / MIB:.0f} MiB" for size in grown]


def test_what_is_read_back_differs(tmp_path, monkeypatch):
    source = make_tiny_model("qwen3_moe", tmp_path / "hf", sizes=Sizes(layers=1), dtype=torch.bfloat16)
    checkpoint = convert.convert(source, tmp_path / "checkpoint", ALONE)
    read, read_weights = convert.read, convert.read_weights

    def damaged_read(*args, **kwargs):
        found = read(*args, **kwargs)
        for name, tensor in found["model"].items():
            if name == "decoder.final_layernorm.weight":
                tensor.view(torch.int16)[3] ^= 1
        return found

    def damaged_weights(folder):
        for name, tensor in read_weights(folder):
            yield name, tensor + 1 if name == "model.norm.weight" else tensor

    monkeypatch.setattr(convert, "read", damaged_read)
    with pytest.raises(UserError, match=r"checkpoint .*again: tensor decoder.final_layernorm.weight was not read back"):
        convert.convert(source, tmp_path / "again", ALONE)
    monkeypatch.setattr(convert, "read", read)
    monkeypatch.setattr(convert, "read_weights", damaged_weights)
    with pytest.raises(UserError, match=r"model folder .*back: tensor model.norm.weight was not read back"):
        convert.convert(checkpoint, tmp_path / "back", ALONE)
    assert {path.name for path in tmp_path.iterdir()} == {"hf", "checkpoint"}


def test_a_tensor_of_another_shape(tmp_path):
    """It is found when the writer comes to it: named as before, and nothing is left."""
    source = make_tiny_model("qwen3_moe", tmp_path / "hf", sizes=Sizes(layers=1), dtype=torch.bfloat16)
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.mlp.experts.3.down_proj.weight"] = torch.zeros(64, 47, dtype=torch.bfloat16)
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(
        UserError, match=r"model folder .*hf: tensor model.layers.0.mlp.experts.3.down_proj.weight has shape"
    ):
        convert.convert(source, tmp_path / "out", ALONE)
    assert {path.name for path in tmp_path.iterdir()} == {"hf"}
