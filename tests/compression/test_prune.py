"""megatron-rl prune: what does nothing is found and removed without changing a logit; bad input is one line."""

from __future__ import annotations

import json
import random
import string

import numpy as np
import pytest
import torch
from models.planted import DEAD_EXPERTS, EXPERTS, IDLE_LAYERS, LAYERS, planted
from models.test_convert import read_folder
from ranks import fresh_seed, run_ranks
from transformers import AutoModelForCausalLM

from megatron_rl.compression.structured_pruning import REPORT
from tests.program import forked
from tools.make_tiny_model import FAMILIES

pytestmark = pytest.mark.timeout(900)  # the limits of the processes below are what ends a test

LETTERS = string.ascii_letters + string.digits + " .\n"
"""So many that each expert which is alive gets one: of four it is among the two of a letter for every second one, by a router
that is random."""


def write_config(folder, rng: random.Random):
    texts = ["".join(rng.choices(LETTERS, k=rng.randrange(20, 90))) + "x" for _ in range(30)]
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
                "logging": {"progress": False, "trackers": []},
            }
        )
    )
    return file


def words(options: dict[str, str]) -> list[str]:
    return [word for key, value in options.items() for word in (f"--prune.{key}", value)]


@pytest.fixture(scope="module")
def pruned(tmp_path_factory):
    """(family, whether channels are dead by the weights behind them) -> folder before, folder of the run, options, output.

    Also of runs on two processes, by the key that is 2, and of one that puts zeros into what is left ("zeros").
    """
    folder, seed = tmp_path_factory.mktemp("planted"), fresh_seed()
    rng, found = random.Random(seed), {}
    config, commands = write_config(folder, rng), {}

    def add(key, source: str, options: dict[str, str], *more: str) -> None:
        name = "-".join(map(str, key)) if isinstance(key, tuple) else key
        commands[key] = [
            "prune",
            str(config),
            "--model.path",
            str(folder / source),
            "--name",
            name,
            *words(options),
            *more,
        ]
        found[key] = (folder / source, folder / "runs" / name, options)

    for family in FAMILIES:
        for behind in (False, True):
            options = planted(family, folder / f"{family}-{behind}", rng, behind=behind)
            measure = ["--prune.channel_importance", "wanda"] if behind else []
            add((family, behind), f"{family}-{behind}", options, *measure)
    for key, source in (("tensor", "qwen3-False"), ("expert", "qwen3_moe-False"), ("pipeline", "gpt_oss-False")):
        options = {k: v for k, v in found[source.split("-")[0], False][2].items() if k != "heads" or key != "tensor"}
        add(key, source, options, f"--parallel.{key}", "2")
    one = {key: command for key, command in commands.items() if isinstance(key, tuple)}
    two = {key: command for key, command in commands.items() if key not in one}
    sparse = {"experts": "6", "sparsity": "2:4", "method": "sparsegpt", "targets": "*.mlp.experts.*"}
    add("zeros", "qwen3_moe-False", sparse)
    one["zeros"] = commands["zeros"]
    printed = run_ranks(1, "likelihood_ranks:run_commands", ([*one.values()],), timeout=500)[0]
    printed += run_ranks(2, "likelihood_ranks:run_commands", ([*two.values()],), timeout=300)[0]
    return {key: (*found[key], text) for key, text in zip([*one, *two], printed, strict=True)}


def logits(folder, tokens: torch.Tensor) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    with torch.no_grad():
        return model(tokens).logits


def check_same_logits(source, out) -> None:
    tokens = torch.from_numpy(np.random.default_rng().integers(4, 500, (3, 40)))
    ours, theirs = logits(out, tokens), logits(source, tokens)
    assert theirs.std() > 0.05 and (ours - theirs).abs().max() < 1e-6


@pytest.mark.parametrize("behind", [False, True], ids=["silent", "unheard"])
@pytest.mark.parametrize("family", FAMILIES)
def test_dead_parts_are_removed_and_logits_stay(family, behind, pruned):
    source, run, options, printed = pruned[family, behind]
    report = json.loads((run / "hf" / REPORT).read_text())
    if "experts" in options:
        moe_layers = LAYERS - (family == "deepseek_v3")
        dead = f"{DEAD_EXPERTS * moe_layers} of {EXPERTS * moe_layers} experts get no token"
        assert dead in printed, printed  # else the data says too little of what is alive
        for layer, kept in report["kept"]["experts"].items():
            importance = report["importance"]["experts"][int(layer)]
            assert kept == [expert for expert in range(EXPERTS) if importance[expert] > 0]
    check_same_logits(source, run / "hf")
    assert len(report["kept"]["layers"]) == LAYERS - IDLE_LAYERS and len(report["importance"]["layers"]) == LAYERS
    figures = json.loads((run / REPORT).read_text())
    assert figures["loss"]["after"] == pytest.approx(figures["loss"]["before"], abs=1e-5)
    for when, folder in (("before", source), ("after", run / "hf")):
        weights = read_folder(folder)
        buffers = sum(w.numel() for name, w in weights.items() if name.endswith("e_score_correction_bias"))
        assert figures["parameters"][when]["total"] == sum(w.numel() for w in weights.values()) - buffers
    assert f"{figures['parameters']['after']['total']:,}" in printed and str(run / "hf") in printed


@pytest.mark.parametrize("key", ["tensor", "expert", "pipeline"])
def test_several_processes_remove_the_same(key, pruned):
    source, run, _, _ = pruned[key]
    check_same_logits(source, run / "hf")
    if key != "tensor":
        alone = pruned[source.name.split("-")[0], False][1]
        theirs, ours = read_folder(alone / "hf"), read_folder(run / "hf")
        assert theirs.keys() == ours.keys() and all(torch.equal(theirs[name], ours[name]) for name in theirs)


def test_zeros_go_into_what_is_left(pruned):
    source, run, _, printed = pruned["zeros"]
    figures, weights = json.loads((run / REPORT).read_text()), read_folder(run / "hf")
    assert json.loads((run / "hf" / "config.json").read_text())["num_local_experts"] == 6
    experts = [name for name in weights if ".experts." in name]
    assert len(experts) == 6 * 3 * LAYERS
    for name in experts:
        assert ((weights[name].unflatten(1, (-1, 4)) != 0).sum(-1) <= 2).all()
    before = read_folder(source)
    assert all(torch.equal(weights[n], before[n]) for n in weights if n not in experts and ".mlp.gate." not in n)
    zeros = sum(int((w == 0).sum()) for w in weights.values())
    assert figures["zeros"]["after"] == zeros and f"{zeros:,}" in printed


def test_bad_input_is_one_line(tiny_model, tmp_path):
    config = write_config(tmp_path, random.Random(0))
    model = tiny_model("qwen3_moe", "--layers", "2")
    done = forked("prune", str(config), "--model.path", str(model), "--prune.experts", "1", check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    [error] = [line for line in done.stderr.splitlines() if line.startswith("megatron-rl: error")]
    assert "prune.experts = 1" in error and "use 2 or more" in error
    assert not (tmp_path / "runs").exists()
