"""The mismatch ablation's plan, its planted outliers and its table, from logs made up here."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file


def test_the_plan(ablation):
    plan = ablation.make_plan(full=False)
    seeds = {method: [p.seed for p in plan if p.method == method] for method in ablation.METHODS}
    for method in ("RLOO", "TIS", "MIS", "DVP", "MIS + DVP"):
        assert seeds[method] == [0, 1, 2]
    assert all(seeds[method] == [0] for method in ablation.OF_ONE_SEED)
    assert len({p.name for p in plan}) == len(plan)
    from megatron_rl.config import key_paths

    keys = set(ablation.COMMON).union(*ablation.METHODS.values())
    assert keys <= key_paths().keys()


def test_an_outlier_changes_nothing_but_the_range(ablation, tiny_model, tmp_path):
    """In fp32 logits and gradients are those of the model whose unit 0 is zero, to the bit."""
    from transformers import AutoModelForCausalLM

    out = ablation.plant_outliers(tiny_model("qwen3_moe", "--layers", "2"), tmp_path / "planted")
    planted = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    zeroed = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float32)
    weights = load_file(out / "model.safetensors")
    name = next(n for n in weights if n.endswith("down_proj.weight"))
    assert float(weights[name][0, 0]) == float(weights[name].abs().max()) > 1e4
    with torch.no_grad():
        for key, weight in zeroed.named_parameters():
            if key.endswith(("down_proj", "down_proj.weight")):
                weight[..., 0, 0] = 0.0
    tokens = torch.randint(4, 500, (2, 12))
    grads = []
    for model in (planted, zeroed):
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        grads.append([loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)])
    assert len(grads[0]) > 5
    assert all(torch.equal(a, b) for a, b in zip(*grads, strict=True))
    assert ablation.plant_outliers(tmp_path / "absent", tmp_path / "planted") == out  # made once


def test_results_are_of_the_runs_that_are_done(ablation, tmp_path, capsys):
    for method, kl in (("rloo", 0.5), ("dvp", 0.25)):
        for seed in (0, 1):
            folder = tmp_path / "runs" / f"{method}-seed{seed}"
            folder.mkdir(parents=True)
            lines = [{"step": 0, "eval/score": 0.25, "eval/greedy": 0.5}]
            lines += [
                {
                    "step": step,
                    "eval/score": 0.5 + 0.25 * (step == 4) if step % 4 == 0 else None,
                    "eval/greedy": step / 10,
                    "mismatch/kl": kl * step,
                    "update/grad_norm": {1: 100.0, 2: None}.get(step, 1.0),  # no number: the update was skipped
                    "pruning/pruned_mass": 1e-4 if method == "dvp" else None,
                }
                for step in range(1, 9)
            ]
            (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (tmp_path / "runs" / "tis-seed0").mkdir()
    (tmp_path / "runs" / "tis-seed0" / "metrics.jsonl").write_text('{"step": 3, "eval/score": 0.5}\n')  # stopped
    ablation.write_results(tmp_path / "runs", tmp_path / "out", 8, {"dvp-seed0": 2.0, "tis-seed0": 9.0})
    found = json.loads((tmp_path / "out" / "mismatch-ablation.json").read_text())
    assert sorted(found["runs"]) == ["dvp-seed0", "dvp-seed1", "rloo-seed0", "rloo-seed1"] and found["minutes"] == 2.0
    figures = found["runs"]["dvp-seed0"]["figures"]
    assert figures["before"] == 0.25 and figures["eval/score"] == 0.5 and figures["best"] == 0.75
    assert figures["first/kl"] == pytest.approx(0.25 * 1.5) and figures["last/kl"] == pytest.approx(0.25 * 7.5)
    assert figures["update/grad_norm"] == 1.0
    rows = (tmp_path / "out" / "mismatch-ablation.md").read_text().splitlines()
    [dvp] = [row for row in rows if row.startswith("| DVP |")]
    scores = "0.250 ± 0.000 | 0.500 ± 0.000 | 0.750 ± 0.000 | 0.800 ± 0.000"  # before, after, best, greedy
    assert dvp.startswith(f"| DVP | 2 | {scores} | 0.3750 ± 0.0000 | 1.8750 ± 0.0000 |")
    assert not [row for row in rows if "TIS" in row]
    picture = (tmp_path / "out" / "mismatch-ablation.svg").read_text()
    assert "RLOO" in picture and "Score" in picture and "NaN" not in picture
    capsys.readouterr()
