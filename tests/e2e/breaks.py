"""Another order of the sum in one operator of the trainer, for tests of the certificate."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from megatron_rl.certify import certify
from megatron_rl.certify.certificate import DATA, PAGE
from megatron_rl.cli import main
from megatron_rl.distributed import parallel
from megatron_rl.models.identical_layers import BatchInvariantRowParallelLinear
from megatron_rl.models.moe import rows_of_tokens
from megatron_rl.models.norm import HeadsRMSNorm, RMSNorm


def backwards(linear: Any) -> Any:
    """Sum over the inputs of a linear layer from the last one to the first, and over ranks as Megatron does."""
    if linear is not None:
        multiply = linear._forward_impl
        linear._forward_impl = lambda *, input, weight, **options: multiply(
            input=input.flip(-1), weight=weight.flip(-1), **options
        )
    if isinstance(linear, BatchInvariantRowParallelLinear):
        linear.forward = super(BatchInvariantRowParallelLinear, linear).forward
    return linear


def break_product(product: Any) -> Any:
    """The same of a product whose weight another module holds."""
    if product is not None:
        multiply = product.forward
        product.forward = lambda x, weight: multiply(x.flip(-1), weight.flip(-1))
    return product


def break_norm(norm: Any) -> Any:
    """As it is computed without `precision.identical`."""
    if not isinstance(norm, RMSNorm):
        return None  # there is none
    plain = HeadsRMSNorm if isinstance(norm, HeadsRMSNorm) else RMSNorm
    norm.forward = partial(plain.forward, norm)
    return norm


def break_attention(core: Any) -> Any:
    """Scores are sums over the width of a head: from the last feature to the first."""
    attend = core._sink_attention
    core._sink_attention = lambda q, k, *rest, **borders: attend(q.flip(-1), k.flip(-1), *rest, **borders)
    return core


def break_router(mlp: Any) -> Any:
    """Its logits."""
    router = getattr(mlp, "router", None)
    if router is not None:
        bias = 0 if router.bias is None else router.bias
        router.compute_logits = lambda x: x.flip(-1) @ router.weight.flip(-1).t() + bias
    return router


def break_mlp(mlp: Any) -> Any:
    """The experts of a token from the last one to the first; of a dense layer, its second product's inputs."""
    if not hasattr(mlp, "router"):
        return backwards(mlp.linear_fc2)
    postprocess = mlp.postprocess

    def last_first(output, shared):
        dispatcher = mlp.token_dispatcher
        rows = rows_of_tokens(dispatcher, mlp.config.moe_router_topk)
        postprocess(output, shared)
        total = output[rows[:, -1]]
        for i in reversed(range(rows.shape[1] - 1)):
            total = total + output[rows[:, i]]
        total = total.view(dispatcher.hidden_shape)
        return total if shared is None else total + shared

    mlp.postprocess = last_first
    return mlp


def part(layer: nn.Module, name: str) -> Any:
    """Of its attention; None where it has none of this name."""
    return getattr(layer.self_attention, name, None)


BREAKS: dict[str, Callable[[Any], Any]] = {
    "input norm": lambda layer: break_norm(layer.input_layernorm),
    "qkv projection": lambda layer: backwards(part(layer, "linear_qkv")),
    "query latents": lambda layer: part(layer, "linear_q_up_proj") and break_norm(part(layer, "q_layernorm")),
    "query projection": lambda layer: backwards(part(layer, "linear_q_proj") or part(layer, "linear_q_up_proj")),
    "latent projection": lambda layer: break_product(part(layer, "latent_projection")),
    "latent norm": lambda layer: break_norm(part(layer, "kv_layernorm")),
    "query": lambda layer: part(layer, "linear_qkv") and break_norm(part(layer, "q_layernorm")),
    "key": lambda layer: break_norm(part(layer, "k_layernorm")),
    "attention": lambda layer: break_attention(layer.self_attention.core_attention),
    "output projection": lambda layer: backwards(layer.self_attention.linear_proj),
    "MLP norm": lambda layer: break_norm(layer.pre_mlp_layernorm),
    "router": lambda layer: break_router(layer.mlp),
    "MLP": lambda layer: break_mlp(layer.mlp),
}
"""Operator -> gives that of a layer another order of its sum; returns None where the layer has none, or none of that kind."""


def certify_again(
    config: Path, sides: bytes, words: tuple[str, ...], layer: int | None = None, operators: tuple[str, ...] = ()
) -> tuple[int, str | None, dict, str]:
    """`megatron-rl certify` with the engine's numbers of an earlier one, on every rank.

    sides: a pickled Sides, as tensors themselves would go to other processes by a descriptor each.
    layer, operators: of this layer the first of these operators that it has is broken, on all ranks, as collectives may differ.
    Returns status, the broken operator, the certificate as JSON, and the page.
    """
    build = certify.build_trainer
    broken: list[str | None] = [None]

    def building(*args, **options):
        trainer = build(*args, **options)
        if layer is not None:
            of_layer = trainer.chunks[0].decoder.layers[layer]
            broken[0] = next(name for name in operators if BREAKS[name](of_layer) is not None)
        return trainer

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(certify, "build_trainer", building)
        patch.setattr(certify, "_ask", lambda *_: pickle.loads(sides))
        try:
            status = main(["certify", str(config), *words])
        finally:
            parallel.shutdown()
    run = config.parent / "runs" / "certified"
    return status, broken[0], json.loads((run / DATA).read_text()), (run / PAGE).read_text()
