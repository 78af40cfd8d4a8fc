"""What each rank does in test_critic_state.py: save, load, sleep and wake a policy with its critic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from checkpoint_ranks import local_state
from memory_ranks import device_storages, new_bytes
from ppo_ranks import build_critic, config_of, make_trajectories, step
from ranks import end_layout

from megatron_rl.errors import UserError
from megatron_rl.trainer import checkpoint
from megatron_rl.trainer.critic import Critic
from megatron_rl.trainer.kl_control import KLControl
from megatron_rl.trainer.trainer import Trainer

from layouts import make_trainer  # isort: skip
from megatron.core import parallel_state  # isort: skip (after megatron_rl, which makes it importable without a GPU)

LAYOUTS: dict[str, dict[str, Any]] = {
    "dp2": {"distributed_optimizer": True},
    "tp2": {"tensor": 2},
    "replicated": {"distributed_optimizer": False},
    "pp2": {"pipeline": 2},
}


def build(models: list[str], layout: str) -> tuple[Trainer, Critic, KLControl]:
    if parallel_state.model_parallel_is_initialized():
        end_layout()
    config = config_of(models, "gae", {"parallel": LAYOUTS[layout]})
    trainer = make_trainer(config)
    return trainer, build_critic(config, trainer), KLControl(config.algorithm.kl)


def whole_state(trainer: Trainer) -> list[torch.Tensor]:
    """Weights and moments of this rank, of the policy and of the critic."""
    return [t.detach().clone() for one in (trainer, *trainer.companions.values()) for t in local_state(one)]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) > 50 and all(map(torch.equal, first, second))


def resume(models: list[str], layout: str, folder: str, seeds: list[int]) -> bool:
    """Whether a step after a load ends in the very bits of one that was not stopped; other numbers were there before."""
    steps = [make_trajectories(seed) for seed in seeds]
    trainer, critic, kl = build(models, layout)
    step(trainer, critic, kl, steps[0])
    path = checkpoint.save(Path(folder) / layout, 1, trainer, trainer.ranks, extra={"kl": kl.state_dict()}, keep=1)
    step(trainer, critic, kl, steps[1])
    expected, coefficient = whole_state(trainer), kl.value

    trainer, critic, kl = build(models, layout)
    step(trainer, critic, kl, steps[1])  # away from where it began, and so are its moments
    kl.load_state_dict(checkpoint.load(path, trainer, trainer.ranks)["extra"]["kl"])
    step(trainer, critic, kl, steps[1])
    return same(whole_state(trainer), expected) and kl.value == coefficient


def other_runs(models: list[str], folder: str) -> dict[str, Any]:
    """The tensor-parallel checkpoint on other layouts, and by runs without a critic, and the other way round."""
    found: dict[str, Any] = {}
    path = Path(folder) / "tp2" / "step_000001"
    trainer, _, _ = build(models, "pp2")
    checkpoint.load(path, trainer, trainer.ranks)
    checkpoint.save(Path(folder) / "pp2", 1, trainer, trainer.ranks, extra={}, keep=1)
    before = [t.detach().clone() for t in local_state(trainer)]
    weights = {name: tensor.clone() for name, tensor in trainer.export_weights()}

    trainer, _, _ = build(models, "pp2")
    trainer.companions.clear()
    checkpoint.load(path, trainer, trainer.ranks)
    found["loaded without"] = all(map(torch.equal, local_state(trainer), before))
    alone = checkpoint.save(Path(folder) / "alone", 1, trainer, trainer.ranks, extra={}, keep=1)
    trainer, _, _ = build(models, "pp2")
    try:
        checkpoint.load(alone, trainer, trainer.ranks)
    except UserError as error:
        found["refused"] = str(error)
    return found | {"weights": weights if trainer.ranks.rank == 0 else {}}


def sleeps(models: list[str], seed: int) -> dict[str, Any]:
    """A sleep between two steps: what stays on the device, in bytes, and whether all comes back."""
    trajectories = make_trajectories(seed)
    old = device_storages()
    trainer, critic, kl = build(models, "dp2")
    step(trainer, critic, kl, trajectories)
    found: dict[str, Any] = {"awake": new_bytes(old)}
    before = whole_state(trainer)
    old |= {t.untyped_storage()._cdata: t.untyped_storage() for t in before}
    trainer.sleep(keep_weights=True)
    found["policy's weights"] = sum(p.nbytes for chunk in trainer.chunks for p in chunk.parameters())
    found["with weights"] = new_bytes(old)
    trainer.sleep()
    found["asleep"] = new_bytes(old)
    try:
        critic.score([[trajectories[0]]])
    except RuntimeError as error:
        found["refused"] = str(error)
    trainer.wake(weights_only=True)
    found["with weights again"] = new_bytes(old)
    trainer.wake()
    found["same"] = same(whole_state(trainer), before)
    step(trainer, critic, kl, trajectories)
    return found


def everything(models: list[str], folder: str, seeds: list[int]) -> dict[str, Any]:
    """On the same two processes."""
    found: dict[str, Any] = {f"resumed {layout}": resume(models, layout, folder, seeds) for layout in ("dp2", "tp2")}
    return found | other_runs(models, folder) | {"sleep": sleeps(models, seeds[0])}
