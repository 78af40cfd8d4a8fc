"""What follows from a config on a given number of processes: data-parallel size, shares, batches. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config import BatchConfig, ParallelConfig
from megatron_rl.errors import UserError


@dataclass(frozen=True)
class Plan:
    """Sizes of a run; every one is derived from `batch`, `parallel` and the number of processes."""

    world_size: int
    data_parallel: int
    model_parallel: int
    """Processes that hold one copy of the model: tensor x pipeline x context."""
    prompts_per_leader: int
    """Prompts that each data-parallel leader asks for in one step."""
    trajectories_per_step: int
    trajectories_per_update: int
    """Over all ranks."""
    updates_per_step: int

    def lines(self) -> list[str]:
        """The table printed at the start of a run."""
        return [
            f"processes            {self.world_size} = {self.data_parallel} data-parallel x {self.model_parallel} per model",
            f"prompts per step     {self.prompts_per_leader * self.data_parallel} ({self.prompts_per_leader} per leader)",
            f"trajectories         {self.trajectories_per_step} per step, {self.trajectories_per_update} per update",
            f"updates per step     {self.updates_per_step}{' (on-policy)' if self.updates_per_step == 1 else ''}",
        ]


def make_plan(batch: BatchConfig, parallel: ParallelConfig, world_size: int) -> Plan:
    """Derive the sizes. Errors: UserError naming the key whose size does not divide, with the nearest that does."""
    model_parallel = parallel.tensor * parallel.pipeline * parallel.context
    if world_size % model_parallel:
        raise UserError(
            f"config: parallel.tensor x pipeline x context = {model_parallel} does not divide the {world_size} processes;"
            f" start a multiple of {model_parallel} (--nproc)"
        )
    expert_parallel = parallel.expert * (parallel.expert_tensor or 1) * parallel.pipeline
    if world_size % expert_parallel:
        raise UserError(
            f"config: parallel.expert x expert_tensor x pipeline = {expert_parallel} does not divide the {world_size} processes"
        )
    data_parallel = world_size // model_parallel
    if batch.prompts_per_step % data_parallel:
        near = max(1, round(batch.prompts_per_step / data_parallel)) * data_parallel
        raise UserError(
            f"config: batch.prompts_per_step = {batch.prompts_per_step} cannot be shared by {data_parallel} data-parallel"
            f" leaders; the nearest that can is {near}"
        )
    trajectories = batch.prompts_per_step * batch.samples_per_prompt
    per_leader = trajectories // data_parallel
    if per_leader % batch.updates_per_step:
        divisors = [n for n in range(1, per_leader + 1) if per_leader % n == 0]
        near = min(divisors, key=lambda n: abs(n - batch.updates_per_step))
        raise UserError(
            f"config: batch.updates_per_step = {batch.updates_per_step} does not divide a leader's {per_leader} trajectories;"
            f" the nearest that does is {near}"
        )
    return Plan(
        world_size=world_size,
        data_parallel=data_parallel,
        model_parallel=model_parallel,
        prompts_per_leader=batch.prompts_per_step // data_parallel,
        trajectories_per_step=trajectories,
        trajectories_per_update=trajectories // batch.updates_per_step,
        updates_per_step=batch.updates_per_step,
    )
