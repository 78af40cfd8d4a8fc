"""What each rank does in test_scorers.py: reward models score trajectories by passes under one parallel layout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from layouts import make_config
from ranks import end_layout

from megatron_rl.data.trajectory import Trajectory
from megatron_rl.environments import Prompt
from megatron_rl.launch.plan import share_of
from megatron_rl.rollout.later_rewards import LaterRewards
from megatron_rl.rollout.sampling import SamplingSupport
from megatron_rl.trainer import parallel
from megatron_rl.trainer.trainer import build_trainer

COUNT, LONGEST = 9, 30


def make_trajectories(seed: int) -> list[Trajectory]:
    """Some with tokens of tools, one that is masked, one that a limit has ended."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(COUNT):
        prompt, response = int(rng.integers(1, 15)), int(rng.integers(3, LONGEST))
        mask = np.ones(response, bool)
        mask[int(rng.integers(0, response - 1)) :][:2] = number % 2 == 0
        mask[0] = True
        found.append(
            Trajectory(
                prompt_id=str(number),
                group_id=number,
                tokens=rng.integers(4, 64, prompt + response).astype(np.int32),
                prompt_length=prompt,
                fields={"loss_mask": mask},
                finish_reason="turns" if number == 4 else "stop",
                masked=number == 2,
                reward_parts={"liked": 0.0},
            )
        )
    return found


def score(model: str, classifier: str, seed: int, layouts: list[dict[str, Any]]) -> list[dict[str, float]]:
    """The rewards of all trajectories by their ids, layout by layout; scores are normalized, as in a step of training."""
    results = []
    for layout in layouts:
        models = {"liked": {"path": classifier, "normalize": True}}
        config = make_config(model, {"rewards": {"models": models}} | layout)
        ranks = parallel.initialize(config.parallel, config.seed)
        task: Any = SimpleNamespace(weights={"liked": 2.0})
        rewards = LaterRewards(config.rewards, ranks, task, max_new_tokens=LONGEST, zero_truncated=True)
        rewards.build(
            lambda folder, layout=layout, ranks=ranks: build_trainer(
                make_config(folder, layout), ranks, total_updates=None, support=SamplingSupport(), value_head=True
            )
        )
        share = share_of(COUNT, ranks.data_rank, ranks.data_size) if ranks.is_leader else range(0)
        mine = [t for t in make_trajectories(seed) if t.group_id in share]
        rewards.score(mine, [Prompt("p", "")] * COUNT, learns=True)
        found = ranks.gather({t.prompt_id: t.reward for t in mine})
        results.append({number: reward for part in found for number, reward in part.items()})
        end_layout()
    return results
