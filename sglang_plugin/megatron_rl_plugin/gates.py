"""The engine's gates beside its routes, in the same four bytes of a reply: for replay of both (routing.replay_gates).

A gate is what an expert's output is multiplied by where the outputs of a token's routed experts are added up, before
routed_scaling_factor: softmax over the chosen experts, or over all of them where the model does not renormalize, or
sigmoid scores over their sum. It is 0 to 1 and travels as a fixed-point number.

SGLang's RoutedExpertsCapturer carries one int32 for each (token, layer, expert chosen): its low 12 bits stay the expert,
the other 20 are the gate. A server does so where its model's config says `routed_expert_gates` (--json-model-override-args).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

OVERRIDE = "routed_expert_gates"
"""Key of the model's config that asks for gates."""
ID_BITS = 12
MOST_EXPERTS = 1 << ID_BITS
STEPS = (1 << 32 - ID_BITS) - 1
"""A gate of 1, in the steps of the fixed-point numbers: 2^20 - 1. Rounding moves a gate by half a step, 5e-7, at most."""
SCORES = ("softmax", "sigmoid")


def pack(ids: Tensor, gates: Tensor) -> Tensor:
    """Expert ids [T, k] below 4096 and their gates [T, k] from 0 to 1 -> [T, k] int32 with both, in two's complement."""
    steps = (gates.float() * STEPS).round().clamp(0, STEPS).to(torch.int64)
    return (ids.to(torch.int64) | steps << ID_BITS).to(torch.int32)


def of_capturer(capturer: Any, *, model: torch.nn.Module, model_config: Any, **_: Any) -> Any:
    """After RoutedExpertsCapturer.create, at the start of a server: whether gates go with the routes.

    Errors: NotImplementedError for a model or a server that cannot give them.
    """
    if not getattr(model_config.hf_config, OVERRIDE, False):
        return capturer
    if capturer is None:
        raise NotImplementedError(f"{OVERRIDE}: gates go with routes: start with --enable-return-routed-experts")
    from sglang.srt.layers.moe.topk import TopK

    for name, block in model.named_modules():
        topk = getattr(block, "topk", None)
        if not isinstance(topk, torch.nn.Module):
            continue
        if not isinstance(topk, TopK):
            raise NotImplementedError(
                f"{OVERRIDE}: {name} routes with {type(topk).__name__}, whose gates are not known"
            )
        score = topk.topk_config.scoring_func
        if score not in SCORES:
            raise NotImplementedError(
                f"{OVERRIDE}: {name} scores experts by {score}; gates go up to 1 with {SCORES} alone"
            )
    capturer.with_gates = True
    return capturer


def capture(
    original: Callable[..., Any],
    topk_ids: Tensor,
    topk_weights: Tensor,
    topk_config: Any,
    router_logits: Tensor,
    layer_id: int,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Around _post_process_topk_ids, where experts and gates are chosen, and SGLang captures the experts: captures both."""
    from sglang.srt.layers.moe import topk
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    if not getattr(get_global_experts_capturer(), "with_gates", False):
        return original(topk_ids, topk_weights, topk_config, router_logits, layer_id, *args, **kwargs)
    gates = topk_weights
    if topk.is_routed_scaling_factor_fused_in_topk(topk_config) and topk_config.routed_scaling_factor:
        gates = gates / topk_config.routed_scaling_factor
    both = pack(topk_ids, gates)  # before the original, which may change both in place
    found = original(topk_ids, topk_weights, topk_config, router_logits, layer_id, *args, **kwargs)
    topk.capture_routed_experts_if_allowed(topk_config, layer_id, both)
    return found
