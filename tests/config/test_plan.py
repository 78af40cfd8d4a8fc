"""Derived sizes, and the errors of sizes that do not divide."""

from __future__ import annotations

import pytest

from megatron_rl.config import Config
from megatron_rl.config.conditions import Kind
from megatron_rl.config.load import build_config
from megatron_rl.config.plan import make_plan, share_of, total_updates
from megatron_rl.errors import UserError


def plan(world_size: int, batch: dict | None = None, parallel: dict | None = None):
    config = build_config({"batch": batch or {}, "parallel": parallel or {}})
    return make_plan(config.batch, config.parallel, world_size)


def test_sizes():
    p = plan(16, {"prompts_per_step": 32, "samples_per_prompt": 8, "updates_per_step": 4}, {"tensor": 2, "context": 2})
    assert (p.data_parallel, p.model_parallel, p.trajectories_per_leader) == (4, 4, 64)
    assert (p.trajectories_per_step, p.trajectories_per_update) == (256, 64)


def updates_of(config: Config, kind: Kind) -> int:
    return total_updates(config.steps, config.batch, config.algorithm.advantage, config.critic, kind)


def test_updates_of_a_run():
    """Updates behind the critic's warm-up, of all epochs; learning from data has one a step."""
    batch = {"updates_per_step": 2, "epochs": 3}
    values = {"steps": 7, "batch": batch, "critic": {"warmup_steps": 2}}
    assert updates_of(build_config(values), "train") == 42  # no critic: nothing to warm up
    ppo = build_config({**values, "algorithm": {"advantage": "gae"}})
    assert updates_of(ppo, "train") == 30
    assert [updates_of(ppo, kind) for kind in ("sft", "reward", "dpo")] == [7, 7, 7]


def test_the_table_speaks_of_what_the_command_does():
    p = plan(2, {"prompts_per_step": 8, "samples_per_prompt": 4, "updates_per_step": 2})
    processes, trajectories, updates = p.lines("train")
    assert processes.endswith("2 = 2 data-parallel x 1 per model") and updates.endswith(" 2")
    assert trajectories.endswith("32 per step (16 per leader), 16 per update")
    p = plan(2, {"prompts_per_step": 8, "samples_per_prompt": 4, "updates_per_step": 2, "epochs": 3})
    assert p.lines("train")[1:] == [trajectories, "updates per step     2 x 3 epochs"]
    for epochs, ending in ((1, " 1 (on-policy)"), (2, " 1 x 2 epochs")):
        assert plan(2, {"epochs": epochs}).lines("train")[2].endswith(ending)
    alone = plan(2, {"prompts_per_step": 8, "samples_per_prompt": 1})
    assert alone.lines("sft") == [processes, "demonstrations       8 per step, in one update"]
    assert alone.lines("sample") == [processes]


@pytest.mark.parametrize(
    ("world_size", "batch", "parallel", "fragments"),
    [
        (6, {}, {"tensor": 4}, ["4 does not divide the 6 processes", "--nproc"]),
        (4, {}, {"expert": 3}, ["parallel.expert", "3 does not divide"]),
        (
            8,
            {"prompts_per_step": 5, "samples_per_prompt": 3, "updates_per_step": 3},
            {},
            ["batch.prompts_per_step", "5 trajectories", "8 data-parallel ranks", "prompts_per_step to 8"],
        ),
        (1, {"prompts_per_step": 4, "samples_per_prompt": 2, "updates_per_step": 3}, {}, ["updates_per_step = 3", "2"]),
    ],
)
def test_sizes_that_do_not_divide(world_size, batch, parallel, fragments):
    with pytest.raises(UserError) as error:
        plan(world_size, batch, parallel)
    for fragment in fragments:
        assert fragment in str(error.value)


@pytest.mark.parametrize(("world_size", "prompts"), [(4, 30), (16, 3), (32, 2)])
def test_leaders_and_prompts_need_not_divide(world_size, prompts):
    """More leaders than prompts too: they share out the samples."""
    p = plan(world_size, {"prompts_per_step": prompts, "samples_per_prompt": 16, "updates_per_step": 1})
    shares = [share_of(p.trajectories_per_step, rank, p.data_parallel) for rank in range(p.data_parallel)]
    assert [r for share in shares for r in share] == list(range(16 * prompts))
    sizes = {len(share) for share in shares}
    assert min(sizes) == p.trajectories_per_leader >= 1 and max(sizes) - min(sizes) <= 1
