"""Sizes derived from a config and a number of processes: data-parallel size, shares of ranks, batches. Pure arithmetic."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from megatron_rl.config import BatchConfig, Config, CriticConfig, DPOConfig, ParallelConfig, VP2OConfig
from megatron_rl.config.conditions import Kind as Kind
from megatron_rl.errors import UserError

WITHOUT_GROUPS = ("gae", "reinforce_plus_plus")
"""Advantages (algorithm.advantage) that do not compare a response with other responses to its prompt."""
OFFLINE = ("sft", "reward", "dpo", "prune", "score", "quantize")
"""Kinds of runs that need only data, no SGLang server."""
READ_ONLY = ("prune", "score", "quantize", "sample")
"""Kinds of runs that train nothing and leave a run's checkpoints unchanged."""


def reference_of(path: str, dpo: DPOConfig, policy_reference: str | None, kind: Kind) -> str | None:
    """Return the folder of the reference model that a run of this kind loads at its start; None if it loads none.

    path: folder of the run's own model. policy_reference: see `Config.policy_reference`.
    """
    if kind == "dpo" and not dpo.precompute_reference:
        return dpo.reference or path
    return policy_reference if kind == "train" else None


def critic_config(config: Config) -> Config:
    """Return the config of the critic's own trainer, without settings that only a policy has."""
    critic = config.critic
    model = replace(
        config.model,
        path=critic.path or config.model.path,
        freeze=critic.freeze,
        moe_aux_loss=0.0,
        moe_z_loss=0.0,
        moe_bias_update_rate=0.0,
    )
    start = None if model.path != config.model.path else config.lora.path  # adapters fit only the policy's model
    lora = replace(config.lora, path=start)
    return replace(config, model=model, optimizer=critic.optimizer, vp2o=VP2OConfig(), lora=lora)


@dataclass(frozen=True)
class Plan:
    """Sizes of a run, all derived from `batch`, `parallel` and the number of processes."""

    world_size: int
    data_parallel: int
    model_parallel: int
    """Number of processes that hold one copy of the model: tensor x pipeline x context."""
    trajectories_per_leader: int
    """Number of responses that the leader of a data-parallel rank requests in one step, rounded down. Some leaders request one
    more."""
    trajectories_per_step: int
    trajectories_per_update: int
    """Number of trajectories of one update, over all ranks."""
    updates_per_step: int
    """Number of updates of one epoch."""
    epochs: int = 1

    def lines(self, kind: Kind) -> list[str]:
        """Return the table that a run of this kind prints at its start."""
        processes = f"{self.world_size} = {self.data_parallel} data-parallel x {self.model_parallel} per model"
        if kind != "train":
            what = {"sft": "demonstrations", "reward": "comparisons", "dpo": "comparisons"}.get(kind)
            rows = [f"{what:<20} {self.trajectories_per_step} per step, in one update"] if what else []
            return [f"processes            {processes}", *rows]
        trajectories = f"{self.trajectories_per_step} per step ({self.trajectories_per_leader} per leader)"
        updates = f"{self.updates_per_step}{f' x {self.epochs} epochs' if self.epochs > 1 else ''}"
        on_policy = " (on-policy)" if self.updates_per_step * self.epochs == 1 else ""
        return [
            f"processes            {processes}",
            f"trajectories         {trajectories}, {self.trajectories_per_update} per update",
            f"updates per step     {updates}{on_policy}",
        ]


def pipeline_bubble(stages: int, micro_batches: int, virtual: int = 1) -> float:
    """Return the share of time that a pipeline stage is idle in the passes of an update: (p - 1) / (m v + p - 1).

    p: number of stages; m: micro-batches of an update on a data-parallel rank; v: virtual stages per stage (Narayanan
    et al. 2021, arXiv 2104.04473, section 2.2, which gives the idle time relative to the busy time: (p - 1) / (m v)).
    The passes are the forward and backward passes. All stages are assumed to take equally long. Interleaved schedules
    (v > 1) process micro-batches in rounds of p. Empty micro-batches that fill up the last round count as work. A
    scoring pass (forward only) has the same idle share.
    """
    filled = -(-micro_batches // stages) * stages if virtual > 1 else micro_batches
    return (stages - 1) / (filled * virtual + stages - 1)


def total_updates(steps: int, batch: BatchConfig, advantage: str, critic: CriticConfig, kind: Kind) -> int:
    """Return the number of updates of the model in a run. Steps that train only the critic are not counted.

    The learning rate schedule counts these updates.
    """
    if kind != "train":
        return steps
    alone = critic.warmup_steps if advantage == "gae" else 0
    return (steps - alone) * batch.updates


def check_group(batch: BatchConfig, advantage: str) -> None:
    """Check that RL has a group of responses to compare. Errors: UserError if it has none."""
    if batch.samples_per_prompt < 2 and advantage not in WITHOUT_GROUPS:
        raise UserError(
            "config: batch.samples_per_prompt = 1 leaves no other response to compare with, so every advantage would"
            f" be 0; use 2 or more, or algorithm.advantage: {' or '.join(WITHOUT_GROUPS)}"
        )


def make_plan(batch: BatchConfig, parallel: ParallelConfig, world_size: int) -> Plan:
    """Derive the sizes of a run.

    Errors: UserError that names the key whose size does not divide, and the nearest size that does.
    """
    model_parallel = parallel.tensor * parallel.pipeline * parallel.context
    if world_size % model_parallel:
        raise UserError(
            f"config: parallel.tensor x pipeline x context = {model_parallel} does not divide the {world_size}"
            f" processes; start a multiple of {model_parallel} processes (--nproc)"
        )
    expert_parallel = parallel.expert * (parallel.expert_tensor or 1) * parallel.pipeline
    if world_size % expert_parallel:
        raise UserError(
            f"config: parallel.expert x expert_tensor x pipeline = {expert_parallel} does not divide the {world_size} processes"
        )
    data_parallel = world_size // model_parallel
    trajectories = batch.responses
    if trajectories % batch.updates_per_step:
        divisors = [n for n in range(1, trajectories + 1) if trajectories % n == 0]
        near = min(divisors, key=lambda n: abs(n - batch.updates_per_step))
        raise UserError(
            f"config: batch.updates_per_step = {batch.updates_per_step} does not divide the {trajectories} trajectories of a"
            f" step (batch.prompts_per_step x samples_per_prompt); the nearest that does is {near}"
        )
    per_update = trajectories // batch.updates_per_step
    if per_update < data_parallel:
        step = batch.updates_per_step // math.gcd(batch.updates_per_step, batch.samples_per_prompt)
        needed = -(-data_parallel * batch.updates_per_step // (batch.samples_per_prompt * step)) * step
        raise UserError(
            f"config: an update of {per_update} trajectories (batch.prompts_per_step x samples_per_prompt /"
            f" updates_per_step) leaves some of the {data_parallel} data-parallel ranks without a trajectory; raise"
            f" batch.prompts_per_step to {needed}"
        )
    return Plan(
        world_size=world_size,
        data_parallel=data_parallel,
        model_parallel=model_parallel,
        trajectories_per_leader=trajectories // data_parallel,
        trajectories_per_step=trajectories,
        trajectories_per_update=per_update,
        updates_per_step=batch.updates_per_step,
        epochs=batch.epochs,
    )


def share_of(total: int, rank: int, size: int) -> range:
    """Return one rank's share of `total` ordered items, a contiguous range. The shares of ranks differ by at most one item."""
    return range(rank * total // size, (rank + 1) * total // size)


def expert_tensor_size(parallel: ParallelConfig) -> int:
    """Return the tensor-parallel size inside an expert.

    This is the configured size. Without one, it is the model's size if there is no expert parallelism, else 1.
    """
    if parallel.expert_tensor is not None:
        return parallel.expert_tensor
    return parallel.tensor if parallel.expert == 1 else 1


def ratio_from_old(config: Config) -> bool:
    """Return True if the denominator of the policy's ratio is the stored log-probs.

    Else the denominator is the policy's own log-probs (one update per step: the ratio is 1), or the engine's (bypass).
    """
    return config.batch.updates > 1 and not config.correction.bypass


def policy_needs(config: Config) -> frozenset[str]:
    """Return the names of the fields (`data.sequence.FIELDS`) that are computed before the updates of a policy."""
    algorithm, teacher = config.algorithm, config.distillation
    of_tokens = algorithm.entropy_reward > 0 or (algorithm.kl.coefficient > 0 and algorithm.kl.placement == "reward")
    pays = teacher.placement == "advantage"
    wanted = {
        "old_log_probs": ratio_from_old(config) or of_tokens or (config.teaches and pays),
        "reference_log_probs": algorithm.kl.coefficient > 0,
        "teacher_log_probs": teacher.teacher is not None and pays,  # a teacher on a server gave them before
        "teacher_hidden": teacher.teacher is not None and teacher.placement == "loss",
    }
    return frozenset(name for name, needed in wanted.items() if needed)
