"""What each rank does in the tests of pruning: measure importance on one layout."""

from __future__ import annotations

from pathlib import Path

import torch
from trainer.layouts import make_config, make_samples

from megatron_rl.data.balance import plan_updates
from megatron_rl.models.sizes import Shape
from megatron_rl.rollout.sampling import SamplingSupport
from megatron_rl.trainer import parallel
from megatron_rl.trainer.calibration import measure
from megatron_rl.trainer.trainer import build_trainer

from megatron.core import parallel_state  # isort: skip (after megatron_rl, which makes it importable without a GPU)


def importances(world: list[tuple[str, dict, int]]) -> list[dict[str, torch.Tensor]]:
    """Importance of the parts of each (model folder, overrides of the config, seed of the samples)."""
    found = []
    for model, overrides, seed in world:
        config = make_config(model, overrides)
        ranks = parallel.initialize(config.parallel, config.seed)
        trainer = build_trainer(config, ranks, total_updates=None, support=SamplingSupport(), plain=True)
        samples = make_samples(seed, 7, trainer.model.hf_config.vocab_size)
        [shares] = plan_updates([s.inputs for s in samples], updates=1, ranks=ranks.data_size)
        batches = trainer.pack([samples[i] for i in shares[ranks.data_rank]])
        found.append(measure(trainer, batches, Shape.from_config(trainer.model.hf_config), config.prune))
        assert all(not m._forward_hooks and not m._forward_pre_hooks for c in trainer.chunks for m in c.modules())
        parallel_state.destroy_model_parallel()
    return found


def names(folder: Path) -> list[str]:
    """Files of a folder."""
    return sorted(path.name for path in folder.iterdir())
