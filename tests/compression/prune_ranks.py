"""What each rank does in the tests of pruning: measure, put zeros, and train with them, on one layout."""

from __future__ import annotations

import torch
from ranks import end_layout
from trainer.layouts import make_config, make_samples, make_trainer, score, update, whole_gradients

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.compression.calibration import measure
from megatron_rl.compression.sparsity import sparsify
from megatron_rl.data.balance import plan_updates
from megatron_rl.data.packing import Batch
from megatron_rl.data.sequence import Sequence
from megatron_rl.distributed import parallel
from megatron_rl.models.shape import Shape
from megatron_rl.trainer.trainer import Trainer, build_trainer


def importances(world: list[tuple[str, dict, int]]) -> list[dict[str, torch.Tensor]]:
    """Importance of the parts of each (model folder, overrides of the config, seed of the samples)."""
    found = []
    for model, overrides, seed in world:
        trainer, batches = _built(model, overrides, seed)
        found.append(measure(trainer, batches, Shape.from_config(trainer.model.hf_config), trainer.config.prune))
        assert all(not m._forward_hooks and not m._forward_pre_hooks for c in trainer.chunks for m in c.modules())
        end_layout()
    return found


def sparsified(world: list[tuple[str, dict, int]]) -> list[dict[str, torch.Tensor]]:
    """The weights of each (model folder, overrides of the config, seed of the samples) with their zeros."""
    found = []
    for model, overrides, seed in world:
        trainer, batches = _built(model, overrides, seed)
        sparsify(trainer, batches, Shape.from_config(trainer.model.hf_config), trainer.config.prune)
        found.append({name: tensor.clone() for name, tensor in trainer.export_weights()})
        end_layout()
    return found


def updated(world: list[tuple[str, dict, int]], updates: int) -> list[dict]:
    """Updates of the policy by each (model folder, overrides, seed): the weights, figures, and largest moment of a zero."""
    found = []
    for model, overrides, seed in world:
        trainer = make_trainer(make_config(model, overrides))
        batches = trainer.pack(_share(trainer, seed))
        score(trainer, batches)
        figures = [update(trainer, batches) for _ in range(updates)]
        weights = {name: tensor.float().clone() for name, tensor in trainer.export_weights()}
        found.append({"weights": weights, "figures": figures})
        end_layout()
    return found


def first_gradients(model: str, overrides: dict, seed: int) -> dict:
    """Whole gradients of one update, and the norm by which it was clipped."""
    trainer = make_trainer(make_config(model, overrides))
    batches = trainer.pack(_share(trainer, seed))
    score(trainer, batches)
    norm = update(trainer, batches)["update/grad_norm"]
    gradients = whole_gradients(trainer)
    end_layout()
    return {"norm": norm, "gradients": gradients}


def _share(trainer: Trainer, seed: int) -> list[Sequence]:
    samples = make_samples(seed, 7, trainer.model.hf_config.vocab_size)
    [shares] = plan_updates([s.inputs for s in samples], updates=1, ranks=trainer.ranks.data_size)
    return [samples[i] for i in shares[trainer.ranks.data_rank]]


def _built(model: str, overrides: dict, seed: int) -> tuple[Trainer, list[Batch]]:
    """For passes alone, with layers whose inputs can be looked at."""
    config = make_config(model, overrides)
    ranks = parallel.initialize(config.parallel, config.seed)
    trainer = build_trainer(config, ranks, total_updates=None, support=SamplingSupport(), plain=True)
    return trainer, trainer.pack(_share(trainer, seed))
