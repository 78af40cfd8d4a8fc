"""Tiny models with parts that do nothing: what pruning has to find, and what it may remove without changing a logit."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from megatron_rl.models.families import FAMILIES
from tools.make_tiny_model import Sizes, make_tiny_model

LAYERS, EXPERTS, WIDTH, EXPERT_WIDTH = 4, 8, 96, 48
IDLE_LAYERS = 2
DEAD_EXPERTS, DEAD_CHANNELS, DEAD_INNER = 4, 20, 18
HEADLESS = [f.model_type for f in FAMILIES.values() if f.latent_attention or f.width_from_hidden]
"""Families whose heads cannot be pruned."""
DENSE = [f.model_type for f in FAMILIES.values() if f.moe is None]
WITH_DENSE_LAYERS = (*DENSE, "deepseek_v3")


def planted(family: str, out: Path, rng: random.Random, *, behind: bool = False) -> dict[str, str]:
    """Make the folder; returns the options of `megatron-rl prune` that remove just what is dead.

    behind: inner channels are dead by the weights behind them, and their activations are the largest.
    """
    sizes = Sizes(layers=LAYERS, experts=EXPERTS, intermediate=WIDTH, expert_intermediate=EXPERT_WIDTH)
    make_tiny_model(family, out, sizes=sizes, dtype=torch.float32, seed=rng.randrange(2**31))
    config = json.loads((out / "config.json").read_text())
    if family == "deepseek_v3":
        config |= {"n_group": 1, "topk_group": 1}
        (out / "config.json").write_text(json.dumps(config))
    weights = load_file(out / "model.safetensors")
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    for name, weight in weights.items():  # larger than at the start of a training, so that all parts matter
        if weight.dim() > 1 and "embed" not in name and "lm_head" not in name:
            weight += 0.05 * torch.randn(weight.shape, generator=generator)
        elif name.endswith(("router.bias", "correction_bias", "o_proj.bias", "down_proj_bias")):
            weight *= 0.1
        elif name.endswith(("bias", "sinks")):
            weight += 0.02 * torch.randn(weight.shape, generator=generator)
    embedding = weights["model.embed_tokens.weight"]
    embedding *= 10
    embedding[:, 0] = 0.5  # a state that all tokens have, and no layer changes
    for layer in range(LAYERS):
        _plant(weights, f"model.layers.{layer}.", rng, behind)
    idle = tuple(f"model.layers.{layer}." for layer in rng.sample(range(1, LAYERS), IDLE_LAYERS))
    for name, weight in weights.items():
        if name.startswith(idle) and ("o_proj" in name or "down_proj" in name or ".w2." in name):  # biases too
            weight.zero_()
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    options = {"layers": str(LAYERS - IDLE_LAYERS)}
    if family not in HEADLESS:
        options["heads"] = "2"
    if family in WITH_DENSE_LAYERS:
        options["width"] = str(WIDTH - DEAD_CHANNELS)
    if family not in DENSE:
        options |= {"experts": str(EXPERTS - DEAD_EXPERTS), "expert_width": str(EXPERT_WIDTH - DEAD_INNER)}
    return options


def _plant(weights: dict[str, torch.Tensor], layer: str, rng: random.Random, behind: bool) -> None:
    names = {name.removeprefix(layer): name for name in weights if name.startswith(layer)}
    for out in ("self_attn.o_proj.weight", "mlp.down_proj.weight", "mlp.shared_experts.down_proj.weight"):
        if out in names:
            weights[names[out]][0] = 0
    for out in ("self_attn.o_proj.bias", "mlp.experts.down_proj_bias"):
        if out in names:
            weights[names[out]][..., 0] = 0
    if "self_attn.kv_a_proj_with_mqa.weight" not in names:  # a group of heads
        o_proj = weights[names["self_attn.o_proj.weight"]]
        group = o_proj.shape[1] // 2 * rng.randrange(2)
        o_proj[:, group : group + o_proj.shape[1] // 2] = 0
    for module, dead in (("mlp", DEAD_CHANNELS), ("mlp.shared_experts", 2 * DEAD_INNER)):
        if f"{module}.up_proj.weight" in names:
            parts = [weights[names[f"{module}.{part}_proj.weight"]] for part in ("gate", "up", "down")]
            _kill(*parts, rng.sample(range(parts[0].shape[0]), dead), behind)
    router = next((name for part, name in names.items() if part.endswith(("gate.weight", "router.weight"))), None)
    if router is None:
        return
    weights[router] *= 4  # tokens go to all experts that are alive
    weights[router][:, 0] = 0
    dead = rng.sample(range(EXPERTS), DEAD_EXPERTS)
    weights[router][dead, 0] = -60
    if correction := names.get("mlp.gate.e_score_correction_bias"):
        weights[correction][dead] = -5
    for name in names.values():
        if match := re.fullmatch(r"(.+\.experts\.\d+\.)(gate_proj|w1)\.weight", name):
            parts = ("gate_proj", "up_proj", "down_proj") if match[2] == "gate_proj" else ("w1", "w3", "w2")
            gate, up, down = (weights[f"{match[1]}{part}.weight"] for part in parts)
            down[0] = 0
            _kill(gate, up, down, rng.sample(range(EXPERT_WIDTH), DEAD_INNER), behind)
    if stacked := names.get("mlp.experts.gate_up_proj"):
        bias, down = weights[f"{stacked}_bias"], weights[names["mlp.experts.down_proj"]]
        down[:, :, 0] = 0
        for expert in range(EXPERTS):
            for channel in rng.sample(range(EXPERT_WIDTH), DEAD_INNER):
                if behind:
                    down[expert, channel] = 0
                    continue
                weights[stacked][expert, :, 2 * channel : 2 * channel + 2] = 0
                bias[expert, 2 * channel : 2 * channel + 2] = 0


def _kill(gate: torch.Tensor, up: torch.Tensor, down: torch.Tensor, channels: list[int], behind: bool) -> None:
    if behind:
        down[:, channels] = 0
        up[channels] *= 10
    else:
        gate[channels] = 0
