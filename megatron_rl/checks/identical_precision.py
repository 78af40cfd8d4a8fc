"""Refusals of what `precision.identical` cannot keep equal to the last bit."""

from __future__ import annotations

from transformers import PreTrainedConfig

from megatron_rl.config import Config
from megatron_rl.config.plan import expert_tensor_size
from megatron_rl.errors import UserError
from megatron_rl.models.families import expert_count
from megatron_rl.models.precision import Machine


def check_identical(config: Config, hf_config: PreTrainedConfig, machine: Machine) -> None:
    """Errors: UserError naming the key and what to set it to."""
    if not config.precision.identical:
        return
    precision, parallel, model, sampling = config.precision, config.parallel, config.model, config.rollout.sampling
    experts = expert_count(hf_config) > 0
    problems = (
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
            config.lora.rank > 0,
            "lora.rank: the trainer adds an adapter's output, where the engine has it in its weights; set it to 0",
        ),
        (
            config.routing.source in ("pr2", "pr3"),
            (
                f"routing.source = {config.routing.source}: one side alone chooses experts by predictors; none is enough, as"
                " both choose the same"
            ),
        ),
        (
            config.routing.replay_gates or config.rollout.gates,
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
            config.pruning.engine_rho is not None,
            "pruning.engine_rho: another safe set than the trainer's has other log-probs; leave it out",
        ),
        (
            config.rollout.server.tensor > 1,
            (
                f"rollout.server.tensor = {config.rollout.server.tensor}: SGLang sums the shares of its ranks in another order;"
                " set it to 1, and start more servers (rollout.server.count)"
            ),
        ),
    )
    for wrong, problem in problems:
        if wrong:
            raise UserError(f"config: precision.identical: {problem}")
