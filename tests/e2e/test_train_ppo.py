"""PPO on the real stack: the critic's warm-up, KL in the reward with a coefficient that moves, and a resume, to the bit."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trainer.test_checkpoint import tensors_of

from megatron_rl.cli import main
from megatron_rl.metrics.logger import read_json_lines

STEPS = 4
OF_CRITIC = {
    f"critic/{name}" for name in ("loss", "value", "clip_fraction", "explained_variance", "grad_norm", "lr", "skipped")
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory, tiny_model):
    """A run of four steps by an engine, and one of its rollouts that ended after three and was resumed for the fourth."""
    folder = tmp_path_factory.mktemp("ppo")
    model, reference = (
        tiny_model("qwen3_moe", "--layers", "2", "--tokenizer", "numbers", *more) for more in ((), ("--seed", "1"))
    )
    kl = {"coefficient": 0.1, "placement": "reward", "target": 1e-3, "horizon": 20, "reference": str(reference)}
    config = {
        "steps": STEPS,
        "runs_dir": str(folder),
        "model": {"path": str(model)},
        "data": {"task": "number_sorting"},
        "batch": {"prompts_per_step": 2, "samples_per_prompt": 2, "updates_per_step": 2, "epochs": 2}
        | {"tokens_per_micro_batch": 128},
        "algorithm": {"advantage": "gae", "kl": kl},
        "critic": {"warmup_steps": 1, "optimizer": {"lr": 1e-2}},
        "optimizer": {"lr": 1e-3},
        "precision": {"train": "fp32", "rollout": "fp32"},
        "rollout": {
            "max_new_tokens": 8,
            "context_length": 64,
            "record": True,
            "server": {"threads": 1, "max_total_tokens": 4096},
        },
        "eval": {"prompts": 0},
        "checkpoint": {"every": 1, "keep": STEPS},
        "logging": {"trackers": []},
    }
    (folder / "config.yaml").write_text(json.dumps(config))
    command = ["train", str(folder / "config.yaml"), "--name"]
    assert main([*command, "whole"]) == 0
    recorded = ["resumed", "--rollout.record", "false", "--rollout.load", str(folder / "whole" / "rollouts")]
    assert main([*command, *recorded, "--steps", str(STEPS - 1)]) == 0
    assert main([*command, *recorded]) == 0
    return folder


def checkpoint_of(folder: Path, name: str, step: int) -> Path:
    return folder / name / "checkpoints" / f"step_{step:06d}"


def test_every_step_says_what_the_critic_did(folder):
    rows = read_json_lines(folder / "whole" / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(1, STEPS + 1))
    for row in rows:
        assert row.keys() >= OF_CRITIC | {"kl/coefficient", "reward/mean"}
        assert all(math.isfinite(row[name]) for name in OF_CRITIC - {"critic/explained_variance"})
        assert row["critic/grad_norm"] > 0 and row["critic/lr"] == 1e-2 and row["critic/skipped"] == 0
    known = [[name for name, value in row.items() if value is not None] for row in rows]
    of_updates = [{name.split("/")[1] for name in row if name.startswith("routing/update_")} for row in known]
    assert of_updates == [set(), *[{f"update_{number}" for number in (1, 2, 3, 4)}] * (STEPS - 1)], "two epochs of two"
    assert rows[0]["loss/policy"] is None and all(row["loss/policy"] is not None for row in rows[1:])
    # Far above its target, the KL moves the coefficient by 20 % x 4 responses / 20 after each step of the policy.
    coefficients = [row["kl/coefficient"] for row in rows]
    assert coefficients == pytest.approx([0.1, 0.1, 0.104, 0.104 * 1.04], rel=1e-9)


def test_the_policy_stays_as_it_is_while_the_critic_warms_up(folder, tmp_path):
    """A checkpoint with a critic becomes a folder of the policy; in it every weight has its bits, and none a step later."""
    model = json.loads((folder / "config.yaml").read_text())["model"]["path"]
    before = load_file(Path(model) / "model.safetensors")
    for step, same in ((1, True), (2, False)):
        out = tmp_path / str(step)
        assert main(["convert", str(checkpoint_of(folder, "whole", step)), str(out)]) == 0
        after = load_file(out / "model.safetensors")
        assert after.keys() == before.keys()
        assert all(torch.equal(after[name], value.to(after[name])) for name, value in before.items()) == same
    first, second = (tensors_of(checkpoint_of(folder, "whole", step)) for step in (1, 2))
    head = "critic.output_layer.weight"
    assert first[head].any() and not torch.equal(first[head], second[head]), "the critic has learned in both"


def test_a_resumed_run_ends_in_the_same_bits(folder):
    whole, resumed = (tensors_of(checkpoint_of(folder, name, STEPS)) for name in ("whole", "resumed"))
    assert whole.keys() == resumed.keys() and sum(name.startswith("critic.") for name in whole) > 20
    assert all(torch.equal(resumed[name], value) for name, value in whole.items())
    rows = [read_json_lines(folder / name / "metrics.jsonl")[-1] for name in ("whole", "resumed")]
    for name in rows[0]:
        if name.startswith(("critic/", "kl/", "loss/", "update/")):
            assert rows[0][name] == rows[1][name], name
