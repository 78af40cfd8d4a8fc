"""A checkpoint brings every random number generator back to where it was."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
from ranks import run_ranks


def draws_around_a_load(model: str, folder: str) -> tuple[list, list]:
    """What each generator gives after a save, and again after the load. Runs in a process of its own."""
    import torch

    from megatron_rl.config import build_config
    from megatron_rl.rollout.sampling import SamplingSupport
    from megatron_rl.trainer import checkpoint, parallel
    from megatron_rl.trainer.trainer import build_trainer

    from megatron.core import tensor_parallel  # isort: skip (after megatron_rl, which makes it importable without a GPU)

    def draw() -> list:
        with tensor_parallel.get_cuda_rng_tracker().fork():
            forked = torch.rand(3).tolist()
        return [forked, torch.rand(3).tolist(), np.random.rand(3).tolist(), [random.random() for _ in range(3)]]  # noqa: NPY002

    config = build_config({"model": {"path": model}, "precision": {"train": "fp32"}})
    ranks = parallel.initialize(config.parallel, config.seed)
    trainer = build_trainer(config, ranks, total_updates=1, support=SamplingSupport())
    draw()  # away from the seed
    path = checkpoint.save(Path(folder), 1, trainer, ranks, extra={}, keep=1)
    first = draw()
    checkpoint.load(path, trainer, ranks)
    return first, draw()


def test_random_states_are_restored(tiny_model, tmp_path):
    model = str(tiny_model("qwen3_moe", "--layers", "2"))
    [(first, again)] = run_ranks(1, f"{__name__}:draws_around_a_load", (model, str(tmp_path)))
    assert first == again
    assert len({str(part) for part in first}) == len(first)
