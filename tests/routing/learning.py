"""What the process of the predictor tests does: the real trainer, with routers that drift or with the policy's own updates."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from ranks import end_layout
from replays import POLICY_LR, make_config, make_samples, make_trainer, plant_predictors, shape_of, sums_of, update

from megatron_rl.config import Config, RoutingConfig
from megatron_rl.hooks.predictors import Predictors
from megatron_rl.hooks.routing_replay import RoutingReplay
from megatron_rl.metrics.reduce import figures, merge
from megatron_rl.models.parallel_check import read_hf_config
from megatron_rl.models.router import routers
from megatron_rl.trainer import checkpoint
from megatron_rl.trainer.hooks import UpdateContext, UpdateHook
from megatron_rl.trainer.trainer import Trainer
from tests.trainer.layouts import hook_of, score

LEARNING = {"optimizer": {"lr": 1e-3}, "routing": {"predictor_lr_multiplier": 1.0, "predictor_decay": 0.1}}
EXPERTS = [[4, 1], [2, 7]]
"""By layer."""
DRIFTING_STEPS, UPDATES = 8, 8


def weights_of(trainer: Trainer) -> dict[str, np.ndarray]:
    return {name: t.float().numpy().copy() for name, t in trainer.export_weights()}


def predictors_of(trainer: Trainer) -> dict[int, np.ndarray]:
    return {
        layer: r.predictor.weight.detach().numpy().copy()
        for layer, r in routers(trainer.chunks)
        if r.predictor is not None
    }


MOVE = 0.006
"""Of a router in one update, relative to its norm."""


def drift(model: str, seed: int, source: str, routing: dict) -> list[dict[str, float]]:
    """Routers move along a fixed direction with each update, the policy does not; figures of each rollout batch.

    So mini-batch j, which is trained after j updates, meets routers that have gone j steps. The predictors' learning rate is
    `predictor_lr_multiplier` times what an entry of a router moves by in one update, as it is with a policy whose routers
    go where Adam sends them.
    """
    entry = MOVE * 5.0 * 0.02  # a random model's routers have entries of 0.02
    multiplier = routing["predictor_lr_multiplier"] * entry / POLICY_LR
    options = {
        "batch": {"updates_per_step": UPDATES, "tokens_per_micro_batch": 1024},
        "routing": {"cached_tokens": 64, **routing, "predictor_lr_multiplier": multiplier},
    }
    trainer = make_trainer(make_config(model, options, source))
    shape = shape_of(read_hf_config(model))
    for _, router in routers(trainer.chunks):
        router.weight.data.mul_(5.0)  # a random model's is almost flat
    start = {layer: router.weight.norm().item() for layer, router in routers(trainer.chunks)}
    lines = []
    for step in range(DRIFTING_STEPS):
        samples = make_samples(seed + step, 8 * UPDATES, 64, shape)
        mini_batches = [trainer.pack(samples[number::UPDATES]) for number in range(UPDATES)]
        for number, batches in enumerate(mini_batches):
            trainer.compute_fields(batches, frozenset({"old_log_probs"}), UpdateContext(number))
        sums = []
        for number, batches in enumerate(mini_batches):
            sums.append(update(trainer, batches, number)[0])
            for layer, router in routers(trainer.chunks):
                generator = torch.Generator().manual_seed(seed + layer)
                direction = torch.randn(router.weight.shape, generator=generator)
                router.weight.data.add_(direction, alpha=MOVE * start[layer] / float(direction.norm()))
        lines.append(figures(merge(sums)))
    end_layout()
    return lines


def trained(model: str, seed: int, source: str) -> dict:
    """Four updates of one rollout batch; in `predicted` the predictors learn in all but the first."""
    trainer = make_trainer(make_config(model, LEARNING, source))
    batches = trainer.pack(make_samples(seed, 8, 64, shape_of(read_hf_config(model))))
    score(trainer, batches)
    sums = [update(trainer, batches, number)[0] for number in range(4)]
    result = {
        "log_probs": [b["old_log_probs"].numpy().copy() for b in batches],
        "sums": [{k: v for k, v in sums_of(s).items() if "predictor_loss" not in k} for s in sums],
        "weights": weights_of(trainer),
        "predictors": predictors_of(trainer),
    }
    end_layout()
    return result


def gradients(model: str, seed: int) -> dict:
    """Gradients of a replayed pass in which every token goes to the same experts, other ones in each layer."""
    trainer = make_trainer(make_config(model, {}, "pr3"))
    samples = make_samples(seed, 8, 64, shape_of(read_hf_config(model)))
    for sample in samples:
        sample.routes[:] = EXPERTS
    batches = trainer.pack(samples)
    plant_predictors(trainer, 0.3)
    for _, router in routers(trainer.chunks):
        router.predictor.requires_grad_(True)  # as if something had forgotten that they are not the policy's
    score(trainer, batches)
    captured: dict = {}
    step = trainer._step
    trainer._step = lambda: (
        captured.update({layer: router.weight.main_grad.clone() for layer, router in routers(trainer.chunks)}),
        step(),
    )[1]
    before = predictors_of(trainer)
    update(trainer, batches)
    end_layout()
    return {
        "router": {layer: grad.norm(dim=1).tolist() for layer, grad in captured.items()},
        "predictor_grads": [r.predictor.weight.grad for _, r in routers(trainer.chunks)],
        "predictors_moved": any((before[layer] != w).any() for layer, w in predictors_of(trainer).items()),
        "in_optimizer": sum(
            p is r.predictor.weight
            for _, r in routers(trainer.chunks)
            for group in trainer.optimizer.param_groups
            for p in group["params"]
        ),
    }


def save_and_go_on(model: str, seed: int, folder: str) -> dict:
    """Two learned batches, a checkpoint, one more; then the same one more from the checkpoint."""
    config = make_config(model, LEARNING, "pr2")
    shape = shape_of(read_hf_config(model))

    def batch(trainer: Trainer, number: int) -> None:
        batches = trainer.pack(make_samples(seed + number, 6, 64, shape))
        score(trainer, batches)
        for index in range(3):
            update(trainer, batches, index)

    trainer = make_trainer(config)
    batch(trainer, 0), batch(trainer, 1)
    path = checkpoint.save(Path(folder), 1, trainer, trainer.ranks, extra={}, keep=1)
    saved = predictors_of(trainer)
    batch(trainer, 2)
    straight = predictors_of(trainer), weights_of(trainer)
    end_layout()
    again = make_trainer(config)
    checkpoint.load(path, again, again.ranks)
    loaded = predictors_of(again)
    batch(again, 2)
    resumed = predictors_of(again), weights_of(again)
    end_layout()
    return {
        "path": str(path),
        "saved": saved,
        "loaded": loaded,
        "straight": straight,
        "resumed": resumed,
        "weights_alone": weights_alone(config, path),
        "weights_and_predictors": weights_alone(config, path, hooks=True),
        "changed": changed_source(model, folder),
    }


def weights_alone(config: Config, path: Path, **options) -> dict[int, np.ndarray]:
    """Predictors of a trainer that starts from another run's weights."""
    trainer = make_trainer(config)
    checkpoint.load_weights(path, trainer, **options)
    found = predictors_of(trainer)
    end_layout()
    return found


def changed_source(model: str, folder: str) -> tuple[dict, dict, dict]:
    """A checkpoint of an R2 run: its weights, and weights and predictors of a Pr2 run that goes on from it."""
    before = make_trainer(make_config(model, LEARNING, "r2"))
    batches = before.pack(make_samples(1, 4, 64, shape_of(read_hf_config(model))))
    score(before, batches)
    update(before, batches)
    path = checkpoint.save(Path(folder) / "r2", 1, before, before.ranks, extra={}, keep=1)
    weights = weights_of(before)
    end_layout()
    after = make_trainer(make_config(model, LEARNING, "pr2"))
    checkpoint.load(path, after, after.ranks)
    found = weights, weights_of(after), predictors_of(after)
    end_layout()
    return found


def everything(model: str, seed: int, folder: str) -> dict:
    """All of the above in one process: most of its time is its start."""
    keeps = {"predictor_lr_multiplier": 0.25, "predictor_horizon": "constant"}
    config = RoutingConfig()
    shipped = {k: getattr(config, k) for k in ("predictor_lr_multiplier", "predictor_decay", "predictor_horizon")}
    cases = {
        "r2": ("r2", keeps),
        "kl": ("pr2", keeps),
        "delta": ("pr2", keeps | {"predictor_loss": "delta"}),
        "shipped": ("pr2", shipped),
    }
    return {
        "skipped": skipped(model, seed),
        "first": first_mini_batch(model, seed),
        "drift": {name: drift(model, seed, *case) for name, case in cases.items()},
        "trained": {source: trained(model, seed, source) for source in ("r2", "pr2")},
        "gradients": gradients(model, seed),
        "steps": steps(model),
        "checkpoint": save_and_go_on(model, seed, folder),
    }


def steps(model: str) -> dict:
    """Predictors before and after an update without a gradient, one that is not finite, one without a cached token."""
    trainer = make_trainer(make_config(model, {"routing": {"predictor_decay": 0.15}}, "pr2"))
    plant_predictors(trainer, 0.3)
    predictors = hook_of(trainer, Predictors)
    results = {"before": predictors_of(trainer)}
    for name, gradient, cached in (("infinite", float("inf"), 1), ("nothing", 0.0, 0), ("zero", 0.0, 1)):
        gradients = {layer: torch.full_like(w, gradient) for layer, w in predictors.weights.items()}
        done = predictors.learn(gradients, cached, 1e-3)
        results[name] = done, predictors_of(trainer)
    end_layout()
    return results


class Spoiler(UpdateHook):
    """Makes a step fail, or refuses it."""

    how = "done"

    def attach(self, trainer: Trainer) -> None:
        self.parameter = next(trainer.chunks[0].parameters())

    def after_reduction(self) -> None:
        if self.how == "not finite":
            self.parameter.main_grad.fill_(float("inf"))  # pyright: ignore[reportAttributeAccessIssue]: Megatron's

    def before_step(self, preview) -> float:
        return float(self.how != "refused")


def skipped(model: str, seed: int) -> dict[str, bool]:
    """Whether predictors moved in an update whose step of the policy was done, not finite, or refused."""
    trainer = make_trainer(make_config(model, {}, "pr2"))
    trainer.hooks.append(spoiler := Spoiler())
    spoiler.attach(trainer)
    batches = trainer.pack(make_samples(seed, 8, 64, shape_of(read_hf_config(model))))
    score(trainer, batches)
    for _, router in routers(trainer.chunks):
        router.weight.data.mul_(1.5)  # what predictors are to learn
    moved = {}
    for how in ("not finite", "refused", "done"):
        spoiler.how, before = how, predictors_of(trainer)
        figures_of = figures(update(trainer, batches, 1)[0])
        assert figures_of["update/skipped"] == (how == "not finite"), figures_of
        moved[how] = any((before[layer] != weight).any() for layer, weight in predictors_of(trainer).items())
    end_layout()
    return moved


def first_mini_batch(model: str, seed: int) -> dict[str, list[np.ndarray]]:
    """Log-probs of the recording pass of R2, and of a first and a second mini-batch with predictors that are not zero."""
    trainer = make_trainer(make_config(model, {}, "pr2"))
    plant_predictors(trainer, 0.3)
    samples = make_samples(seed, 8, 64, shape_of(read_hf_config(model)))

    def recorded(hooks: Iterable[UpdateHook], place: UpdateContext) -> list[np.ndarray]:
        return [values.numpy() for values in trainer.compute_log_probs(trainer.pack(samples), hooks=hooks, place=place)]

    found = {"r2": recorded([RoutingReplay("r2")], UpdateContext(0))}
    found |= {f"pr2, {number}": recorded(trainer.hooks, UpdateContext(number)) for number in (0, 1)}
    end_layout()
    return found


def load_under(model: str, path: str, layouts: list[dict]) -> list[dict]:
    return [load_elsewhere(model, path, layout) for layout in layouts]


def load_elsewhere(model: str, path: str, layout: dict) -> dict:
    """The predictors and their moments, as another layout finds them in the checkpoint."""
    trainer = make_trainer(make_config(model, layout, "pr2"))
    checkpoint.load(Path(path), trainer, trainer.ranks)
    own = hook_of(trainer, Predictors)
    moments = {layer: own.adam.state[weight]["exp_avg"].numpy().copy() for layer, weight in own.weights.items()}
    gathered = trainer.ranks.gather((predictors_of(trainer), moments, own.progress()["updates"]))
    end_layout()
    predictors, moments, updates = zip(*gathered, strict=True)
    return {"predictors": predictors, "moments": moments, "updates": updates}
