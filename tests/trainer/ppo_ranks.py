"""What each rank does in test_ppo_parity.py: steps of PPO and its kin on the same trajectories under one parallel layout."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from layouts import make_config, make_trainer, reduce_whole, whole_gradients
from ranks import end_layout

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.config import AlgorithmConfig, Config, KLConfig, RewardsConfig
from megatron_rl.config.plan import critic_config, share_of
from megatron_rl.data.balance import redistribute
from megatron_rl.data.packing import Labels
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.errors import UserError
from megatron_rl.metrics.reduce import figures, merge, over_ranks
from megatron_rl.rewards.shaping import set_outcome_rewards
from megatron_rl.trainer.compute_advantages import Advantages
from megatron_rl.trainer.critic import Critic, StateValues, everywhere
from megatron_rl.trainer.hooks import UpdateContext
from megatron_rl.trainer.kl_control import KLControl
from megatron_rl.trainer.objective import Policy
from megatron_rl.trainer.trainer import Trainer, build_trainer

PROMPTS, SAMPLES, UPDATES = 4, 4, 2
IN_REWARD = KLConfig(coefficient=0.1, placement="reward")
WHOLE = {
    "grpo": AlgorithmConfig(kl=IN_REWARD),
    "rloo, whitened": AlgorithmConfig(advantage="rloo", whiten=True, entropy_reward=0.02),
    "tilt": AlgorithmConfig(advantage="tilt", tilt_temperature=0.7, kl=IN_REWARD),
    "plain": AlgorithmConfig(advantage="dr_grpo"),
    "grpo, clipped": AlgorithmConfig(advantage_clip=0.8),
}
"""Advantages of whole responses, whose sequences are one each."""
OF_TOKENS = {
    "gae": AlgorithmConfig(advantage="gae", gamma=0.97, lam=0.9, whiten=False),
    "gae, scored where it was cut off": AlgorithmConfig(advantage="gae", lam=0.7, bootstrap_truncated=False),
    "gae, clipped": AlgorithmConfig(advantage="gae", lam=0.8, advantage_clip=0.6),
    "gae, whitened": AlgorithmConfig(advantage="gae", lam=0.5, kl=IN_REWARD, entropy_reward=0.05),
    "reinforce_plus_plus": AlgorithmConfig(advantage="reinforce_plus_plus", gamma=0.9, kl=IN_REWARD),
    "baseline": AlgorithmConfig(advantage="reinforce_plus_plus_baseline", entropy_reward=0.03),
    "baseline, not whitened": AlgorithmConfig(advantage="reinforce_plus_plus_baseline", whiten=False),
}
OF_STEPS = {
    "gae": AlgorithmConfig(advantage="gae", gamma=0.95, lam=0.8),
    "reinforce_plus_plus": AlgorithmConfig(advantage="reinforce_plus_plus", gamma=0.9, kl=IN_REWARD),
    "grpo": AlgorithmConfig(kl=IN_REWARD, whiten=True),
    "dr_grpo": AlgorithmConfig(advantage="dr_grpo"),
}
"""With rewards at the ends of steps, as the cases of gae and of grpo have too."""
PROCESS = {
    "data": {"rewards": {"prm": 0.7}},
    "rewards": {"models": {"prm": {"path": "nowhere", "steps": True}}},  # what it says is made up
}
CASES: dict[str, dict[str, Any]] = {
    "gae": {
        **PROCESS,
        "algorithm": {
            "advantage": "gae",
            "gamma": 0.98,
            "lam": 0.9,
            "kl": {"coefficient": 0.1, "placement": "reward", "target": 0.01, "horizon": 160},
        },
    },
    "reinforce_plus_plus_baseline": {
        "algorithm": {"advantage": "reinforce_plus_plus_baseline", "entropy_reward": 0.05},
    },
    "grpo": {"algorithm": {"advantage_clip": 1.1, "kl": {"coefficient": 0.1, "placement": "reward"}}, **PROCESS},
    # What changes routers and log-probs, all at once.
    "together": {
        "algorithm": {"advantage": "gae", "kl": {"coefficient": 0.1, "placement": "reward"}, "entropy_reward": 0.01},
        "vp2o": {"enabled": True, "neighbors": 3, "inactive_neighbors": 2, "trust_region": 2.0},
        "routing": {"source": "r2"},
        "pruning": {"enabled": True, "rho": 0.43},
    },
}


def make_trajectories(seed: int, *, parts: bool = True, vocab: int = 64) -> list[Trajectory]:
    """A step's, of lengths that no micro-batch of 96 tokens holds together, with whatever an episode may look like.

    Tokens that others chose at the beginning, in the middle and at the end of a response; responses that a limit ended; one
    that is masked, one of which no token counts; parts: some samples are several sequences. Up to four steps, the last of
    which may end before the response does; all scores of the second prompt's steps are equal.
    """
    rng = np.random.default_rng(seed)
    found: list[Trajectory] = []
    for sample in range(PROMPTS * SAMPLES):
        reward, prm, masked, overlong = float(rng.normal()), float(rng.normal()), sample == 1, -float(rng.random())
        for part in range(1 + (2 if parts and sample in (1, 9, 15) else 0)):
            prompt, response = int(rng.integers(1, 15)), int(rng.integers(3, 26))
            mask = np.ones(response, bool)
            first, length = int(rng.integers(0, response)), int(rng.integers(0, 6))
            mask[first : first + length] = False
            if sample in (3, 8):  # the few: of a single token there is no deviation
                mask[:] = True
            if sample in (2, 10):
                mask[: 1 + length // 2] = False
            if masked or sample == 6:
                mask[:] = False
            own = np.flatnonzero(mask)
            ends = rng.choice(own, int(rng.integers(0, min(4, len(own)) + 1)), replace=False)
            steps = np.full(response, np.nan, np.float32)
            steps[ends] = 0.3 if sample // SAMPLES == 1 else rng.normal(size=len(ends))
            found.append(
                Trajectory(
                    prompt_id=str(len(found)),
                    group_id=sample // SAMPLES,
                    tokens=rng.integers(4, vocab, prompt + response).astype(np.int32),
                    prompt_length=prompt,
                    fields={
                        "loss_mask": mask,
                        "rollout_log_probs": rng.normal(-3, 1, response).astype(np.float32),
                        "step_scores": steps,
                    },
                    finish_reason="length" if sample % 3 == 0 else "stop",
                    reward=reward,
                    reward_parts={"correct": reward - overlong - 0.7 * prm, "overlong": overlong, "prm": prm},
                    masked=masked,
                    part=part,
                )
            )
    return found


def by_number(
    trainer: Trainer, samples: list[list[Trajectory]], values: Iterable[torch.Tensor]
) -> dict[int, np.ndarray]:
    """Values [L] of each update, as every process has them, by trajectory: those of a copy must be the same."""
    mine = {}
    for of_update, found in zip(samples, values, strict=True):
        lengths = [t.response_length for t in of_update]
        mine |= {int(t.prompt_id): part.numpy() for t, part in zip(of_update, found.split(lengths), strict=True)}
    merged: dict[int, np.ndarray] = {}
    for part in trainer.ranks.gather(mine):
        for number, found in part.items():
            assert np.array_equal(merged.setdefault(number, found), found), f"processes of a copy differ in {number}"
    return merged


def keep_gradients(trainer: Trainer, kept: list[dict[str, np.ndarray]]) -> None:
    """Put the whole gradients of the first update into the list. Those of later ones are seen by the weights they leave."""
    reduce_whole(trainer)
    step = trainer._step
    trainer._step = lambda: (kept or kept.append(whole_gradients(trainer)), step())[1]


def build_critic(config: Config, policy: Trainer) -> Critic:
    """As `Run` does."""
    own = critic_config(config)
    trainer = build_trainer(own, policy.ranks, total_updates=8, support=SamplingSupport(), value_head=True)
    policy.companions["critic"] = trainer
    return Critic(trainer, own.critic.clip)


def advantages_of(
    algorithm: AlgorithmConfig,
    trainer: Trainer,
    critic: Critic | None,
    trajectories: list[Trajectory],
    updates: int = UPDATES,
    *,
    of_steps: bool = False,
) -> tuple[dict[str, Any], list, list, Advantages]:
    """From rewards to advantages as a step of `train` does, by trajectory, and all that they were made of."""
    ranks = trainer.ranks
    groups = share_of(PROMPTS, ranks.data_rank, ranks.data_size)
    mine = [replace(t, fields=dict(t.fields)) for t in trajectories if t.group_id in groups and ranks.is_leader]
    whole = replace(trainer.config, algorithm=algorithm)
    whole = whole if of_steps else replace(whole, rewards=RewardsConfig())
    advantages = Advantages(whole, trainer, critic if algorithm.advantage == "gae" else None)
    said = {"process": whole.process_rewards, "bootstraps": whole.bootstraps_truncated}
    set_outcome_rewards(whole.rewards, whole.data.rewards, ranks, mine, **said)
    advantages.compute_group_advantages(mine)
    samples = redistribute(mine, updates, ranks)
    batches = [trainer.pack(of_update) for of_update in samples]
    objective = Policy(whole)
    for index, of_update in enumerate(batches):
        trainer.compute_fields(of_update, objective.needs, UpdateContext(index, batches))
    scored: list[StateValues] = []
    if critic:
        score = critic.score
        critic.score = lambda rollout: (scored.extend(score(rollout)), scored)[1]
    advantages.compute_token_advantages(samples, batches, algorithm.kl.coefficient)
    if critic:
        critic.score = score
    labels = [Labels(of_update) for of_update in samples]

    def packed(name: str) -> dict[int, np.ndarray]:
        """What lies in the batches under a name, as the last stage has it."""
        values = [everywhere(trainer, one, own, name) for one, own in zip(labels, batches, strict=True)]
        return by_number(trainer, samples, values)

    found: dict[str, Any] = {"advantages": packed("advantages")}
    found |= {name: packed(name) for name in objective.needs}
    if advantages.returns:
        found["returns"] = by_number(trainer, samples, advantages.returns)
    if scored:
        found["values"] = by_number(trainer, samples, [each.before for each in scored])
        last = [torch.repeat_interleave(each.last, one.lengths) for each, one in zip(scored, labels, strict=True)]
        found["last"] = by_number(trainer, samples, last)
    return found, samples, batches, advantages


def step(
    trainer: Trainer, critic: Critic | None, kl: KLControl, trajectories: list[Trajectory]
) -> tuple[dict[str, Any], dict[str, float], int]:
    """What `train` makes of a step's trajectories -> (advantages and their sources, metrics, micro-batches of an update)."""
    config = trainer.config
    of_steps = config.process_rewards is not None
    made, _, rollout_batch, advantages = advantages_of(
        config.algorithm, trainer, critic, trajectories, of_steps=of_steps
    )
    objective, updates = replace(Policy(config), kl_coefficient=kl.value), []
    for index, batches in enumerate(rollout_batch):
        if critic:
            critic.update(index, advantages.returns[index])
        updates.append(trainer.update(batches, objective, UpdateContext(index, rollout_batch)))
    of_all = over_ranks(trainer.ranks, [advantages.metrics() | (critic.metrics() if critic else {})])
    metrics = merge([of_all, *(update.metrics for update in updates)])
    metrics |= kl.update(updates, PROMPTS * SAMPLES)
    return made, figures(metrics), len(rollout_batch[0])


def config_of(models: list[str], case: str, overrides: dict[str, Any]) -> Config:
    """A case's, under a layout."""
    policy, reference, classifier = models
    keys = {name: dict(values) for name, values in CASES[case].items()}
    if kl := keys["algorithm"].get("kl"):
        keys["algorithm"]["kl"] = {**kl, "reference": reference}
    optimizer = {"lr": 1e-3, "clip_grad": 0.5, "weight_decay": 0.1, **overrides.get("optimizer", {})}
    if keys["algorithm"].get("advantage") == "gae":
        keys["critic"] = {"path": classifier, "clip": 0.02, "optimizer": optimizer}
    for section, values in overrides.items():
        keys[section] = {**keys.get(section, {}), **values}
    return make_config(policy, keys)


def run_layout(
    models: list[str], case: str, overrides: dict[str, Any], seed: int, *, others: bool = True
) -> dict[str, Any]:
    """One step of a case, of two updates; others: and what other advantages there are of its trajectories."""
    config = config_of(models, case, overrides)
    trajectories = make_trajectories(seed, parts=case != "grpo")
    trainer = make_trainer(config)
    critic = build_critic(config, trainer) if config.algorithm.advantage == "gae" else None
    found: dict[str, Any] = {"advantages": {}}
    for name, algorithm in {"gae": OF_TOKENS, "grpo": WHOLE}.get(case, {}).items() if others else ():
        found["advantages"][name] = advantages_of(algorithm, trainer, critic, trajectories)[0]
    for name, algorithm in OF_STEPS.items() if others and case in ("gae", "grpo") else ():
        if name.endswith("grpo") == (case == "grpo"):
            found["advantages"][f"process: {name}"] = advantages_of(
                algorithm, trainer, critic, trajectories, of_steps=True
            )[0]
    if case == "gae" and others:
        # One sequence an update: where there are two data-parallel ranks, one of them has none.
        few = [t for t in trajectories if not t.part][3:9:5]
        found["advantages"]["few"] = advantages_of(OF_TOKENS["gae, whitened"], trainer, critic, few)[0]
        first = next(t for t in trajectories if t.part)  # which one data-parallel rank has, and all must learn of
        try:
            advantages_of(WHOLE["grpo"], trainer, None, [t for t in trajectories if not t.part or t is first])
        except UserError as error:
            found["refused"] = str(error)

    kl = KLControl(config.algorithm.kl)
    grads: dict[str, list] = {"policy": [], "critic": []}
    learners = {"policy": trainer} | trainer.companions
    for name, learner in learners.items():
        if case != "together":
            keep_gradients(learner, grads[name])
    made, metrics, found["micro_batches"] = step(trainer, critic, kl, trajectories)
    found["advantages"]["case"] = made
    found |= {"metrics": metrics, "coefficient": kl.value, "grads": grads}
    found["weights"] = {
        name: {tensor: t.float().numpy().copy() for tensor, t in learner.export_weights()}
        for name, learner in learners.items()
    }
    coefficients = trainer.ranks.gather(kl.value)
    assert len(set(coefficients)) == 1, f"ranks have other coefficients: {coefficients}"
    end_layout()
    return found if dist.get_rank() == 0 else {key: found[key] for key in found.keys() & {"refused"}}


def run_layouts(layouts: list[tuple[list[str], str, dict, bool]], seed: int) -> list[dict[str, Any]]:
    """Cases and layouts of the same world size, one after the other on the same processes.

    layouts: models (policy, reference, and the classifier that the critic starts as), case, layout, and `others`.
    """
    return [run_layout(models, case, layout, seed, others=others) for models, case, layout, others in layouts]
