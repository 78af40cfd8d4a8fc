"""What each rank does in test_on_policy_updates.py: updates by every loss that claim to be on-policy, and two that are not."""

from __future__ import annotations

from dataclasses import replace

import torch
from layouts import make_config, make_samples, make_trainer
from ranks import end_layout

from megatron_rl.algorithms.losses import POLICY_LOSSES
from megatron_rl.errors import UserError
from megatron_rl.metrics.reduce import figures
from megatron_rl.trainer.objective import Policy


def run_layouts(model: str, seed: int, layouts: list[dict]) -> list[dict]:
    """One layout after the other on the same processes."""
    found = []
    for layout in layouts:
        found.append(run_layout(model, seed, layout))
        end_layout()
    return found


def run_layout(model: str, seed: int, layout: dict) -> dict:
    """{loss: (ratio, clip fraction, micro-batches)}, and what is said of weights that move and of another ratio."""
    config = make_config(
        model,
        {
            "batch": {"updates_per_step": 1},
            "algorithm": {"on_policy": True, "clip_low": 0.0, "clip_high": 0.0},
            **layout,
        },
    )
    trainer = make_trainer(config)
    ranks, found = trainer.ranks, {}
    samples = make_samples(seed, 14, 64)[ranks.data_rank :: ranks.data_size]
    for loss in POLICY_LOSSES:
        trainer.weights_pushed()
        objective = Policy(replace(config, algorithm=replace(config.algorithm, loss=loss)))
        batches = trainer.pack(samples)
        metrics = figures(trainer.update(batches, objective).metrics)
        found[loss] = metrics["loss/ratio"], metrics["loss/clip_fraction"], len(batches)
        found[f"{loss} moved"] = metrics["update/grad_norm"] > 0

    def refused(objective: Policy, *, score: bool = False) -> tuple[str, bool]:
        """The line, and whether the weights stayed as they were."""
        before, said = trainer.fingerprints(), "nothing was said"
        batches = trainer.pack(samples)
        if score:
            trainer.compute_fields(batches, frozenset({"old_log_probs"}))
            for batch in batches:
                if "old_log_probs" in batch.fields:
                    batch.fields["old_log_probs"] += 1e-4
        try:
            trainer.update(batches, objective)
        except UserError as error:
            said = str(error)
        return said, trainer.fingerprints() == before

    trainer.weights_pushed()
    last = next(p for p in reversed(list(trainer.chunks[-1].parameters())))
    with torch.no_grad():
        if ranks.rank == 1:  # the smallest step of one number of one rank
            last.view(-1)[0] = torch.nextafter(last.view(-1)[0], torch.tensor(torch.inf))
    found["weights"] = refused(Policy(config))
    trainer.weights_pushed()
    found["ratio"] = refused(Policy(replace(config, batch=replace(config.batch, updates_per_step=2))), score=True)
    return found
