"""Derived sizes, and the errors of sizes that do not divide."""

from __future__ import annotations

import pytest

from megatron_rl.config import build_config
from megatron_rl.errors import UserError
from megatron_rl.plan import make_plan


def plan(world_size: int, batch: dict | None = None, parallel: dict | None = None):
    config = build_config({"batch": batch or {}, "parallel": parallel or {}})
    return make_plan(config.batch, config.parallel, world_size)


def test_sizes():
    p = plan(16, {"prompts_per_step": 32, "samples_per_prompt": 8, "updates_per_step": 4}, {"tensor": 2, "context": 2})
    assert (p.data_parallel, p.model_parallel, p.prompts_per_leader) == (4, 4, 8)
    assert (p.trajectories_per_step, p.trajectories_per_update) == (256, 64)


@pytest.mark.parametrize(
    ("world_size", "batch", "parallel", "fragments"),
    [
        (6, {}, {"tensor": 4}, ["4 does not divide the 6 processes", "--nproc"]),
        (4, {}, {"expert": 3}, ["parallel.expert", "3 does not divide"]),
        (4, {"prompts_per_step": 30}, {}, ["batch.prompts_per_step = 30", "the nearest that can is 32"]),
        (1, {"prompts_per_step": 4, "samples_per_prompt": 2, "updates_per_step": 3}, {}, ["updates_per_step = 3", "2"]),
    ],
)
def test_sizes_that_do_not_divide(world_size, batch, parallel, fragments):
    with pytest.raises(UserError) as error:
        plan(world_size, batch, parallel)
    for fragment in fragments:
        assert fragment in str(error.value)
