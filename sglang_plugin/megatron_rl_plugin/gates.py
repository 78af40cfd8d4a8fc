"""Returns the engine's gates together with its routes, in the same four bytes per entry, for routing.replay_gates.

A gate is the factor of an expert's output in the sum over a token's chosen experts, before routed_scaling_factor. There are
three kinds: a softmax over the chosen experts; a softmax over all experts, if the model does not renormalize; or a sigmoid
score divided by the sum of scores. A gate is between 0 and 1 and is sent as a fixed-point number.

SGLang's RoutedExpertsCapturer returns one int32 for each (token, layer, chosen expert). The low 12 bits remain the expert id,
and the other 20 bits hold the gate. A server returns gates if its model's config has `routed_expert_gates`
(--json-model-override-args).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

OVERRIDE = "routed_expert_gates"
"""Key of the model's config with which a server returns gates."""
ID_BITS = 12
"""Number of bits of an expert id."""
MOST_EXPERTS = 1 << ID_BITS
"""Largest number of experts per layer."""
STEPS = (1 << 32 - ID_BITS) - 1
"""Fixed-point value that stands for a gate of 1: 2^20 - 1. Rounding changes a gate by at most half a step, 5e-7."""
SCORES = ("softmax", "sigmoid")
"""Score functions of routers whose gates are supported."""


def pack(ids: Tensor, gates: Tensor) -> Tensor:
    """Pack expert ids [T, k] below 4096 and gates [T, k] from 0 to 1 into [T, k] int32, in two's complement."""
    steps = (gates.float() * STEPS).round().clamp(0, STEPS).to(torch.int64)
    return (ids.to(torch.int64) | steps << ID_BITS).to(torch.int32)


def of_capturer(capturer: Any, *, model: torch.nn.Module, model_config: Any, **_: Any) -> Any:
    """Switch gates on if the model's config asks for them (hook after RoutedExpertsCapturer.create, when a server starts).

    Errors: NotImplementedError if the model or the server cannot return gates.
    """
    if not getattr(model_config.hf_config, OVERRIDE, False):
        return capturer
    if capturer is None:
        raise NotImplementedError(
            f"{OVERRIDE}: gates are returned with routes; start the server with --enable-return-routed-experts"
        )
    from sglang.srt.layers.moe.topk import TopK

    for name, block in model.named_modules():
        topk = getattr(block, "topk", None)
        if not isinstance(topk, torch.nn.Module):
            continue
        if not isinstance(topk, TopK):
            raise NotImplementedError(
                f"{OVERRIDE}: {name} routes with {type(topk).__name__}, whose gates are not supported"
            )
        score = topk.topk_config.scoring_func
        if score not in SCORES:
            raise NotImplementedError(
                f"{OVERRIDE}: {name} scores experts by {score}; only gates of {SCORES} are at most 1"
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
    """Record experts and gates (hook around _post_process_topk_ids, in which SGLang records only the experts)."""
    from sglang.srt.layers.moe import topk
    from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer

    if not getattr(get_global_experts_capturer(), "with_gates", False):
        return original(topk_ids, topk_weights, topk_config, router_logits, layer_id, *args, **kwargs)
    gates = topk_weights
    if topk.is_routed_scaling_factor_fused_in_topk(topk_config) and topk_config.routed_scaling_factor:
        gates = gates / topk_config.routed_scaling_factor
    both = pack(topk_ids, gates)  # first, because the original may change both in place
    found = original(topk_ids, topk_weights, topk_config, router_logits, layer_id, *args, **kwargs)
    topk.capture_routed_experts_if_allowed(topk_config, layer_id, both)
    return found
