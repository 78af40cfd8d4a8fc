"""Texts: loss, perplexity and bits per byte on each layout against Transformers in fp64; a run that resumes inside a text."""

from __future__ import annotations

import json
import math
import shutil

import numpy as np
import pytest
import torch
from ranks import fresh_seed, run_ranks
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_rl.metrics.logger import METRICS_FILE, read_json_lines

pytestmark = pytest.mark.timeout(900)  # the limits of the processes below are what ends a test

LAYOUTS = ("tensor", "pipeline", "context")
LENGTH, STEPS = 24, 4
EVAL = ("eval/loss", "eval/perplexity", "eval/bits_per_byte")


def some_text(rng: np.random.Generator, characters: int) -> str:
    return "é" + "".join(rng.choice([*"abc de.\n", "é", "ß", "€", "語", "😀"], characters))  # never blanks alone


def in_fp64(folder, texts: list[str]) -> dict[str, float]:
    """From the definitions, a piece at a time, without a batch."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    nats, of_ends, tokens = 0.0, 0.0, 0
    for text in texts:
        ids = [tokenizer.bos_token_id, *tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        for start in range(0, len(ids) - 1, LENGTH - 1):
            piece = torch.tensor([ids[start : start + LENGTH]])
            with torch.no_grad():
                log_probs = model(piece).logits[0, :-1].log_softmax(-1)
            found = -log_probs.gather(1, piece[0, 1:, None])[:, 0]
            nats, tokens = nats + float(found.sum()), tokens + len(found)
        of_ends += float(found[-1])
    size = sum(len(text.encode()) for text in texts)
    return dict(zip(EVAL, (nats / tokens, math.exp(nats / tokens), (nats - of_ends) / math.log(2) / size), strict=True))


@pytest.fixture(scope="module")
def world(tmp_path_factory, tiny_model):
    """Folder of the runs, held-out texts, and the figures by the size that is 2."""
    folder = tmp_path_factory.mktemp("texts")
    seed = fresh_seed()
    rng = np.random.default_rng(seed)
    model = folder / "model"
    shutil.copytree(tiny_model("qwen3", "--layers", "2"), model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.save_pretrained(model)
    held_out = [some_text(rng, int(rng.integers(1, 90))) for _ in range(9)]
    for name, texts in (("train", [some_text(rng, 1500)]), ("eval", held_out)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    config = {
        "steps": STEPS,
        "runs_dir": str(folder / "runs"),
        "model": {"path": str(model)},
        "data": {"path": str(folder / "train.jsonl"), "eval_path": str(folder / "eval.jsonl")},
        "batch": {"prompts_per_step": 3, "tokens_per_micro_batch": 64},
        "optimizer": {"lr": 1e-2},
        "precision": {"train": "fp32"},
        "rollout": {"context_length": LENGTH},
        "eval": {
            "sets": {
                "again": {"path": str(folder / "eval.jsonl")},
                "first": {"path": str(folder / "eval.jsonl"), "prompts": 3},
            }
        },
        "logging": {"progress": False, "trackers": []},
    }
    file = folder / "config.yaml"
    file.write_text(json.dumps(config))
    ask = ["eval", str(file), "--name", "asked", "--eval.likelihood", "true"]
    commands = [[*ask, f"--parallel.{size}=2"] for size in LAYOUTS]
    learn = ["sft", str(file), "--eval.every", "2", "--name"]
    commands += [[*learn, "whole"], [*learn, "resumed", "--steps", "2"], [*learn, "resumed"]]
    printed = run_ranks(2, "likelihood_ranks:run_commands", (commands,), timeout=540.0)[0]
    found = {size: json.loads(text[text.index("{") :]) for size, text in zip(LAYOUTS, printed, strict=False)}
    before_training, *_ = read_json_lines(folder / "runs" / "whole" / METRICS_FILE)
    return folder, held_out, found | {"data": before_training}


def test_figures_are_those_of_transformers_on_every_layout(world):
    folder, held_out, found = world
    expected = in_fp64(folder / "model", held_out)
    for layout, figures in found.items():
        assert figures["eval/prompts"] == found["tensor"]["eval/prompts"] > len(held_out)
        for name in EVAL:  # fp32 against fp64
            assert figures[name] == pytest.approx(expected[name], rel=1e-5), f"{layout}: {name}"
    assert not (folder / "runs" / "asked" / METRICS_FILE).exists()


def test_each_set_has_figures_of_its_own(world):
    """Sets of `eval` and of SFT's evaluations; beside them those of data.eval_path, which are the whole run's."""
    folder, held_out, found = world
    first = in_fp64(folder / "model", held_out[:3])
    for figures in found.values():
        for name in EVAL:
            own = name.replace("eval/", "eval/again/")
            assert figures[own] == pytest.approx(figures[name], rel=1e-6)
            assert figures[name.replace("eval/", "eval/first/")] == pytest.approx(first[name], rel=1e-5)


def test_a_run_that_resumes_inside_a_text_is_bit_identical(world):
    folder, held_out, _ = world
    whole, resumed = (read_json_lines(folder / "runs" / name / METRICS_FILE) for name in ("whole", "resumed"))
    for name in ("loss/policy", *EVAL):
        values = [line.get(name) for line in whole]
        assert values == [line.get(name) for line in resumed] and any(values), name
    assert [line["step"] for line in whole if line.get("eval/loss") is not None] == [0, 2, STEPS]
    weights, others = (load_file(folder / "runs" / name / "hf" / "model.safetensors") for name in ("whole", "resumed"))
    assert weights.keys() == others.keys() and all(torch.equal(weights[name], others[name]) for name in weights)
    last = in_fp64(folder / "runs" / "whole" / "hf", held_out)
    assert {name: whole[-1][name] for name in EVAL} == pytest.approx(last, rel=1e-4)
    assert whole[-1]["eval/loss"] < whole[0]["eval/loss"]
