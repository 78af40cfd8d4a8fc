"""What transformers says about a model whose routers have predictors, in fp32."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

Weights = dict[str, Tensor]


def plant(folder: Path, seed: int, scale: float = 0.1) -> Weights:
    """A random predictor for every router of a model, by the name under which it is pushed."""
    generator = torch.Generator().manual_seed(seed)
    weights = load_file(folder / "model.safetensors")
    routers = [name for name in weights if name.endswith((".gate.weight", ".router.weight"))]
    return {
        name.removesuffix("weight") + "predictor.weight": scale * torch.randn(weights[name].shape, generator=generator)
        for name in routers
    }


@dataclass
class View:
    """One sequence of n tokens as the model sees it."""

    log_probs: np.ndarray
    """[n - 1]: of tokens 1..n-1."""
    routes: np.ndarray
    """[n, moe_layers, topk], sorted by expert."""
    hidden: Tensor
    """[n, moe_layers, hidden]: router inputs."""
    logits: Tensor
    """[n, moe_layers, experts]: router logits without the prediction."""


class PredictedReference:
    """The model of a folder. A predictor W_p beside a linear router W_r is a router W_r + W_p."""

    def __init__(self, folder: Path, predictors: Weights):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._routers = []
        self._seen: dict[str, list[Tensor]] = {"hidden": [], "routes": []}
        for name, predictor in predictors.items():
            router = self.model.get_submodule(name.removesuffix(".predictor.weight"))
            self._routers.append((router.weight.data.clone(), getattr(router, "bias", None)))
            router.weight.data += predictor
            router.register_forward_hook(lambda _, args, __: self._keep("hidden", args[0]))
            experts = self.model.get_submodule(name.split(".mlp.")[0] + ".mlp.experts")
            experts.register_forward_hook(lambda _, args, __: self._keep("routes", args[1]))

    def _keep(self, key: str, rows: Tensor) -> None:
        self._seen[key].append(rows.reshape(-1, rows.shape[-1]))

    @torch.no_grad()
    def __call__(self, tokens) -> View:
        tokens = torch.as_tensor(np.asarray(tokens), dtype=torch.long)
        self._seen = {"hidden": [], "routes": []}
        log_softmax = self.model(tokens[None]).logits[0].log_softmax(-1)[:-1]
        hidden = self._seen["hidden"]
        logits = [torch.nn.functional.linear(h, *router) for h, router in zip(hidden, self._routers, strict=True)]
        return View(
            log_softmax.gather(-1, tokens[1:, None])[:, 0].numpy(),
            torch.stack(self._seen["routes"], 1).sort(-1).values.numpy(),
            torch.stack(hidden, 1),
            torch.stack(logits, 1),
        )


def agreement(routes: np.ndarray, reference: np.ndarray) -> float:
    """Share of rows [..., topk] with the same experts, in whatever order; of the rows that both have."""
    same = np.sort(routes, -1) == np.sort(reference, -1)[: len(routes)]
    return float(same.all(-1).mean())
