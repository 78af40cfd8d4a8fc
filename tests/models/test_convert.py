"""Hugging Face -> Megatron checkpoint -> Hugging Face, bit for bit, in one process; and bad input."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_rl.config import ParallelConfig
from megatron_rl.errors import UserError
from megatron_rl.models.convert import convert
from megatron_rl.models.hf_folder import INDEX, check_weight_files, write_weights
from tests.preloaded import PYTHON_WITH_TRAINER, TRAINER
from tools.make_tiny_model import FAMILIES, Sizes, make_tiny_model
from tools.upcycle import load_dense, save, upcycle

ALONE = ParallelConfig()


def read_folder(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors |= load_file(file)
    return tensors


def assert_same_model(a: Path, b: Path) -> None:
    """Every tensor equal in name, dtype and bits; config and tokenizer too."""
    ours, theirs = read_folder(b), read_folder(a)
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name
    assert json.loads((a / "config.json").read_text()) == json.loads((b / "config.json").read_text())
    assert (a / "tokenizer.json").read_bytes() == (b / "tokenizer.json").read_bytes()
    assert AutoTokenizer.from_pretrained(b).chat_template == AutoTokenizer.from_pretrained(a).chat_template


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", FAMILIES)
def test_there_and_back(family, dtype, tmp_path):
    source = make_tiny_model(family, tmp_path / "hf", sizes=Sizes(layers=2), dtype=dtype)
    convert(source, tmp_path / "checkpoint", ALONE)
    convert(tmp_path / "checkpoint", tmp_path / "back", ALONE)
    assert_same_model(source, tmp_path / "back")


def test_upcycled_smollm2(tmp_path):
    dense, tokenizer = load_dense(layers=2)
    save(upcycle(dense, experts=3, topk=2, noise=0.01), tokenizer, tmp_path / "hf", torch.float32)
    convert(tmp_path / "hf", tmp_path / "checkpoint", ALONE)
    convert(tmp_path / "checkpoint", tmp_path / "back", ALONE)
    assert_same_model(tmp_path / "hf", tmp_path / "back")


def test_sharded_folder(tmp_path):
    """Several safetensors files with an index, read by transformers and by us."""
    source = make_tiny_model("qwen3_moe", tmp_path / "hf", sizes=Sizes(layers=2))
    sharded = tmp_path / "sharded"
    shutil.copytree(source, sharded, ignore=shutil.ignore_patterns("*.safetensors"))
    write_weights(sharded, iter(read_folder(source).items()), shard_bytes=200_000)
    files = sorted(sharded.glob("*.safetensors"))
    assert len(files) > 3
    assert all(file.stat().st_size < 250_000 for file in files)
    state = AutoModelForCausalLM.from_pretrained(sharded).state_dict()
    for name, tensor in AutoModelForCausalLM.from_pretrained(source).state_dict().items():
        assert torch.equal(state[name], tensor), name
    convert(sharded, tmp_path / "checkpoint", ALONE)
    convert(tmp_path / "checkpoint", tmp_path / "back", ALONE)
    assert_same_model(sharded, tmp_path / "back")

    files[1].unlink()
    with pytest.raises(UserError, match=f"{files[1].name} is missing"):
        check_weight_files(sharded)


def test_index_that_names_a_tensor_elsewhere(tmp_path):
    folder = make_tiny_model("llama", tmp_path / "hf", sizes=Sizes(layers=1))
    weight_map = {"model.norm.weight": "model.safetensors", "model.made_up.weight": "model.safetensors"}
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    with pytest.raises(UserError, match=r"model.safetensors lacks tensor model.made_up.weight"):
        check_weight_files(folder)


def test_damaged_checkpoint_is_refused(tmp_path):
    source = make_tiny_model("qwen3", tmp_path / "hf", sizes=Sizes(layers=1))
    checkpoint = convert(source, tmp_path / "checkpoint", ALONE)
    data = max(checkpoint.glob("*.distcp"), key=lambda file: file.stat().st_size)
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    with pytest.raises(UserError, match="damaged"):
        convert(checkpoint, tmp_path / "back", ALONE)
    assert not (tmp_path / "back").exists()


def test_nothing_is_overwritten_or_guessed(tmp_path):
    source = make_tiny_model("llama", tmp_path / "hf", sizes=Sizes(layers=1))
    (tmp_path / "out").mkdir()
    with pytest.raises(UserError, match="exists; remove it"):
        convert(source, tmp_path / "out", ALONE)
    with pytest.raises(UserError, match="neither a Hugging Face folder"):
        convert(tmp_path / "out", tmp_path / "new", ALONE)


def test_float16_is_refused(tmp_path):
    source = make_tiny_model("llama", tmp_path / "hf", sizes=Sizes(layers=1), dtype=torch.float16)
    with pytest.raises(UserError, match="float16 cannot be converted"):
        convert(source, tmp_path / "checkpoint", ALONE)


def test_what_cannot_be_written_leaves_nothing(tmp_path):
    """Under a limit of 40 KiB a file: one line, and neither the folder nor a part of it."""
    folder, out = make_tiny_model("qwen3_moe", tmp_path / "model"), tmp_path / "out"
    TRAINER.socket()  # not started under the limit
    command = f"ulimit -f 40; exec {PYTHON_WITH_TRAINER} -m megatron_rl.cli convert {folder} {out}"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 2, done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("megatron-rl: error:")]
    assert len(errors) == 1 and str(out) in errors[0] and "could not be written" in errors[0], done.stderr
    assert "Traceback" not in done.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"model"}
