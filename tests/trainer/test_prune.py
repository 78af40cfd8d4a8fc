"""megatron-rl prune: what does nothing is found and removed without changing a logit; bad input is one line."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from models.planted import DEAD_EXPERTS, EXPERTS, LAYERS, planted
from ranks import run_ranks
from transformers import AutoModelForCausalLM

from megatron_rl.models.slim import REPORT
from tools.make_tiny_model import FAMILIES


def write_config(folder, rng: random.Random):
    texts = ["".join(rng.choices("abcdefgh ijk.\n", k=rng.randrange(20, 90))) + "x" for _ in range(30)]
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    file = folder / "config.yaml"
    file.write_text(
        json.dumps(
            {
                "runs_dir": str(folder / "runs"),
                "data": {"path": str(folder / "texts.jsonl")},
                "batch": {"tokens_per_micro_batch": 256},
                "precision": {"train": "fp32"},
                "rollout": {"context_length": 64},
                "eval": {"prompts": 0},
                "prune": {"calibration_samples": 20},
                "logging": {"progress": False, "tensorboard": False},
            }
        )
    )
    return file


@pytest.fixture(scope="module")
def pruned(tmp_path_factory):
    """(family, whether channels are dead by the weights behind them) -> folder before, folder of the run."""
    folder, seed = tmp_path_factory.mktemp("planted"), random.randrange(2**31)
    print(f"seed {seed}")
    rng, commands, found = random.Random(seed), [], {}
    config = write_config(folder, rng)
    for family in FAMILIES:
        for behind in (False, True):
            name = f"{family}-{behind}"
            options = planted(family, folder / name, rng, behind=behind)
            measure = ["--prune.channel_importance", "wanda"] if behind else []
            more = [word for key, value in options.items() for word in (f"--prune.{key}", value)] + measure
            commands.append(["prune", str(config), "--model.path", str(folder / name), "--name", name, *more])
            found[family, behind] = (folder / name, folder / "runs" / name, options)
    printed = run_ranks(1, "likelihood_ranks:run_commands", (commands,), timeout=500)[0]
    return {key: (*value, text) for (key, value), text in zip(found.items(), printed, strict=True)}


@pytest.mark.parametrize("behind", [False, True], ids=["silent", "unheard"])
@pytest.mark.parametrize("family", FAMILIES)
def test_dead_parts_are_removed_and_logits_stay(family, behind, pruned):
    source, run, options, printed = pruned[family, behind]
    exact = {"dtype": torch.float64, "experts_implementation": "eager"}
    if "experts" in options:
        moe_layers = LAYERS - (family == "deepseek_v3")
        dead = f"{DEAD_EXPERTS * moe_layers} of {EXPERTS * moe_layers} experts get no token"
        assert dead in printed, printed  # else the data says too little of what is alive
    before, after = (AutoModelForCausalLM.from_pretrained(f, **exact) for f in (source, run / "hf"))
    tokens = torch.from_numpy(np.random.default_rng().integers(4, 500, (3, 40)))
    with torch.no_grad():
        ours, theirs = after(tokens).logits, before(tokens).logits
    assert theirs.std() > 0.05 and (ours - theirs).abs().max() < 1e-6
    figures = json.loads((run / REPORT).read_text())
    assert figures["loss"]["after"] == pytest.approx(figures["loss"]["before"], abs=1e-5)
    for when, model in (("before", before), ("after", after)):
        numbers = sum(p.numel() for p in model.parameters())
        biases = sum(b.numel() for n, b in model.named_buffers() if n.endswith("e_score_correction_bias"))
        assert figures["parameters"][when]["total"] == numbers, biases
    shapes = {p.shape for p in after.parameters()}
    assert int(options.get("width", options.get("expert_width", "0"))) in {size for shape in shapes for size in shape}
    report = json.loads((run / "hf" / REPORT).read_text())
    assert len(report["kept"]["layers"]) == LAYERS - 1 and len(report["importance"]["layers"]) == LAYERS
    assert "loss" in printed and str(run / "hf") in printed
    if "experts" in options:
        for layer, kept in report["kept"]["experts"].items():
            importance = report["importance"]["experts"][int(layer)]
            assert len(kept) == int(options["experts"]) and [
                importance[e] for e in range(EXPERTS) if e not in kept
            ] == [0] * (EXPERTS - len(kept))
