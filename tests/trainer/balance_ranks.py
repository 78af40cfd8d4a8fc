"""What each rank does in the balance tests: sample's share, advantages over leaders, exchange, updates."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import torch
from ranks import end_layout

from megatron_rl.config import ParallelConfig
from megatron_rl.config.plan import share_of
from megatron_rl.data.balance import plan_updates, redistribute
from megatron_rl.data.sequence import FIELDS, Field, RouterFeatures
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.distributed import parallel
from megatron_rl.rewards.shaping import set_outcome_rewards
from megatron_rl.run.run import Run
from megatron_rl.trainer.compute_advantages import Advantages
from tests.trainer import layouts

logging.getLogger("megatron").setLevel(logging.ERROR)
UPDATES = 2


def make_trajectories(seed: int, prompts: int, samples: int, vocab: int) -> list[Trajectory]:
    """A step's, of very unequal lengths, with rewards, routes and features that say whose they are."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(prompts * samples):
        prompt, response = int(rng.integers(1, 6)), int(min(80, rng.lognormal(2, 1.2)) + 3)
        found.append(
            Trajectory(
                prompt_id=str(number // samples),
                group_id=number // samples,
                tokens=rng.integers(4, vocab, prompt + response).astype(np.int32),
                prompt_length=prompt,
                fields={
                    "rollout_log_probs": rng.normal(-3, 1, response).astype(np.float32),
                    "loss_mask": rng.random(response) < 0.9,
                },
                reward=float(rng.integers(0, 5)),
                routes=np.full((prompt + response - 1, 2, 2), number, np.uint8),
                features=RouterFeatures(torch.tensor([0]), torch.full((1, 2, 3), number), torch.zeros(1, 2, 8)),
                kept=[np.asarray([number], np.int32)] * response,
            )
        )
    return found


def share_with_advantages(ranks: parallel.Ranks, trajectories: list[Trajectory], config) -> list[Trajectory]:
    """As `train` has them after a collection: on leaders alone."""
    share = share_of(len(trajectories), ranks.data_rank, ranks.data_size)
    mine = [trajectories[i] for i in share] if ranks.is_leader else []
    said = {"process": config.process_rewards, "bootstraps": config.bootstraps_truncated}
    set_outcome_rewards(config.rewards, config.data.rewards, ranks, mine, **said)
    Advantages(config, SimpleNamespace(ranks=ranks), None).compute_group_advantages(mine)
    return mine


def exchanges(trajectories: list[Trajectory], tensor: int, config) -> list[list[tuple]]:
    """What this rank trains on, by update: (number, advantage, tokens, digest of what travels besides fields)."""
    ranks = parallel.initialize(ParallelConfig(tensor=tensor), 0)
    FIELDS["number"] = Field(np.int32)  # one that nobody here knows of
    for number, trajectory in enumerate(trajectories):
        trajectory["number"] = number
    updates = redistribute(share_with_advantages(ranks, trajectories, config), UPDATES, ranks)
    found = [
        [
            (
                int(s.routes[0, 0, 0]),
                float(s["advantages"][0]),
                s.inputs,
                int(s.features.hidden[0, 0, 0]),
                int(s.kept[0][0]),
            )
            for s in one
        ]
        for one in updates
    ]
    for s in (s for one in updates for s in one):
        sampled = trajectories[int(s.routes[0, 0, 0])]
        assert len(s.routes) == s.inputs == len(sampled.tokens) - 1
        assert (s["advantages"] == s["advantages"][0]).all() and s.fields.keys() == {*sampled.fields, "advantages"}
        assert all(np.array_equal(s[name], values) for name, values in sampled.fields.items() if name != "advantages")
    ranks.barrier()
    return found


def trains(model: str, trajectories: list[Trajectory], overrides: dict) -> dict[str, dict]:
    """Weights after the updates of a step: balanced, and of the same updates as they were sampled."""
    weights = {}
    for how in ("balanced", "sampled"):
        config = layouts.make_config(model, overrides)
        trainer = layouts.make_trainer(config)
        ranks = trainer.ranks
        for t in trajectories:
            t.routes = t.features = t.kept = None
        mine = share_with_advantages(ranks, trajectories, config)
        if how == "balanced":
            updates = redistribute(mine, UPDATES, ranks)
        else:
            everyones = [s for part in ranks.gather_from_leaders(mine) for s in part]
            cuts = plan_updates([1] * len(everyones), UPDATES, 1)
            updates = [
                [everyones[indices[i]] for i in share_of(len(indices), ranks.data_rank, ranks.data_size)]
                for [indices] in cuts
            ]
        packed = [trainer.pack(one) for one in updates]
        tokens = []
        for batches in packed:
            layouts.score(trainer, batches)
            tokens.append(ranks.gather(sum(int((b.segments.ids >= 0).sum()) for b in batches)))
        for batches in packed:
            assert layouts.update(trainer, batches)["update/grad_norm"] > 0
        weights[how] = {
            "tokens": tokens,
            "weights": {name: t.float().numpy().copy() for name, t in trainer.export_weights()},
        }
        end_layout()
    return weights


def gathers_groups(trajectories: list[Trajectory]) -> list[list[float]]:
    """Rewards by prompt of trajectories that several leaders have."""
    ranks = parallel.initialize(ParallelConfig(), 0)
    mine = [trajectories[i] for i in share_of(len(trajectories), ranks.data_rank, ranks.data_size)]
    run = Run.__new__(Run)
    run.ranks = ranks
    return run.gather_groups(mine, lambda t: t.reward)
