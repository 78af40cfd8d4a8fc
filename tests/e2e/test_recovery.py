"""Runs that die: the trainer is killed in mid-step and while saving; what it goes on with is bit-identical.

The trainer's side runs from recorded rollouts here (rollout.load), so that two runs see the same trajectories.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from megatron_rl.data.trajectory import Trajectory, file_of, load_trajectories, save_trajectories
from megatron_rl.metrics.logger import METRICS_FILE, read_json_lines
from tests.preloaded import PYTHON_WITH_TRAINER
from tests.program import Program
from tests.ranks import NEAR_TIE, NearTie, without_ties

STEPS = 4
TIMEOUT = 240


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_model):
    """A model, four steps of recorded rollouts, a config that trains on them, and a run of it, in which no experts tie: layouts
    are compared."""
    folder = tmp_path_factory.mktemp("recovery")
    write_config(folder, tiny_model("qwen3_moe", "--layers", "2", "--tokenizer", "numbers"))

    def attempt(seed: int) -> None:
        draw_rollouts(folder, np.random.default_rng(seed))
        shutil.rmtree(folder / "runs", ignore_errors=True)
        finish(folder, "undisturbed", refuse_ties=True)

    without_ties(attempt)
    return folder


def draw_rollouts(folder: Path, rng: np.random.Generator) -> None:
    for step in range(STEPS):
        trajectories = []
        for i in range(16):
            prompt, response = int(rng.integers(3, 9)), int(rng.integers(2, 8))
            trajectories.append(
                Trajectory(
                    prompt_id=str(i // 4),
                    group_id=i // 4,
                    tokens=rng.integers(4, 30, prompt + response).astype(np.int32),
                    prompt_length=prompt,
                    fields={
                        "rollout_log_probs": rng.normal(-3, 1, response).astype(np.float32),
                        "loss_mask": np.ones(response, bool),
                    },
                    reward=float(rng.integers(0, 2)),
                    reward_parts={"correct": 1.0},
                )
            )
        save_trajectories(file_of(folder / "rollouts", step, 0), trajectories)


def write_config(folder: Path, model: Path) -> None:
    config = {
        "steps": STEPS,
        "runs_dir": str(folder / "runs"),
        "model": {"path": str(model)},
        "data": {"task": "number_sorting"},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 4, "updates_per_step": 2, "tokens_per_micro_batch": 96},
        "vp2o": {
            "enabled": True,
            "neighbors": 2,
            "inactive_neighbors": 2,
            "trust_region": 0.2,
            "on_violation": "backtrack",
        },
        # With Adam's own epsilon rounding turns the sign of a step where a gradient is nearly zero: layouts would not compare.
        "optimizer": {"lr": 1e-3, "eps": 1e-3},
        "precision": {"train": "fp32", "rollout": "fp32"},
        "rollout": {
            "load": str(folder / "rollouts"),
            "context_length": 32,
            "max_new_tokens": 8,
            "agreement_floor": None,  # log-probs are made up
        },
        "checkpoint": {"every": 1, "keep": 3},
        "eval": {"prompts": 0},
        "logging": {"trackers": []},
    }
    (folder / "config.yaml").write_text(json.dumps(config))


def start(folder: Path, name: str, *overrides: str, ranks: int = 1, refuse_ties: bool = False) -> Program:
    arguments = ["train", str(folder / "config.yaml"), "--name", name, *overrides]
    return Program(*arguments, log=folder / f"{name}.log", ranks=ranks, refuse_ties=refuse_ties)


def finish(folder: Path, name: str, *overrides: str, ranks: int = 1, refuse_ties: bool = False) -> None:
    """Errors: NearTie with refuse_ties."""
    with start(folder, name, *overrides, ranks=ranks, refuse_ties=refuse_ties) as program:
        status = program.wait(TIMEOUT)
    if refuse_ties and status == NEAR_TIE:
        raise NearTie(f"two experts nearly tie in {name}")
    assert status == 0, (folder / f"{name}.log").read_text()[-4000:]


def kill_when(program: Program, condition) -> None:
    with program:
        program.until(condition, TIMEOUT, "the point at which it is killed")


def final_tensors(folder: Path, name: str, steps: int = STEPS) -> dict[str, torch.Tensor]:
    """Every tensor of the last checkpoint: weights and optimizer state."""
    from torch.distributed.checkpoint import FileSystemReader
    from torch.distributed.checkpoint.state_dict_loader import _load_state_dict_from_keys

    path = folder / "runs" / name / "checkpoints" / f"step_{steps:06d}"
    flat: dict[str, torch.Tensor] = {}

    def collect(prefix: str, tree) -> None:
        for key, value in tree.items():
            if isinstance(value, dict):
                collect(f"{prefix}{key}.", value)
            elif isinstance(value, torch.Tensor):
                flat[f"{prefix}{key}"] = value

    with warnings.catch_warnings(action="ignore"):  # without torch.distributed it says that it reads alone
        collect("", _load_state_dict_from_keys(storage_reader=FileSystemReader(str(path))))
    return flat


def steps_logged(folder: Path, name: str) -> list[int]:
    """Read while the run writes: a line that is half there does not count yet."""
    return [record["step"] for record in read_json_lines(folder / "runs" / name / METRICS_FILE)]


@pytest.fixture(scope="module")
def undisturbed(folder):
    return final_tensors(folder, "undisturbed")


def assert_same_end(folder: Path, name: str, expected: dict[str, torch.Tensor]) -> None:
    tensors = final_tensors(folder, name)
    assert tensors.keys() == expected.keys() and len(tensors) > 20
    for key, value in expected.items():
        assert torch.equal(tensors[key], value), f"{key} differs after the resume"
    assert steps_logged(folder, name) == list(range(1, STEPS + 1))


@pytest.fixture(scope="module")
def mid_step(folder):
    """The folder of a run that was killed in its third step."""
    process = start(folder, "killed")
    run = folder / "runs" / "killed"
    # A step is logged and then saved, so the third is under way when the process dies.
    kill_when(process, (run / "checkpoints" / "step_000002").is_dir)
    assert 2 in steps_logged(folder, "killed")
    assert not (run / "checkpoints" / f"step_{STEPS:06d}").is_dir()
    return run


def test_killed_in_mid_step_then_resumed(folder, undisturbed, mid_step):
    shutil.copytree(mid_step, folder / "runs" / "mid_step")
    finish(folder, "mid_step")
    assert "resumed at step" in (folder / "mid_step.log").read_text()
    assert_same_end(folder, "mid_step", undisturbed)


def test_killed_while_saving_then_resumed(folder, undisturbed):
    process = start(folder, "saving")
    checkpoints = folder / "runs" / "saving" / "checkpoints"
    kill_when(process, lambda: any((checkpoints / "step_000003.tmp").glob("*.distcp")))
    assert (checkpoints / "step_000002").is_dir() and not (checkpoints / "step_000003").is_dir()
    assert steps_logged(folder, "saving") == [1, 2, 3], "the step that was being saved is not lost"
    finish(folder, "saving")
    assert_same_end(folder, "saving", undisturbed)


def test_saved_in_the_background_and_killed_there(folder, undisturbed):
    """A save goes on beside the next step; killed in it, the run goes on from the one before."""
    process = start(folder, "background", "--checkpoint.async_save", "true")
    checkpoints = folder / "runs" / "background" / "checkpoints"
    kill_when(process, lambda: any((checkpoints / "step_000003.tmp").glob("*.distcp")))
    assert (checkpoints / "step_000002").is_dir() and not (checkpoints / "step_000003").is_dir()
    finish(folder, "background", "--checkpoint.async_save", "true")
    assert_same_end(folder, "background", undisturbed)


def test_resume_on_another_layout(folder, undisturbed, mid_step):
    """Two of four steps on one process, the rest on two with expert parallelism: the same weights up to rounding."""
    shutil.copytree(mid_step, folder / "runs" / "layout")
    for step in range(STEPS):
        # Each data-parallel leader reads a file. The first update is of what the first one has, and yet both train on it.
        rows = load_trajectories(file_of(folder / "rollouts", step, 0))
        save_trajectories(file_of(folder / "halves", step, 0), rows[:8])
        save_trajectories(file_of(folder / "halves", step, 1), rows[8:])
    finish(folder, "layout", "--parallel.expert", "2", "--rollout.load", str(folder / "halves"), ranks=2)
    tensors = final_tensors(folder, "layout")
    for key, value in undisturbed.items():
        if key.startswith(("decoder", "embedding", "output_layer")):
            # Adam's eps is its learning rate, so that a step differs by no more than the gradient does: 1e-6 of one below 1.
            assert (tensors[key] - value).abs().mean() < 1e-5, key
    assert steps_logged(folder, "layout") == list(range(1, STEPS + 1))


def test_a_trained_checkpoint_becomes_a_hugging_face_folder(folder, undisturbed, tmp_path):
    """`megatron-rl convert` of a checkpoint with optimizer state: the trained weights, bit for bit, and nothing said."""
    checkpoint = folder / "runs" / "undisturbed" / "checkpoints" / f"step_{STEPS:06d}"
    out = tmp_path / "hf"
    command = [PYTHON_WITH_TRAINER, "-m", "megatron_rl.cli", "convert", str(checkpoint), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, check=False)
    assert done.returncode == 0 and not done.stderr, done.stderr[-3000:]
    exported = load_file(out / "model.safetensors")
    model = json.loads((folder / "config.yaml").read_text())["model"]["path"]
    before = load_file(Path(model) / "model.safetensors")
    assert exported.keys() == before.keys() and (out / "tokenizer.json").is_file()
    trained = undisturbed["decoder.layers.self_attention.linear_proj.weight"]
    for layer, weight in enumerate(trained):
        assert torch.equal(exported[f"model.layers.{layer}.self_attn.o_proj.weight"], weight)
    experts = undisturbed["decoder.layers.mlp.experts.experts.linear_fc2.weight"]
    for layer, expert in itertools.product(range(experts.shape[0]), range(experts.shape[1])):
        name = f"model.layers.{layer}.mlp.experts.{expert}.down_proj.weight"
        assert torch.equal(exported[name], experts[layer, expert])
    assert all(not torch.equal(exported[name], before[name]) for name in before if "norm" not in name)


def test_truncated_checkpoint_is_one_clear_error(folder, undisturbed):
    checkpoint = folder / "runs" / "undisturbed" / "checkpoints" / f"step_{STEPS:06d}"
    victim = sorted(checkpoint.glob("*.distcp"))[0]
    content = victim.read_bytes()
    try:
        victim.write_bytes(content[: len(content) // 2])
        assert start(folder, "undisturbed").wait(TIMEOUT) == 2
    finally:
        victim.write_bytes(content)
    output = (folder / "undisturbed.log").read_text()
    errors = [line for line in output.splitlines() if "error" in line.lower()]
    assert len(errors) == 1 and "damaged" in errors[0] and victim.name in errors[0], output[-3000:]
    assert "Traceback" not in output


IN_A_SMALL_DISK = """
set -e
mount -t tmpfs -o size="$1" tmpfs "$2"
shift 2
status=0
"$@" || status=$?
[[ $status == 2 ]] || { echo "exit status $status"; exit 1; }
ls "$DISK"/small/checkpoints
mount -o remount,size=1g "$DISK"
"$@"
cp -r "$DISK"/small "$KEEP"
"""


def test_full_disk_is_one_clear_error_and_costs_no_checkpoint(folder, undisturbed):
    """A file system of its own that holds one checkpoint and a half; the run resumes when there is more room."""
    saved = folder / "runs" / "undisturbed" / "checkpoints" / f"step_{STEPS:06d}"
    size = sum(file.stat().st_size for file in saved.rglob("*"))
    disk = folder / "disk"
    disk.mkdir()
    command = [sys.executable, "-m", "megatron_rl.cli", "train", str(folder / "config.yaml"), "--name", "small"]
    done = subprocess.run(
        [
            *(
                "unshare",
                "--map-root-user",
                "--mount",
                "bash",
                "-c",
                IN_A_SMALL_DISK,
                "-",
                str(size * 3 // 2),
                str(disk),
            ),
            *(*command, "--runs_dir", str(disk)),
        ],
        capture_output=True,
        text=True,
        timeout=2 * TIMEOUT,
        check=False,
        env=os.environ | {"OMP_NUM_THREADS": "1", "DISK": str(disk), "KEEP": str(folder / "runs")},
    )
    if "unshare failed" in done.stderr or "permission denied" in done.stderr:
        pytest.skip("this machine does not allow a mount of one's own")
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    errors = [line for line in done.stderr.splitlines() if "error" in line.lower()]
    assert len(errors) == 1, done.stderr[-4000:]
    assert "step_000002" in errors[0] and "No space left" in errors[0] and "older checkpoints are intact" in errors[0]
    assert "Traceback" not in done.stderr
    assert "step_000001" in done.stdout and "step_000002" not in done.stdout, "the half-written one is gone"
    assert_same_end(folder, "small", undisturbed)
