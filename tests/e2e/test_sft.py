"""SFT over two processes: the likelihood of held-out demonstrations against Transformers in fp64, and an early end."""

from __future__ import annotations

import math
import os
import random
import signal

import pytest
import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_rl.config.load import load_config
from megatron_rl.metrics.logger import read_json_lines
from megatron_rl.rollout.program import SingleTurn
from megatron_rl.tasks import build_task
from megatron_rl.tasks.stream import held_out_demonstrations
from tests.program import Program, forked

STEPS = 3


def in_fp64(folder, pairs, texts) -> dict[str, float]:
    """Mean negative log-likelihood of the responses' tokens, one sequence at a time; perplexity and bits per byte."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    total, of_ends, count = 0.0, 0.0, 0
    for one in pairs:
        tokens = torch.tensor(one.tokens[None].astype(int))
        response = one.tokens[one.prompt_length :].tolist()
        with torch.no_grad():
            log_probs = model(tokens).logits[0].log_softmax(-1)
        for place, token in enumerate(response, one.prompt_length - 1):
            total -= float(log_probs[place, token])
        of_ends -= float(log_probs[-2, response[-1]])
        count += len(response)
    bits = (total - of_ends) / math.log(2)
    return {
        "eval/loss": total / count,
        "eval/perplexity": math.exp(total / count),
        "eval/bits_per_byte": bits / sum(len(text.encode()) for text in texts),
    }


def test_the_loss_of_held_out_demonstrations_is_that_of_transformers(tmp_path, tiny_model):
    model = tiny_model("qwen3_moe", "--layers", "2", "--tokenizer", "numbers")
    path = tmp_path / "config.yaml"
    config = {
        "name": "sft",
        "steps": STEPS,
        "runs_dir": str(tmp_path),
        "model": {"path": str(model), "moe_aux_loss": 0.01, "moe_z_loss": 1e-3},
        "sft": {"label_smoothing": 0.1},
        "data": {"task": "number_sorting", "options": {"corrupt": 0.5}},
        "batch": {"prompts_per_step": 8, "tokens_per_micro_batch": 128},
        "optimizer": {"lr": 1e-2},
        "precision": {"train": "fp32", "rollout": "fp32"},
        "rollout": {"max_new_tokens": 8, "context_length": 28},
        "eval": {"every": 2, "prompts": 41},
        "checkpoint": {"every": 1, "keep": 1, "keep_best": 1},
        "logging": {"progress": False, "trackers": []},
    }
    path.write_text(yaml.safe_dump(config))
    done = forked("sft", str(path), ranks=2, timeout=240)
    lines = {line["step"]: line for line in read_json_lines(tmp_path / "sft" / "metrics.jsonl")}
    assert [step for step, line in lines.items() if line.get("eval/loss") is not None] == [0, 2, STEPS]

    for line in (lines[step] for step in range(1, STEPS + 1)):
        assert line["loss/smoothed"] > line["loss/policy"] > 0  # a fresh model is far from certain
        assert 1 <= line["routing/load_max"] <= 8 and 0 < line["routing/active_experts"] <= 1
        assert line["routing/aux_loss"] > 0.5 and line["routing/z_loss"] > 0 and line["routing/entropy"] > 0

    task = build_task(load_config(path).data, demonstrations=True)
    prompts = task.prompts("eval")[: config["eval"]["prompts"]]
    length = config["rollout"]["context_length"]
    form = SingleTurn(load_config(path), AutoTokenizer.from_pretrained(model), task, None)
    pairs = held_out_demonstrations(prompts, form, length)
    assert len(pairs) > 1 and all(len(one.tokens) <= length for one in pairs)
    assert lines[0]["eval/prompts"] == len(pairs)
    # fp32 against fp64: eps times a few hundred additions a logit, of a loss of a few nats.
    texts = [(p, task.demonstration(p, random.Random(f"eval/{p.prompt_id}"))) for p in prompts]
    fitting = [text for p, text in texts if len(form.sequence(form.encode(p), text).tokens) <= length]
    for step, folder in ((0, model), (STEPS, tmp_path / "sft" / "hf")):
        expected = in_fp64(folder, pairs, fitting)
        assert {name: lines[step][name] for name in expected} == pytest.approx(expected, rel=3e-5)
    assert lines[STEPS]["eval/loss"] < lines[0]["eval/loss"]

    best = min((2, STEPS), key=lambda step: lines[step]["eval/loss"])
    found = {file.name for file in (tmp_path / "sft" / "checkpoints").iterdir()}
    assert {f"step_{best:06d}", f"step_{STEPS:06d}"} == found
    assert f"best checkpoint: step {best}, eval/loss" in done.stdout
    assert done.stdout.count("warning: sft ignores these config keys: precision.rollout\n") == 1


def test_a_launcher_that_is_told_to_end_ends_when_its_processes_have_saved(tmp_path, tiny_model):
    path, log = tmp_path / "config.yaml", tmp_path / "log"
    config = {
        "name": "ended",
        "steps": 100_000,
        "runs_dir": str(tmp_path),
        "model": {"path": str(tiny_model("qwen3_moe", "--layers", "2", "--tokenizer", "numbers"))},
        "data": {"task": "number_sorting"},
        "batch": {"prompts_per_step": 4, "tokens_per_micro_batch": 128},
        "precision": {"train": "fp32", "rollout": "fp32"},
        "rollout": {"max_new_tokens": 8, "context_length": 28},
        "checkpoint": {"every": 0},
        "logging": {"trackers": []},
    }
    path.write_text(yaml.safe_dump(config))
    metrics = tmp_path / "ended" / "metrics.jsonl"
    with Program("sft", str(path), "--nproc", "2", log=log) as program:
        program.until(lambda: len(read_json_lines(metrics)) >= 2, 240, "two steps")
        os.kill(program.pid, signal.SIGTERM)
        program.finish(120)
    last = read_json_lines(metrics)[-1]["step"]
    assert [p.name for p in (tmp_path / "ended" / "checkpoints").iterdir()] == [f"step_{last:06d}"]
    assert "Traceback" not in log.read_text()
