"""Reward models, DPO, and PPO against a reward model, as commands: what they leave behind, and what comes back of it."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from megatron_rl.metrics.logger import read_json_lines
from megatron_rl.models.hf_folder import read_weights
from megatron_rl.tasks.task import HELD_OUT_SHARE, is_held_out
from tests.judge_server import Scripted, fenced, nonce_of
from tests.program import forked
from tests.ranks import nearly_ties

STEPS = 4


@pytest.fixture(scope="module")
def files(tiny_model, tmp_path_factory):
    """A model and preferences for sorted numbers, in a folder of runs."""
    folder = tmp_path_factory.mktemp("preferences")
    rng = random.Random()
    rows = []
    while len(rows) < 60 or sum(is_held_out(row["prompt"], HELD_OUT_SHARE) for row in rows) < 3:
        numbers = [rng.randrange(20) for _ in range(4)]
        if numbers != sorted(numbers):
            prompt, right, wrong = f"<{' '.join(map(str, numbers))}:", sorted(numbers), numbers
            rows.append({"prompt": prompt, "chosen": " ".join(map(str, right)), "rejected": " ".join(map(str, wrong))})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    config = {
        "runs_dir": str(folder),
        "steps": STEPS,
        "model": {"path": str(tiny_model("qwen3_moe", "--layers", "2", "--tokenizer", "numbers"))},
        "data": {"task": "file", "path": str(folder / "rows.jsonl")},
        "batch": {"prompts_per_step": 8, "tokens_per_micro_batch": 96},
        "optimizer": {"lr": 1e-2},
        "precision": {"train": "fp32", "rollout": "fp32"},
        "rollout": {"max_new_tokens": 8, "context_length": 28},
        "eval": {"every": 2},
        "logging": {"progress": False, "trackers": []},
    }
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    return folder


def lines_of(folder: Path, name: str) -> dict[int, dict]:
    return {line["step"]: line for line in read_json_lines(folder / name / "metrics.jsonl")}


def same_weights(one: Path, other: Path) -> bool:
    ours, theirs = dict(read_weights(one)), dict(read_weights(other))
    return ours.keys() == theirs.keys() and all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())


@pytest.fixture(scope="module")
def reward(files):
    """A reward model of two processes, stopped halfway and gone on with."""
    config = str(files / "config.yaml")
    settings = ("--optimizer.decay_steps", "100", "--checkpoint.every", "2")
    forked("reward", config, "--name", "whole", *settings, ranks=2, timeout=240)
    forked("reward", config, "--name", "halves", "--steps", "2", *settings, ranks=2, timeout=240)
    forked("reward", config, "--name", "halves", *settings, ranks=2, timeout=240)
    return files / "whole"


def test_a_reward_model_is_one_of_transformers(files, reward):
    lines = lines_of(files, "whole")
    assert lines[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-6)  # a head of zeros
    assert lines[0]["eval/accuracy"] == 0.5 and lines[STEPS]["eval/loss"] != lines[0]["eval/loss"]
    assert {"preference/calibration_error", "preference/margin", "update/grad_norm"} <= lines[1].keys()

    model = AutoModelForSequenceClassification.from_pretrained(reward / "hf", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(reward / "hf")
    rows = [json.loads(line) for line in (files / "rows.jsonl").read_text().splitlines()]
    margins, ties = [], 0
    for row in (row for row in rows if is_held_out(row["prompt"], HELD_OUT_SHARE)):
        texts = (row["prompt"], row["chosen"]), (row["prompt"], row["rejected"])
        sides = [[*tokenizer.encode(p), *tokenizer.encode(r), tokenizer.eos_token_id] for p, r in texts]
        with torch.no_grad():
            chosen, rejected = (model(torch.tensor([side])).logits.item() for side in sides)
        margins.append(chosen - rejected)
        ties += sum(nearly_ties(model, side) for side in sides)
    # Scores of 1 have a last bit of 1e-7; where two experts nearly tie, one differs by what an expert adds to it: 0.2 at most.
    limit = 1e-4 + 0.2 * ties / max(1, len(margins))
    assert margins and lines[STEPS]["eval/margin"] == pytest.approx(np.mean(margins), abs=limit)


def test_a_resumed_reward_model_is_the_same_to_the_bit(files, reward):
    assert same_weights(files / "whole" / "hf", files / "halves" / "hf")
    ours, theirs = (lines_of(files, name)[STEPS] for name in ("whole", "halves"))
    names = [name for name in ours if name.startswith(("preference/", "eval/"))]
    assert names and all(ours[name] == theirs[name] for name in names)


def test_dpo_with_a_precomputed_reference_is_dpo(files):
    config = str(files / "config.yaml")
    forked("dpo", config, "--name", "live", timeout=240)
    forked("dpo", config, "--name", "early", "--dpo.precompute_reference", "true", timeout=240)
    live, early = lines_of(files, "live"), lines_of(files, "early")
    assert live[1]["preference/loss"] == pytest.approx(math.log(2), abs=1e-12)  # the policy is the reference
    assert live[STEPS]["eval/loss"] != live[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-12)
    assert same_weights(files / "live" / "hf", files / "early" / "hf")
    assert live[STEPS]["preference/margin"] == early[STEPS]["preference/margin"]
    assert (files / "early" / "reference_log_probs.npz").is_file()


ADAPTERS = ("--lora.rank", "4", "--lora.alpha", "8")


@pytest.mark.parametrize("command", ["reward", "dpo"])
def test_adapters_learn_preferences(command, files):
    """A reward model's beside its head; a policy's, whose reference is itself without them. Resume is the same to the bit."""
    config, settings = str(files / "config.yaml"), ("--optimizer.decay_steps", "100", "--checkpoint.every", "2")
    for name, more in (("whole", ()), ("halves", ("--steps", "2")), ("halves", ())):
        forked(command, config, "--name", f"lora_{command}_{name}", *settings, *ADAPTERS, *more, ranks=2, timeout=240)
    lines = lines_of(files, f"lora_{command}_whole")
    assert lines[0]["eval/loss"] == pytest.approx(math.log(2), abs=1e-6) != lines[STEPS]["eval/loss"]
    folders = [files / f"lora_{command}_{name}" for name in ("whole", "halves")]
    assert same_weights(*(folder / "hf" for folder in folders))
    one, other = (load_file(folder / "adapter" / "adapter_model.safetensors") for folder in folders)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    assert any(tensor.abs().max() > 0 for name, tensor in one.items() if "lora_B" in name)
    model = yaml.safe_load((files / "config.yaml").read_text())["model"]["path"]
    before, after = dict(read_weights(Path(model))), dict(read_weights(folders[0] / "hf"))
    moved = {name for name, tensor in after.items() if name not in before or not torch.equal(tensor, before[name])}
    layers = {name.removeprefix("base_model.model.").rsplit(".lora_", 1)[0] for name in one if ".lora_" in name}
    adapted = {f"{layer}.weight" for layer in layers}
    more = {"score.weight"} if command == "reward" else set()
    assert more <= moved <= adapted | more  # an expert may have had no token
    assert {name for name in adapted if ".self_attn." in name} <= moved


@pytest.fixture(scope="module")
def process(files):
    """A process reward model, of two steps on sorted numbers that are judged one by one."""
    rows = []
    for line in (files / "rows.jsonl").read_text().splitlines():
        row = json.loads(line)
        numbers, right = row["rejected"].split(), row["chosen"].split()
        labels = [int(number == wanted) for number, wanted in zip(numbers, right, strict=True)]
        rows.append({"prompt": row["prompt"], "steps": numbers, "labels": labels})
    (files / "steps.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    settings = ("--data.path", str(files / "steps.jsonl"), "--data.step_separator", " ", "--steps", "2")
    forked("reward", str(files / "config.yaml"), "--name", "prm", *settings, "--reward_model.loss", "cross_entropy")
    return files / "prm"


def train_by_ppo(
    files: Path, reward: Path, name: str, more: dict, models: dict | None = None, judges: dict | None = None
) -> None:
    """Two steps against the reward model, with a critic that starts as it and learns alone in the first.

    models, judges: other parts of the reward.
    """
    models = {"liked": {"path": str(reward / "hf")}, **(models or {})}
    settings = {
        "data": {"task": "number_sorting", "rewards": {"correct": 0.0, "answered": 0.0, "liked": 1.0}},
        "rewards": {"models": models, "judges": judges or {}, "overlong_buffer": 2},
        "batch": {"prompts_per_step": 4, "samples_per_prompt": 2, "tokens_per_micro_batch": 96},
        "algorithm": {
            "advantage": "gae",
            "kl": {"coefficient": 0.1, "placement": "reward", "target": 0.1, "horizon": 100},
        },
        "critic": {"path": str(reward / "hf"), "warmup_steps": 1},
        "sync": {"transport": "tensor"},
        "eval": {"prompts": 4, "samples": 2, "every": 0},
        "rollout": {"max_new_tokens": 8, "context_length": 28, "record": True},
        "logging": {"samples": 8},
        "steps": 2,
    }
    config = yaml.safe_load((files / "config.yaml").read_text())
    for section, values in settings.items():
        config[section] = (
            {**config[section], **values} if isinstance(config.get(section), dict) and section != "data" else values
        )
    config["logging"] = {"progress": False, "trackers": [], "samples": 8}
    (files / f"{name}.yaml").write_text(yaml.safe_dump(config | more))
    forked("train", str(files / f"{name}.yaml"), "--name", name, timeout=240)


def test_ppo_against_models_and_a_judge(files, reward, process):
    """Scores are those of transformers, for the responses that were sampled: of the whole, and of its steps.

    What the judge gives no verdict on does not train. The task's own score is looked at alone.
    """

    def says(text: str) -> str:
        length = len(fenced(text))
        return f"VERDICT {nonce_of(text)}: {length}" if length % 3 else "I do not know."

    judge = Scripted(says)
    try:
        train_by_ppo(
            files,
            reward,
            "ppo",
            {},
            models={"prm": {"path": str(process / "hf"), "steps": True, "sigmoid": True}},
            judges={"wise": {"address": judge.url, "model": "m", "scale": [0, 200], "retries": 0, "max_failures": 1.0}},
        )
    finally:
        judge.die()
    lines = lines_of(files, "ppo")
    assert lines[1]["kl/coefficient"] == 0.1 and "loss/policy" not in {k for k, v in lines[1].items() if v is not None}
    assert lines[2]["loss/policy"] is not None and np.isfinite(lines[2]["critic/loss"])
    assert lines[2]["eval/reward/correct"] is not None and lines[2]["reward/overlong"] <= 0

    models = {
        name: AutoModelForSequenceClassification.from_pretrained(folder / "hf", dtype=torch.float32)
        for name, folder in (("liked", reward), ("prm", process))
    }
    assert models["prm"].config.reward_step_separator == " "
    tokenizer = AutoTokenizer.from_pretrained(reward / "hf")
    samples = [json.loads(line) for line in (files / "ppo" / "samples.jsonl").read_text().splitlines()]
    for sample in samples:
        assert sample.get("masked", False) == (len(sample["response"]) % 3 == 0)
        if sample.get("masked"):
            assert sample["reward"] == 0
            continue
        prompt = tokenizer.encode(sample["prompt"])
        steps = sample["response"].split(" ")
        steps = steps[:-1] if sample["finish"] == "length" else steps
        scores, ties = [], 0
        for number in range(1, len(steps) + 1):
            tokens = prompt + [token for step in steps[:number] for token in tokenizer.encode(f"{step} ")]
            with torch.no_grad():
                scores.append(models["prm"](torch.tensor([tokens])).logits.sigmoid().item())
            ties += nearly_ties(models["prm"], tokens)
        assert ties or sample["reward/prm"] == pytest.approx(min(scores, default=0.0), abs=1e-4)
        assert sample["reward/wise"] == pytest.approx(len(sample["response"]) / 200, abs=1e-9)
        if sample["finish"] == "stop":
            tokens = prompt + tokenizer.encode(sample["response"]) + [tokenizer.eos_token_id]
            with torch.no_grad():
                score = models["liked"](torch.tensor([tokens])).logits.item()
            assert nearly_ties(models["liked"], tokens) or sample["reward/liked"] == pytest.approx(score, abs=1e-4)
        parts = ("liked", "overlong", "prm", "wise")
        assert sample["reward"] == pytest.approx(sum(sample[f"reward/{part}"] for part in parts), abs=1e-6)
    for step in (1, 2):
        of_step = [sample for sample in samples if sample["step"] == step for _ in range(sample["count"])]
        judged = [sample for sample in of_step if not sample.get("masked")]
        assert len(of_step) == 8 and lines[step]["judge/wise/masked"] == pytest.approx(1 - len(judged) / 8)
        steps = [len(s["response"].split(" ")) - (s["finish"] == "length") for s in judged]
        assert lines[step]["process/prm/steps"] == pytest.approx(sum(steps) / max(1, len(judged)))


def test_ppo_by_adapters_leaves_all_else(files, reward):
    """Of the policy and of the critic, on the same ranks."""
    lora = {"rank": 4, "alpha": 8.0}
    train_by_ppo(files, reward, "lora_ppo", {"lora": lora, "checkpoint": {"every": 2}})
    lines = lines_of(files, "lora_ppo")
    assert lines[2]["mismatch/kl"] <= 1e-6  # merged weights are what is pushed
    assert lines[2]["update/grad_norm"] > 0 and lines[2]["critic/loss"] > 0
    [checkpoint] = (files / "lora_ppo" / "checkpoints").glob("step_*2")
    assert (checkpoint / "adapter" / "adapter_model.safetensors").is_file()
