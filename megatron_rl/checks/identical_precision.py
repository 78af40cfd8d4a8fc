"""Rules that refuse settings with which `precision.identical` cannot keep results equal to the last bit."""

from __future__ import annotations

from collections.abc import Callable

from megatron_rl.checks.refusals import Rule
from megatron_rl.config import PREDICTING
from megatron_rl.config.plan import expert_tensor_size
from megatron_rl.models.families import expert_count


def _unequal(when: Callable[..., object], problem: str) -> Rule:
    return Rule(when, f"precision.identical: {problem}", also=lambda precision: precision.identical)


IDENTICAL = (
    _unequal(
        lambda machine: machine.gpu is not None,
        "SGLang and trainer share operators only on the CPU, and this machine has a GPU; set precision.identical:"
        " false",
    ),
    _unequal(
        lambda precision: precision.train != precision.rollout or precision.train not in ("fp32", "bf16"),
        "precision.train = {precision.train} and precision.rollout = {precision.rollout}: set both to fp32, or to bf16",
    ),
    _unequal(
        lambda hf_config, parallel: (
            expert_count(hf_config) and parallel.tensor > 1 and expert_tensor_size(parallel) > 1
        ),
        "the dispatcher sums experts that are split over ranks in bf16 and in another order; set"
        " parallel.expert_tensor: 1",
    ),
    _unequal(
        lambda hf_config, model: expert_count(hf_config) and model.moe_dispatcher != "alltoall",
        "model.moe_dispatcher = {model.moe_dispatcher} sums experts in a different order; set it to alltoall",
    ),
    _unequal(
        lambda hf_config, model: expert_count(hf_config) and model.moe_router_fusion,
        "model.moe_router_fusion: SGLang does not use this fused router; set it to false",
    ),
    _unequal(
        lambda lora: lora.rank,
        "lora.rank: the trainer adds the adapter's output, but SGLang merges the adapter into its weights; set"
        " lora.rank: 0",
    ),
    _unequal(
        lambda routing: routing.source in PREDICTING,
        "routing.source = {routing.source}: only one side would choose experts with predictors; set it to none,"
        " because both sides choose the same experts anyway",
    ),
    _unequal(
        lambda routing, rollout: routing.replay_gates or rollout.gates,
        "routing.replay_gates and rollout.gates: both sides have the same gates already; leave the keys out",
    ),
    _unequal(
        lambda model: model.attention_sinks == "ignored",
        "model.attention_sinks = ignored: SGLang does not ignore them; set it to exact",
    ),
    _unequal(
        lambda rollout: rollout.sampling.top_k > 0 or rollout.sampling.top_p < 1,
        "rollout.sampling.top_k and top_p: SGLang computes log-probs over a truncated vocabulary with another"
        " operator; leave them out",
    ),
    _unequal(
        lambda pruning: pruning.engine_rho is not None,
        "pruning.engine_rho: log-probs differ if SGLang's safe set differs from the trainer's; leave it out",
    ),
    _unequal(
        lambda rollout: rollout.server.tensor > 1,
        "rollout.server.tensor = {rollout.server.tensor}: SGLang sums over its ranks in another order; set it to 1,"
        " and start more servers (rollout.server.count)",
    ),
)
