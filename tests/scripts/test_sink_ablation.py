"""The sink ablation's plan, its raised sinks and its table, from logs made up here."""

from __future__ import annotations

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from megatron_rl.config import DataConfig
from megatron_rl.config.load import build_config, parse_overrides
from megatron_rl.tasks.from_config import build_task


def test_the_plan(ablation):
    plan = ablation.make_plan()
    arms = len(ablation.METHODS) + len(ablation.WITH_SMALL_SINKS)
    assert len({p.name for p in plan}) == len(plan) == 3 * arms
    assert [p.method for p in plan[:arms]] == [*ablation.METHODS, *ablation.WITH_SMALL_SINKS], "seeds are outermost"
    assert {p.sinks for p in plan} == set(ablation.SINKS)


def test_every_method_is_a_config(ablation):
    """As the command line gives it, so that lists are read as lists."""
    configs = {}
    for method, settings in ablation.METHODS.items():
        words = [word for key, value in (ablation.COMMON | settings).items() for word in (f"--{key}", str(value))]
        configs[method] = build_config(parse_overrides(words))
    assert configs["sinks trained"].model.freeze == [] and configs["sinks trained"].model.attention_sinks == "exact"
    assert configs["sinks frozen"].model.freeze == ["*.softmax_offset"]
    without = [method for method, config in configs.items() if config.model.attention_sinks == "ignored"]
    assert without == [method for method in ablation.METHODS if method.startswith("no sinks")]
    assert configs["no sinks, TIS of sequences"].correction.level == "sequence"
    assert configs["no sinks, TIS of tokens"].correction.level == "token"


def test_sinks_alone_are_raised(ablation, tiny_model, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("gpt_oss", "--layers", "2"), folder)
    before = load_file(folder / "model.safetensors")
    ablation.add_to_sinks(2.5, folder)
    after = load_file(folder / "model.safetensors")
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"model.layers.{layer}.self_attn.sinks" for layer in range(2)}
    for name in changed:
        torch.testing.assert_close(after[name], before[name] + 2.5)


@pytest.mark.slow
def test_the_attention_that_sinks_take(ablation, tiny_model, tmp_path):
    """None where sinks are nothing, all of it where they are everything, and as much as a key where all are alike."""
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("gpt_oss", "--layers", "2", "--tokenizer", "numbers"), folder)
    shares = []
    for value in (-1e4, 2e4):
        ablation.add_to_sinks(value, folder)
        shares += [ablation.attention_to_sinks(folder, prompts=2)]
    assert shares[0] == pytest.approx([0, 0], abs=1e-6) and shares[1] == pytest.approx([1, 1], abs=1e-6)
    weights = load_file(folder / "model.safetensors")
    for name, tensor in weights.items():
        if "self_attn.sinks" in name or "self_attn.q_proj" in name:
            tensor.zero_()  # all scores are 0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer, prompts = AutoTokenizer.from_pretrained(folder), build_task(DataConfig(task="number_sorting"))
    keys = []
    for prompt in prompts.prompts("eval")[:2]:
        asked = len(tokenizer(prompt.text)["input_ids"])
        keys += range(asked, asked + len(tokenizer(" ".join(map(str, prompt.answer)))["input_ids"]) + 1)
    window = json.loads((folder / "config.json").read_text())["sliding_window"]
    expected = [sum(1 / (min(n, most) + 1) for n in keys) / len(keys) for most in (window, max(keys))]
    assert ablation.attention_to_sinks(folder, prompts=2) == pytest.approx(expected, abs=1e-6)


def test_results_are_of_the_runs_that_are_done(ablation, tmp_path, capsys):
    for method, kl in (("large-sinks-trained", 1e-6), ("small-no-sinks", 0.25)):
        for seed in (0, 1):
            folder = tmp_path / "runs" / f"{method}-seed{seed}"
            folder.mkdir(parents=True)
            lines = [{"step": 0, "eval/score": 0.25, "eval/greedy": 0.5}]
            lines += [
                {
                    "step": step,
                    "eval/score": 0.5 + 0.25 * (step == 4) if step % 4 == 0 else None,
                    "eval/greedy": step / 10,
                    "reward/mean": step / 8,
                    "mismatch/kl": kl * step,
                    "update/grad_norm": {1: 100.0, 2: None}.get(step, 1.0),  # no number: the update was skipped
                }
                for step in range(1, 9)
            ]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "runs" / "large-sinks-frozen-seed0").mkdir()
    (tmp_path / "runs" / "large-sinks-frozen-seed0" / "metrics.jsonl").write_text(
        '{"step": 3, "eval/score": 0.5}\n'
    )  # stopped
    shares = {"large": [0.5, 0.25], "small": [0.125, 0.0]}
    ablation.write_results(
        shares, tmp_path / "runs", tmp_path / "out", 8, {"small-no-sinks-seed0": 2.0, "large-sinks-frozen-seed0": 9.0}
    )
    found = json.loads((tmp_path / "out" / "sink-ablation.json").read_text())
    names = [f"{arm}-seed{seed}" for arm in ("large-sinks-trained", "small-no-sinks") for seed in (0, 1)]
    assert sorted(found["runs"]) == names and found["minutes"] == 2.0
    assert found["attention_to_sinks"] == shares
    figures = found["runs"]["small-no-sinks-seed0"]["figures"]
    assert (figures["before"], figures["eval/score"], figures["best"]) == (0.25, 0.5, 0.75)
    assert figures["first/kl"] == pytest.approx(0.25 * 1.5) and figures["last/kl"] == pytest.approx(0.25 * 7.5)
    assert (figures["greedy_before"], figures["greedy"]) == (0.5, 0.8)
    assert (figures["update/grad_norm"], figures["grad_norm_max"]) == (1.0, 100.0)
    assert figures["reward"] == pytest.approx((7 + 8) / 16), "of the last quarter"
    rows = (tmp_path / "out" / "sink-ablation.md").read_text().splitlines()
    [row] = [row for row in rows if row.startswith("| small | no sinks |")]
    assert row.startswith(
        "| small | no sinks | 2 | 0.250 ± 0.000 | 0.500 ± 0.000 | 0.750 ± 0.000 | 0.500 ± 0.000 | 0.800 ± 0.000 |"
    )
    assert not [row for row in rows if row.startswith("| large | sinks frozen |")]
    for sinks, method in (("large", "sinks trained"), ("small", "no sinks")):
        picture = (tmp_path / "out" / f"sink-ablation-{sinks}.svg").read_text()
        assert method in picture and "Gradient norm" in picture and "NaN" not in picture
    capsys.readouterr()
