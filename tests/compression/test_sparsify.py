"""Zeros by calibration data: the same under every layout, and those that each method asks for, layer after layer."""

from __future__ import annotations

import random
from itertools import product

import numpy as np
import pytest
import torch
from models.test_convert import read_folder
from ranks import fresh_seed, run_ranks
from trainer.layouts import make_samples
from transformers import AutoModelForCausalLM

from megatron_rl.compression.sparsity import Pattern, magnitude, sparsegpt, wanda

pytestmark = pytest.mark.timeout(900)  # the limits of the processes below are what ends a test

LAYOUTS = {
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
    "context": {"context": 2},
    "expert": {"expert": 2},
    "tensor and expert": {"tensor": 2, "expert": 2},
    "data": {},
}


def check_rows(ours: torch.Tensor, theirs: torch.Tensor, name: str) -> None:
    """Two that score alike but for rounding may change places, which changes the row behind them: of one row in some 30,000, so
    that four of the 32 or more rows of a weight have other zeros one time in 10^9. The others have the same values, but for
    roundings of 6e-8 times the condition of the inputs' products, which is some 1e4 with their damping."""
    ours, theirs = (x if x.dim() == 2 else x[None] for x in (ours, theirs))
    same = ((ours == 0) == (theirs == 0)).all(1)
    assert same.double().mean() > 0.9, f"{name}: {int((~same).sum())} rows of {len(same)} have other zeros"
    assert (ours - theirs)[same].norm() <= 1e-2 * theirs.norm(), name


FAMILIES = ("qwen3_moe", "deepseek_v3")
CASES = [(FAMILIES[number % 2], layout) for number, layout in enumerate(LAYOUTS)]
REST = [case for case in product(FAMILIES, LAYOUTS) if case not in CASES]


@pytest.mark.parametrize(
    "cases", [pytest.param(CASES, id="by turns"), pytest.param(REST, id="rest", marks=pytest.mark.long)]
)
def test_zeros_are_the_same_on_every_layout(cases, tiny_model):
    seed = fresh_seed()
    rng, worlds = random.Random(seed), []
    for family, layout in cases:
        model = str(tiny_model(family, "--layers", "2"))
        prune = {"sparsity": rng.choice(["2:4", "unstructured"]), "method": rng.choice(["wanda", "sparsegpt"])}
        worlds.append((f"{family} {layout} {prune}", model, {"prune": prune, "parallel": LAYOUTS[layout]}, seed))
    alone = run_ranks(
        1, "compression.prune_ranks:sparsified", ([(m, {"prune": o["prune"]}, s) for _, m, o, s in worlds],)
    )
    both = run_ranks(2, "compression.prune_ranks:sparsified", ([world[1:] for world in worlds],), timeout=400)
    for index, (name, *_) in enumerate(worlds):
        for weight, tensor in alone[0][index].items():
            theirs = both[0][index][weight]
            assert torch.equal(theirs, both[1][index][weight])
            check_rows(theirs, tensor, f"{name}: {weight}")


@pytest.mark.parametrize("method", ["magnitude", "wanda", "sparsegpt"])
def test_zeros_are_those_of_the_method(method, tiny_model):
    """By transformers' modules, one layer after the other, each behind those that have their zeros."""
    folder, seed = tiny_model("qwen3", "--layers", "2"), fresh_seed()
    left_out = "decoder.layers.1.self_attention.linear_proj.weight"
    targets = ["*.linear_[fq]*", "decoder.layers.0.*.linear_proj.weight"]
    prune = {"sparsity": "1:4", "method": method, "targets": targets}
    [found] = run_ranks(1, "compression.prune_ranks:sparsified", ([(str(folder), {"prune": prune}, seed)],))[0]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    samples = make_samples(seed, 7, model.config.vocab_size)
    for number, layer in enumerate(model.model.layers):
        linears = {n: m for n, m in layer.named_modules() if isinstance(m, torch.nn.Linear)}
        if f".{number}." in left_out:
            del linears["self_attn.o_proj"]
        rows: dict[str, list[torch.Tensor]] = {name: [] for name in linears}
        handles = [
            module.register_forward_pre_hook(lambda m, x, seen=rows[name]: seen.append(x[0].detach()[0].double()))
            for name, module in linears.items()
        ]
        with torch.no_grad():
            for sample in samples:
                model(torch.from_numpy(sample.tokens[:-1].astype(np.int64))[None])
        for handle in handles:
            handle.remove()
        for name, module in linears.items():
            x, weight = torch.cat(rows[name]), module.weight.detach()
            if method == "magnitude":
                expected = magnitude(weight, Pattern(1, 4))
            elif method == "wanda":
                expected = wanda(weight, x.square().sum(0), Pattern(1, 4))
            else:
                expected = sparsegpt(weight, x.T @ x, Pattern(1, 4))
            ours = found[f"model.layers.{number}.{name}.weight"]
            check_rows(ours, expected, f"{number} {name}")
            module.weight.data.copy_(ours)
    before = read_folder(folder)
    assert torch.equal(
        found["model.layers.1.self_attn.o_proj.weight"], before["model.layers.1.self_attn.o_proj.weight"]
    )
    assert torch.equal(found["lm_head.weight"], before["lm_head.weight"])
