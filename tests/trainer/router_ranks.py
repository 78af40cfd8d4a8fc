"""The ranks of test_router_losses.py: gradients of routers' own losses, and biases that move, under one layout."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from layouts import make_config, whole_gradients
from ranks import end_layout

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.data.packing import Batch
from megatron_rl.data.sequence import Sequence
from megatron_rl.distributed import parallel
from megatron_rl.metrics.reduce import figures
from megatron_rl.models.router import routers
from megatron_rl.run.update_hooks import data_hooks
from megatron_rl.trainer.hooks import Step
from megatron_rl.trainer.objective import SFT, GivenGradients, Objective, Policy
from megatron_rl.trainer.trainer import Trainer, build_trainer


def make_trainer(model: str, overrides: dict) -> Trainer:
    """As the commands that learn from data have it, with gradients whole on every rank."""
    config = make_config(model, overrides)
    ranks = parallel.initialize(config.parallel, config.seed)
    trainer = build_trainer(
        config, ranks, total_updates=config.steps, support=SamplingSupport(), hooks=data_hooks(config.model)
    )
    settings = trainer.chunks[0].config
    finalize = settings.finalize_model_grads_func
    settings.finalize_model_grads_func = lambda *args, force_all_reduce=None, **kw: finalize(
        *args, force_all_reduce=True, **kw
    )
    return trainer


def objective_of(trainer: Trainer, name: str, batches: list[Batch]) -> Objective[Any]:
    if name == "given":
        for batch in batches:
            batch.fields["loss_gradients"] = torch.where(batch.mask, 0.1, 0.0)
        return GivenGradients()
    if name in ("policy", "sequence_sum"):
        config = replace(trainer.config, batch=replace(trainer.config.batch, updates_per_step=1))
        aggregation = "token_mean" if name == "policy" else name
        return Policy(replace(config, algorithm=replace(config.algorithm, aggregation=aggregation)))
    return SFT(label_smoothing=0.3 if name == "smoothed" else 0.0)


def gradients(trainer: Trainer, samples: list[Sequence], name: str) -> tuple[dict[str, np.ndarray], dict[str, float]]:
    """Biases of one update, that is then left out; and its figures."""
    batches = trainer.pack(samples[trainer.ranks.data_rank :: trainer.ranks.data_size])
    found: dict[str, np.ndarray] = {}
    step = trainer._step
    trainer._step = lambda: (found.update(whole_gradients(trainer)), Step(False, 0.0, 0.0))[1]
    metrics = trainer.update(batches, objective_of(trainer, name, batches)).metrics
    trainer._step = step
    return found, figures(metrics)


def of_losses(model: str, layouts: list[dict], cases: list[tuple[str, list[Sequence]]]) -> list[list[tuple]]:
    """Additions of the routers' own losses to the gradients, by layout and case, and the figures.

    Of the case "smoothed" the gradients without them: those of label smoothing.
    """
    found = []
    for overrides in layouts:
        trainer = make_trainer(model, overrides)
        settings = trainer.chunks[0].config
        kept = settings.moe_aux_loss_coeff, settings.moe_z_loss_coeff
        of_cases = []
        for name, samples in cases:
            both, measured = gradients(trainer, samples, name)
            settings.moe_aux_loss_coeff = settings.moe_z_loss_coeff = 0.0
            task, _ = gradients(trainer, samples, name)
            settings.moe_aux_loss_coeff, settings.moe_z_loss_coeff = kept
            added = {tensor: both[tensor] - task[tensor] for tensor in both}
            of_cases.append((task if name == "smoothed" else added, measured))
        found.append(of_cases)
        end_layout()
    return found


def biases(model: str, layouts: list[dict], given: list[Sequence], updates: int) -> list[dict[str, Any]]:
    """Biases that are exported after each update, by layout, how often the last one chose each expert, and the choices [T, E]
    of the first one's micro-batches."""
    found = []
    for overrides in layouts:
        trainer = make_trainer(model, overrides)
        samples = copy.deepcopy(given)
        after, chosen, maps = [], {}, {}
        for _, router in routers(trainer.chunks):  # those of the folder are so large that the tokens hardly matter
            if router.enable_expert_bias:
                router.get_buffer("expert_bias").zero_()

        def see(
            module: Any, _: Any, output: Any, chosen: dict = chosen, maps: dict = maps, after: list = after
        ) -> None:
            layer = module.router_replay.layer
            chosen[layer] = chosen.get(layer, 0) + output[1].sum(0).numpy()
            if not after:
                maps.setdefault(layer, []).append(output[1].numpy().copy())

        handles = [router.register_forward_hook(see) for _, router in routers(trainer.chunks)]
        for _ in range(updates):
            chosen.clear()
            batches = trainer.pack(samples[trainer.ranks.data_rank :: trainer.ranks.data_size])
            trainer.update(batches, SFT())
            after.append(
                {
                    name: tensor.numpy().copy()
                    for name, tensor in trainer.export_weights()
                    if name.endswith("e_score_correction_bias")
                }
            )
        for handle in handles:
            handle.remove()
        for sample in samples:  # nothing is learned of it
            sample["loss_mask"] = np.zeros(sample.response_length, bool)
        left_out = trainer.update(trainer.pack(samples[trainer.ranks.data_rank :: trainer.ranks.data_size]), SFT())
        assert figures(left_out.metrics)["update/skipped"] == 1
        last = {name: tensor.numpy().copy() for name, tensor in trainer.export_weights() if name in after[-1]}
        saved = [name for chunk in trainer.chunks for name in chunk.sharded_state_dict() if "expert_bias" in name]
        found.append({"after": after, "chosen": dict(chosen), "maps": maps, "saved": saved, "last": last})
        end_layout()
    return found
