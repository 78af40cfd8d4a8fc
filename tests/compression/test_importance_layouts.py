"""Importance is the same under every parallel layout, and that of a loop over transformers' modules."""

from __future__ import annotations

import json
import random

import numpy as np
import pytest
import torch
from models.planted import DENSE, HEADLESS
from ranks import run_ranks, without_ties
from torch.nn import functional as F
from trainer.layouts import make_samples
from transformers import AutoModelForCausalLM

pytestmark = pytest.mark.timeout(900)  # the limits of the processes below are what ends a test

ASKED = {"layers": 1, "heads": 2, "width": 3, "experts": 4, "expert_width": 3}
LAYOUTS = {
    "tensor": {"tensor": 2},
    "pipeline": {"pipeline": 2},
    "virtual": {"pipeline": 2, "virtual_pipeline": 2},
    "context": {"context": 2},
    "expert": {"expert": 2},
    "tensor and expert": {"tensor": 2, "expert": 2},
    "data": {},
}


def asked(family: str, **more: str) -> dict:
    left_out = {"heads"} if family in HEADLESS else set()
    left_out |= {"experts", "expert_width"} if family in DENSE else {"width"} if family != "deepseek_v3" else set()
    return {key: value for key, value in ASKED.items() if key not in left_out} | more


def close(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], rtol: float) -> None:
    assert a.keys() == b.keys()
    for name, tensor in a.items():
        if tensor.numel():  # of shared experts, where there are some
            assert torch.allclose(tensor, b[name], rtol=rtol, atol=rtol * float(b[name].abs().max())), name
            assert tensor.abs().max() > 0, name


def worlds_of(seed: int, tiny_model):
    """(name, model, overrides, seed) of two importances: all layouts, each for one of three families in turn."""
    rng, found = random.Random(seed), []
    for number, (layout, sizes) in enumerate(LAYOUTS.items()):
        family = ("qwen3_moe", "deepseek_v3", "gpt_oss")[(seed + number) % 3]
        if family == "gpt_oss" and layout == "tensor":
            sizes = sizes | {"expert_tensor": 1}
        measure = {"channel_importance": rng.choice(["wanda", "activation"])}
        measure["expert_importance"] = rng.choice(["reap", "frequency"])
        overrides = {"prune": asked(family, **measure), "parallel": sizes}
        found.append((f"{family} {layout}", str(tiny_model(family, "--layers", "4")), overrides, seed))
    return found


def test_importance_is_the_same_on_every_layout(tiny_model):
    def attempt(seed: int):
        worlds = worlds_of(seed, tiny_model)
        of_one = [(model, {"prune": overrides["prune"]}, seed) for _, model, overrides, seed in worlds]
        return worlds, run_ranks(1, "compression.prune_ranks:importances", (of_one,), refuse_ties=True)

    worlds, alone = without_ties(attempt)
    both = run_ranks(2, "compression.prune_ranks:importances", ([world[1:] for world in worlds],), timeout=500)
    for index, (name, *_) in enumerate(worlds):
        for rank in both:
            try:
                close(rank[index], alone[0][index], 1e-4)
            except AssertionError as error:
                raise AssertionError(f"{name}: {error}") from None


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe"])
def test_importance_is_that_of_its_definition(family, tiny_model):
    """Sums over tokens by transformers' own modules, one sequence at a time, in fp64."""
    folder = tiny_model(family, "--layers", "2")
    config = json.loads((folder / "config.json").read_text())
    measures = [("activation", "reap"), ("wanda", "frequency")]
    prunes = [asked(family, channel_importance=c, expert_importance=e) for c, e in measures]

    def attempt(seed: int):
        worlds = [(str(folder), {"prune": prune}, seed) for prune in prunes]
        return seed, run_ranks(1, "compression.prune_ranks:importances", (worlds,), refuse_ties=True)[0]

    seed, found = without_ties(attempt)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager")
    kept: dict[str, list] = {}

    def keep(name: str):
        return lambda module, inputs, output: kept.setdefault(name, []).append((inputs[0].detach(), output))

    for number, layer in enumerate(model.model.layers):
        layer.register_forward_hook(keep(f"layer {number}"))
        layer.self_attn.o_proj.register_forward_hook(keep(f"heads {number}"))
        layer.mlp.register_forward_hook(keep(f"mlp {number}"))
        if family in DENSE:
            layer.mlp.down_proj.register_forward_hook(keep(f"down {number}"))
    samples = make_samples(seed, 7, config["vocab_size"])
    with torch.no_grad():
        for sample in samples:
            model(torch.from_numpy(sample.tokens[:-1].astype(np.int64))[None])
    tokens = sum(sample.inputs for sample in samples)
    joined = {name: torch.cat([x.flatten(0, -2) for x, _ in passes]) for name, passes in kept.items()}
    for number, layer in enumerate(model.model.layers):
        outputs = [o[0] if isinstance(o, tuple) else o for _, o in kept[f"layer {number}"]]
        left = torch.cat([o.flatten(0, -2) for o in outputs])
        turned = (1 - F.cosine_similarity(joined[f"layer {number}"], left, dim=-1)).mean()
        heads, weight = joined[f"heads {number}"], layer.self_attn.o_proj.weight
        half = heads.shape[1] // 2
        norms = [(heads[:, g : g + half] @ weight[:, g : g + half].T).norm(dim=1).mean() for g in (0, half)]
        expected = {"layers": turned, "heads": torch.stack(norms)}
        others = [{}, {}]
        if family in DENSE:
            act, down = joined[f"down {number}"], layer.mlp.down_proj.weight
            others = [{"width": act.abs().mean(0)}, {"width": act.square().mean(0).sqrt() * down.norm(dim=0)}]
        else:
            others = by_expert(joined[f"mlp {number}"], layer.mlp, config["num_experts_per_tok"], tokens)
        for measured, other in zip(found, others, strict=True):
            for name, value in (expected | other).items():
                assert torch.allclose(measured[name][number], value.detach(), rtol=1e-4, atol=1e-7), name


def by_expert(x: torch.Tensor, mlp, topk: int, tokens: int) -> list[dict[str, torch.Tensor]]:
    """Of Qwen3-MoE: softmax of the router, the best k renormalized, an expert after the other."""
    gates = (x @ mlp.gate.weight.T).softmax(-1)
    best, ids = gates.topk(topk, dim=-1)
    best = best / best.sum(-1, keepdim=True)
    reap, sent, activation, wanda = [], [], [], []
    for expert in range(len(mlp.experts.gate_up_proj)):
        rows, slots = (ids == expert).nonzero(as_tuple=True)
        gate, up = (x[rows] @ mlp.experts.gate_up_proj[expert].T).chunk(2, dim=-1)
        act = F.silu(gate) * up * best[rows, slots, None]
        down = mlp.experts.down_proj[expert]
        reap.append((act @ down.T).norm(dim=1).mean() if len(rows) else torch.zeros(()))
        sent.append(torch.tensor(len(rows) / tokens))
        activation.append(act.abs().sum(0) / tokens)
        wanda.append((act.square().sum(0) / tokens).sqrt() * down.norm(dim=0))
    return [
        {"experts": torch.stack(reap).double(), "expert_width": torch.stack(activation)},
        {"experts": torch.stack(sent).double(), "expert_width": torch.stack(wanda)},
    ]
