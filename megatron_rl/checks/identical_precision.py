"""Refusals of what `precision.identical` cannot keep equal to the last bit."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PreTrainedConfig

from megatron_rl.checks.refusals import Refusal
from megatron_rl.config import (
    LoRAConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    PruningConfig,
    RolloutConfig,
    RoutingConfig,
)
from megatron_rl.config.plan import expert_tensor_size
from megatron_rl.models.parallel_check import expert_count
from megatron_rl.models.precision import Machine


def identical(
    precision: PrecisionConfig,
    parallel: ParallelConfig,
    model: ModelConfig,
    lora: LoRAConfig,
    routing: RoutingConfig,
    rollout: RolloutConfig,
    pruning: PruningConfig,
    hf_config: PreTrainedConfig,
    machine: Machine,
) -> Iterator[Refusal]:
    """Refuse other operators, and other orders of sums, than the engine's."""
    sampling, server = rollout.sampling, rollout.server
    experts = expert_count(hf_config) > 0
    for wrong, problem in (
        (
            machine.gpu is not None,
            "trainer and engine share operators on the CPU alone, and this machine has a GPU; set precision.identical: false",
        ),
        (
            precision.train != precision.rollout or precision.train not in ("fp32", "bf16"),
            f"precision.train = {precision.train} and precision.rollout = {precision.rollout}: set both to fp32, or to bf16",
        ),
        (
            experts and parallel.tensor > 1 and expert_tensor_size(parallel) > 1,
            (
                "experts that are cut over ranks are summed by the dispatcher, in bf16 and in another order; set"
                " parallel.expert_tensor: 1"
            ),
        ),
        (
            experts and model.moe_dispatcher != "alltoall",
            f"model.moe_dispatcher = {model.moe_dispatcher} sums experts in an order of its own; set it to alltoall",
        ),
        (
            experts and model.moe_router_fusion,
            "model.moe_router_fusion: a fused router is not the engine's; set it to false",
        ),
        (
            lora.rank > 0,
            "lora.rank: the trainer adds an adapter's output, where the engine has it in its weights; set it to 0",
        ),
        (
            routing.source in ("pr2", "pr3"),
            (
                f"routing.source = {routing.source}: one side alone chooses experts by predictors; none is enough, as"
                " both choose the same"
            ),
        ),
        (
            routing.replay_gates or rollout.gates,
            "routing.replay_gates and rollout.gates: the trainer's gates are the engine's already; leave them out",
        ),
        (
            model.attention_sinks == "ignored",
            "model.attention_sinks = ignored: the engine does not ignore them; set it to exact",
        ),
        (
            sampling.top_k > 0 or sampling.top_p < 1,
            (
                "rollout.sampling.top_k and top_p: SGLang takes log-probs over a truncated vocabulary by an operator of its"
                " own; leave them out"
            ),
        ),
        (
            pruning.engine_rho is not None,
            "pruning.engine_rho: another safe set than the trainer's has other log-probs; leave it out",
        ),
        (
            server.tensor > 1,
            (
                f"rollout.server.tensor = {server.tensor}: SGLang sums the shares of its ranks in another order;"
                " set it to 1, and start more servers (rollout.server.count)"
            ),
        ),
    ):
        yield Refusal(precision.identical and wrong, f"precision.identical: {problem}")
