"""Rules of what `precision.identical` cannot keep equal to the last bit."""

from __future__ import annotations

from collections.abc import Callable

from megatron_rl.checks.refusals import Rule
from megatron_rl.config import PREDICTING
from megatron_rl.config.plan import expert_tensor_size
from megatron_rl.models.parallel_check import expert_count


def _unequal(when: Callable[..., object], problem: str) -> Rule:
    return Rule(when, f"precision.identical: {problem}", also=lambda precision: precision.identical)


IDENTICAL = (
    _unequal(
        lambda machine: machine.gpu is not None,
        "trainer and engine share operators on the CPU alone, and this machine has a GPU; set precision.identical: false",
    ),
    _unequal(
        lambda precision: precision.train != precision.rollout or precision.train not in ("fp32", "bf16"),
        "precision.train = {precision.train} and precision.rollout = {precision.rollout}: set both to fp32, or to bf16",
    ),
    _unequal(
        lambda hf_config, parallel: (
            expert_count(hf_config) and parallel.tensor > 1 and expert_tensor_size(parallel) > 1
        ),
        "experts that are cut over ranks are summed by the dispatcher, in bf16 and in another order; set"
        " parallel.expert_tensor: 1",
    ),
    _unequal(
        lambda hf_config, model: expert_count(hf_config) and model.moe_dispatcher != "alltoall",
        "model.moe_dispatcher = {model.moe_dispatcher} sums experts in an order of its own; set it to alltoall",
    ),
    _unequal(
        lambda hf_config, model: expert_count(hf_config) and model.moe_router_fusion,
        "model.moe_router_fusion: a fused router is not the engine's; set it to false",
    ),
    _unequal(
        lambda lora: lora.rank,
        "lora.rank: the trainer adds an adapter's output, where the engine has it in its weights; set it to 0",
    ),
    _unequal(
        lambda routing: routing.source in PREDICTING,
        "routing.source = {routing.source}: one side alone chooses experts by predictors; none is enough, as both"
        " choose the same",
    ),
    _unequal(
        lambda routing, rollout: routing.replay_gates or rollout.gates,
        "routing.replay_gates and rollout.gates: the trainer's gates are the engine's already; leave them out",
    ),
    _unequal(
        lambda model: model.attention_sinks == "ignored",
        "model.attention_sinks = ignored: the engine does not ignore them; set it to exact",
    ),
    _unequal(
        lambda rollout: rollout.sampling.top_k > 0 or rollout.sampling.top_p < 1,
        "rollout.sampling.top_k and top_p: SGLang takes log-probs over a truncated vocabulary by an operator of its own;"
        " leave them out",
    ),
    _unequal(
        lambda pruning: pruning.engine_rho is not None,
        "pruning.engine_rho: another safe set than the trainer's has other log-probs; leave it out",
    ),
    _unequal(
        lambda rollout: rollout.server.tensor > 1,
        "rollout.server.tensor = {rollout.server.tensor}: SGLang sums the shares of its ranks in another order; set it to"
        " 1, and start more servers (rollout.server.count)",
    ),
)
