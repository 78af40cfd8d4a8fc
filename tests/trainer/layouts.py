"""What each rank does in the parity tests: train on the same samples under one parallel layout, return whole tensors."""

from __future__ import annotations

import logging

import numpy as np
import torch
import torch.distributed as dist
from ranks import end_layout, refusing_ties, without_ties

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.config import Config, RefreshConfig
from megatron_rl.config.load import build_config
from megatron_rl.data.packing import Batch
from megatron_rl.data.sequence import Sequence
from megatron_rl.distributed import parallel
from megatron_rl.metrics.reduce import figures, over_ranks
from megatron_rl.report.mismatch_metrics import mismatch_metrics
from megatron_rl.rollout.refresh import measure
from megatron_rl.run.update_hooks import update_hooks
from megatron_rl.trainer.hooks import ALONE, UpdateContext, UpdateHook
from megatron_rl.trainer.objective import Policy
from megatron_rl.trainer.trainer import Trainer, build_trainer

TEMPERATURE = 0.7
LATER = UpdateContext(1)
"""Of the second update of a rollout batch, in which predictors learn."""


logging.getLogger("megatron").setLevel(logging.ERROR)


def make_samples(
    seed: int, count: int, vocab: int, *, kept: bool = False, lengths: tuple[int, int] = (3, 26)
) -> list[Sequence]:
    """Random sequences of 4..40 tokens with random masks, rollout log-probs and advantages.

    kept: they were sampled from small random sets of tokens. lengths: of the responses, from the first and below the second.

    Without the special tokens: the padding token's embedding is zero, and RMSNorm's gradient there is a thousandfold.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(count):
        prompt, response = int(rng.integers(1, 15)), int(rng.integers(*lengths))
        samples.append(
            Sequence(
                tokens=rng.integers(4, vocab, prompt + response).astype(np.int32),
                prompt_length=prompt,
                fields={
                    "loss_mask": rng.random(response) < 0.9,
                    "rollout_log_probs": rng.normal(-3, 1, response).astype(np.float32),
                },
            )
        )
        samples[-1]["advantages"] = float(rng.normal())
        if kept:
            chosen = samples[-1].tokens[prompt:]
            samples[-1].kept = [np.union1d(rng.choice(vocab, 8), token).astype(np.int32) for token in chosen]
    return samples


@torch.no_grad()
def samples_without_ties(*models: torch.nn.Module) -> list[Sequence]:
    """Six, in which no two experts of models of transformers tie but for rounding."""

    def attempt(seed: int):
        samples = make_samples(seed, 6, 200)
        with refusing_ties():
            for sample in samples:
                for model in models:
                    model(torch.as_tensor(sample.tokens).long()[None])
        return samples

    return without_ties(attempt)


def make_config(model: str, overrides: dict) -> Config:
    base = {
        "steps": 4,
        "model": {"path": model},
        "batch": {"tokens_per_micro_batch": 96, "updates_per_step": 2},
        "optimizer": {"lr": 1e-3, "clip_grad": 0.5, "weight_decay": 0.1},
        "precision": {"train": "fp32"},
        "rollout": {"agreement_floor": None},  # log-probs are made up
    }
    for section, values in overrides.items():
        base[section] = {**base.get(section, {}), **values}
    return build_config(base)


def make_trainer(config: Config, *, plain: bool = False) -> Trainer:
    ranks = parallel.initialize(config.parallel, config.seed)
    support = SamplingSupport(TEMPERATURE, min_p=config.pruning.rho if config.pruning.enabled else 0.0)
    hooks = update_hooks(config)
    options = {"support": support, "hooks": hooks, "reference": config.policy_reference, "plain": plain}
    return build_trainer(config, ranks, total_updates=config.steps, **options)


def score(trainer: Trainer, batches: list[Batch]) -> None:
    """What several updates of a rollout batch start from."""
    trainer.compute_fields(batches, Policy(trainer.config).needs | {"old_log_probs"}, LATER)


def update(trainer: Trainer, batches: list[Batch], place: UpdateContext = ALONE) -> dict[str, float]:
    """By the policy's own objective -> the update's figures."""
    return figures(trainer.update(batches, Policy(trainer.config), place).metrics)


def hook_of[Hook: UpdateHook](trainer: Trainer, kind: type[Hook]) -> Hook:
    return next(hook for hook in trainer.hooks if isinstance(hook, kind))


def whole_gradients(trainer: Trainer) -> dict[str, np.ndarray]:
    """Every gradient as a whole Hugging Face tensor: gradients put in the weights' place and exported like them."""
    weights = {id(p): p.data.clone() for chunk in trainer.chunks for p in chunk.parameters()}
    for chunk in trainer.chunks:
        for p in chunk.parameters():
            p.data.copy_(p.main_grad if p.requires_grad else torch.zeros_like(p))
    grads = {name: tensor.float().cpu().numpy().copy() for name, tensor in trainer.export_weights()}
    for chunk in trainer.chunks:
        for p in chunk.parameters():
            p.data.copy_(weights[id(p)])
    return grads


def run_layout(
    config: Config, samples: list[Sequence], updates: int = 2, *, whole: bool = True, plain: bool = False
) -> dict:
    """Score, then `updates` updates; returns log-probs before, loss and gradients of the first, and the last weights.

    whole: gradients are reduced whole on every rank, where the distributed optimizer would keep a shard of them on each;
    else none are returned. plain: as of `build_trainer`.
    """
    trainer = make_trainer(config, plain=plain)
    if whole:
        settings = trainer.chunks[0].config
        finalize = settings.finalize_model_grads_func
        settings.finalize_model_grads_func = lambda *args, force_all_reduce=None, **kw: finalize(
            *args, force_all_reduce=True, **kw
        )
    ranks = trainer.ranks
    mine = samples[ranks.data_rank :: ranks.data_size]
    mine_index = list(range(len(samples)))[ranks.data_rank :: ranks.data_size]
    result: dict = {"micro_batches": 0}
    batches: list[Batch] = []
    for update in range(updates):
        objective = Policy(config)
        if update % config.batch.epochs == 0:
            batches = trainer.pack(mine)
            score(trainer, batches)
        if update == 0:
            result["log_probs"] = gather_log_probs(trainer, batches, mine_index)
            result["tokens"] = trainer.totals(batches).tokens
            for batch in batches:  # make ratios differ from 1, the same in every layout
                old = batch.fields.get("old_log_probs")
                if old is not None and objective.ratio_from_old:
                    moved = old + 0.5 * torch.sin(7.0 * old)
                    batch.fields["old_log_probs"] = torch.where(old.isfinite(), moved, old)
        captured: dict = {}
        step = trainer._step
        if update == 0 and whole:
            trainer._step = lambda captured=captured, step=step: (
                captured.update(grads=whole_gradients(trainer)),
                step(),
            )[1]
        done = trainer.update(batches, objective)
        trainer._step = step
        if update == 0:
            result |= {"metrics": figures(done.metrics), "grads": captured.get("grads"), "micro_batches": len(batches)}
            said = {"pruned": config.pruning.enabled, "max_new_tokens": config.rollout.max_new_tokens}
            mismatch = mismatch_metrics(config.correction, [batches], [done], {"correct": 1.0}, **said)
            result["mismatch"] = figures(over_ranks(ranks, [mismatch] if trainer.reports else []))
            result["vp2o"] = {name: value for name, value in result["metrics"].items() if name.startswith("vp2o/")}
            if config.vp2o.enabled:  # the drift, over all tokens: each layout would have others of them
                drift = measure(trainer, mine, RefreshConfig(when="drift", tokens=1 << 20))
                result["vp2o"] |= {"kl": drift.kl, "ess": drift.ess}
    result["weights"] = {name: t.float().cpu().numpy().copy() for name, t in trainer.export_weights()}
    if dist.get_rank() != 0:
        result.pop("grads"), result.pop("weights")
    end_layout()  # the next layout starts on the same processes
    return result


def gather_log_probs(trainer: Trainer, batches: list[Batch], mine_index: list[int]) -> dict[tuple[int, int], float]:
    """(sample, label position) -> old log-prob, from all ranks that hold some."""
    mine: dict[tuple[int, int], float] = {}
    for batch in batches:
        old = batch.fields.get("old_log_probs")
        if old is None:
            continue
        for t in batch.mask.nonzero()[:, 0].tolist():
            sample = mine_index[batch.samples[int(batch.segments.ids[t])]]
            mine[sample, int(batch.position_ids[0, t])] = float(old[t])
    merged: dict[tuple[int, int], float] = {}
    for part in trainer.ranks.gather(mine):
        merged |= part
    return merged


def run_layouts(model: str, samples: list[Sequence], layouts: list[dict]) -> list[dict]:
    """Several layouts of the same world size, one after the other on the same processes."""
    found = []
    for overrides in layouts:
        sections = {section: values for section, values in overrides.items() if section != "whole"}
        found.append(run_layout(make_config(model, sections), samples, whole=overrides.get("whole", True)))
    return found
