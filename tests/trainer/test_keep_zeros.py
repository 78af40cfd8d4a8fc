"""model.keep_zeros: a 2:4 model stays one through updates, a save, a resume and an export, on every layout."""

from __future__ import annotations

import json
import math
import random

import numpy as np
import pytest
import torch
from compression.test_prune import write_config
from models.test_convert import read_folder
from ranks import fresh_seed, run_ranks
from safetensors.torch import save_file

from megatron_rl.compression.sparsity import Pattern, magnitude
from megatron_rl.metrics.logger import METRICS_FILE, read_json_lines
from tools.make_tiny_model import Sizes, make_tiny_model

pytestmark = pytest.mark.timeout(900)  # the limits of the processes below are what ends a test

STEPS = 10
LAYOUTS = {
    "data": ["--precision.train", "bf16"],
    "whole": ["--parallel.distributed_optimizer", "false"],
    "tensor": ["--parallel.tensor", "2"],
    "pipeline": ["--parallel.pipeline", "2", "--precision.train", "bf16"],
    "expert": ["--parallel.expert", "2"],
}


def is_linear(name: str) -> bool:
    return ".layers." in name and name.endswith("proj.weight")


def two_of_four(out, seed: int):
    """A tiny model whose linear layers are 2:4."""
    make_tiny_model("qwen3_moe", out, sizes=Sizes(layers=2, experts=4), seed=seed)
    weights = read_folder(out)
    sparse = {name: magnitude(w, Pattern(2, 4)) if is_linear(name) else w for name, w in weights.items()}
    save_file(sparse, out / "model.safetensors", metadata={"format": "pt"})
    return out


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """Folder with a 2:4 model, and runs of each layout: half of the steps, then the rest, and all without keeping zeros."""
    folder, seed = tmp_path_factory.mktemp("zeros"), fresh_seed()
    config, commands = write_config(folder, random.Random(seed)), []
    model = two_of_four(folder / "model", seed)
    learn = [
        "sft",
        str(config),
        "--model.path",
        str(model),
        "--optimizer.lr",
        "1e-3",
        "--optimizer.weight_decay",
        "0.1",
    ]
    learn += ["--batch.prompts_per_step", "4", "--name"]
    for name, options in LAYOUTS.items():
        keep = [*learn, name, "--model.keep_zeros", "true", *options]
        commands += [[*keep, "--steps", str(STEPS // 2)], [*keep, "--steps", str(STEPS)]]
    commands.append([*learn, "lost", "--steps", "2"])
    run_ranks(2, "likelihood_ranks:run_commands", (commands,), timeout=580)
    return folder


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_sparse_model_stays_sparse(name, world):
    before, after = read_folder(world / "model"), read_folder(world / "runs" / name / "hf")
    moved = 0.0
    for weight, tensor in before.items():
        now = after[weight].float()
        if is_linear(weight):
            assert torch.equal(now == 0, tensor == 0), weight  # no zero is lost, and none has come
        moved = max(moved, float((now - tensor).abs().max()))
    assert moved > 5e-3
    lines = read_json_lines(world / "runs" / name / METRICS_FILE)
    assert [line["step"] for line in lines if line.get("loss/policy") is not None] == list(range(1, STEPS + 1))
    assert lines[-1]["loss/policy"] < lines[0]["loss/policy"]


def test_without_the_key_they_are_lost(world):
    before, after = read_folder(world / "model"), read_folder(world / "runs" / "lost" / "hf")
    name = "model.layers.0.self_attn.q_proj.weight"
    assert (before[name] == 0).sum() > (after[name] == 0).sum()


def test_gradients_are_clipped_by_the_norm_of_what_trains(tmp_path):
    seed = fresh_seed()
    model = two_of_four(tmp_path / "model", seed)
    worlds = {}
    for keep in (False, True, ["*.mlp.experts.local_experts.[01].*", "*.layers.1.self_attention.linear_qkv.weight"]):
        overrides = {"model": {"path": str(model), "keep_zeros": keep}, "parallel": {"distributed_optimizer": False}}
        overrides["optimizer"] = {"clip_grad": 0.0}  # the gradients stay as they were when their norm was taken
        [worlds[str(keep)]] = run_ranks(1, "compression.prune_ranks:first_gradients", (str(model), overrides, seed))
    weights = read_folder(model)
    for keep, found in worlds.items():
        squares = 0.0
        for name, gradient in worlds["False"]["gradients"].items():
            layer, expert = ".layers.1." in name, ".experts.0." in name or ".experts.1." in name
            of_patterns = expert or (layer and name.split(".")[-2] in ("q_proj", "k_proj", "v_proj"))
            kept = is_linear(name) and (keep == "True" or (keep.startswith("[") and of_patterns))
            expected = np.where((weights[name] == 0).numpy() & kept, 0, gradient)
            assert np.allclose(found["gradients"][name], expected, atol=1e-7), f"{keep} {name}"
            squares += float(np.square(expected.astype(np.float64)).sum())
        assert found["norm"] == pytest.approx(math.sqrt(squares), rel=1e-5)
    assert worlds["True"]["norm"] < worlds["False"]["norm"]


def test_reinforcement_learning_keeps_them_too(tmp_path):
    """With VP2O, which mixes the gradients of experts before they are reduced, in bf16 on two processes."""
    seed = fresh_seed()
    model = two_of_four(tmp_path / "model", seed)
    overrides = {"model": {"path": str(model), "keep_zeros": True}, "precision": {"train": "bf16"}}
    overrides |= {"vp2o": {"enabled": True, "trust_region": None}}
    found = run_ranks(2, "compression.prune_ranks:updated", ([(str(model), overrides, seed)], 3))
    for [rank] in found:
        assert all(figures["update/skipped"] == 0 for figures in rank["figures"])
        for name, tensor in read_folder(model).items():
            if is_linear(name):
                assert torch.equal(rank["weights"][name] == 0, tensor == 0), name


@pytest.mark.parametrize(
    ("options", "fragments"),
    [
        (["--model.keep_zeros", "[nothing.*]"], ["model.keep_zeros", "'nothing.*' matches no linear layer"]),
        (["--model.keep_zeros", "true", "--checkpoint.load", "x"], ["checkpoint.load", "megatron-rl convert x FOLDER"]),
        (["--model.keep_zeros", "true"], ["has no zero weights to keep"]),
    ],
)
def test_what_has_no_zeros_is_refused(options, fragments, tiny_model, tmp_path):
    from tests.program import forked

    config = write_config(tmp_path, random.Random(0))
    model = tiny_model("qwen3", "--layers", "2")
    done = forked("sft", str(config), "--model.path", str(model), "--steps", "1", *options, check=False)
    errors = [line for line in done.stderr.splitlines() if line.startswith("megatron-rl: error")]
    assert done.returncode == 2 and len(errors) == 1, done.stderr
    for fragment in fragments:
        assert fragment in errors[0]


def test_a_checkpoint_that_was_trained_without_is_refused(tmp_path):
    from tests.program import forked

    config = write_config(tmp_path, random.Random(0))
    model = two_of_four(tmp_path / "model", 1)
    learn = ["sft", str(config), "--model.path", str(model), "--batch.prompts_per_step", "2"]
    forked(*learn, "--steps", "1")
    done = forked(*learn, "--steps", "2", "--model.keep_zeros", "true", check=False)
    assert done.returncode == 2 and "but not in the checkpoint" in done.stderr, done.stderr
    assert json.loads((tmp_path / "runs" / "run" / "hf" / "config.json").read_text())
