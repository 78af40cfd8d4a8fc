"""What each rank does in the replay tests: score, then update, with the real trainer under one parallel layout."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from megatron_rl.config import Config, build_config
from megatron_rl.data.packing import Batch
from megatron_rl.data.sequence import Sequence
from megatron_rl.metrics.reduce import figures
from megatron_rl.models.router import routers
from megatron_rl.rollout.routes import RouteLayout
from megatron_rl.rollout.sampling import SamplingSupport
from megatron_rl.routing.replay import RoutePass, RouteTable
from megatron_rl.routing.table import RouteShape, route_dtype
from megatron_rl.trainer import parallel
from megatron_rl.trainer.objective import HeadOutputs, Policy, Result
from megatron_rl.trainer.trainer import Trainer, build_trainer
from tests.trainer import layouts

from megatron.core import parallel_state  # isort: skip (after megatron_rl, which makes it importable without a GPU)

logging.getLogger("megatron").setLevel(logging.ERROR)

POLICY_LR = 1e-10


def shape_of(hf_config) -> RouteShape:
    return RouteLayout.from_config(hf_config.to_dict()).kept


def random_routes(rng: np.random.Generator, shape: RouteShape, tokens: int, missing: float = 0.1) -> np.ndarray:
    """Different experts for every token and layer, so that a slice of the wrong place shows; some tokens without."""
    routes = shape.empty(tokens)
    for token in range(tokens):
        if rng.random() > missing:
            for layer in range(len(shape.moe_layers)):
                routes[token, layer] = rng.permutation(shape.experts)[: shape.topk]
    return routes


def make_samples(seed: int, count: int, vocab: int, shape: RouteShape) -> list[Sequence]:
    """The parity tests' random sequences, with random routes."""
    samples = layouts.make_samples(seed, count, vocab)
    rng = np.random.default_rng(seed)
    for sample in samples:
        sample.routes = random_routes(rng, shape, sample.inputs)
    return samples


def make_config(model: str, overrides: dict, source: str) -> Config:
    base = {
        "steps": 100,
        "model": {"path": model},
        "batch": {"tokens_per_micro_batch": 96, "updates_per_step": 2},
        # The policy hardly moves from one pass to the next, the predictors do.
        "optimizer": {"lr": POLICY_LR, "clip_grad": 0.5},
        "precision": {"train": "fp32"},
        "rollout": {"agreement_floor": None},  # routes and log-probs are made up
        "routing": {
            "source": source,
            "cached_tokens": 9,
            "predictor_lr_multiplier": 0.01 / POLICY_LR,
            "predictor_decay": 0.0,
        },
    }
    for section, values in overrides.items():
        base[section] = {**base.get(section, {}), **values}
    return build_config(base)


def make_trainer(config: Config) -> Trainer:
    ranks = parallel.initialize(config.parallel, config.seed)
    return build_trainer(config, ranks, total_updates=config.steps, support=SamplingSupport(0.7))


@dataclass(frozen=True)
class Watched(Policy):
    """The policy's own objective, which tells the log-probs that it saw."""

    seen: dict[int, torch.Tensor] = field(default_factory=dict)
    """Of each micro-batch, by its id."""
    per_token = False  # whole micro-batches

    def __call__(self, batch: Batch, outputs: HeadOutputs) -> Result:
        self.seen.setdefault(id(batch), outputs.log_probs.detach().clone())
        return super().__call__(batch, outputs)


def update(trainer: Trainer, batches, *, learn: bool = False) -> tuple[dict[str, float], list[torch.Tensor]]:
    """One update by the policy's own objective; returns its figures and sums, and the log-probs of each micro-batch at its
    start."""
    objective = Watched(trainer.config)
    done = trainer.update(batches, objective, learn_routes=learn)
    seen = [objective.seen[id(batch)] for batch in batches if id(batch) in objective.seen]
    return figures(done.metrics) | done.sums, seen


def slots(sums: dict[str, float | np.ndarray]) -> dict[str, float]:
    """With a key for each number of an array."""
    flat: dict[str, float] = {}
    for key, value in sums.items():
        flat |= {f"{key}/{i}": float(v) for i, v in enumerate(value)} if np.ndim(value) else {key: value}
    return flat


def plant_predictors(trainer: Trainer, scale: float) -> None:
    for layer, router in routers(trainer.chunks):
        generator = torch.Generator().manual_seed(layer)
        router.predictor.weight.copy_(scale * torch.randn(router.predictor.weight.shape, generator=generator))


def log_probs(trainer: Trainer, batches, mine: list[int]) -> dict[tuple[int, int], float]:
    """(sample, position) -> scored log-prob, from all ranks that hold some."""
    found: dict[tuple[int, int], float] = {}
    for batch in batches:
        if "old_log_probs" in batch.fields:
            for t in batch.mask.nonzero()[:, 0].tolist():
                sample = mine[batch.samples[int(batch.segments.ids[t])]]
                found[sample, int(batch.position_ids[0, t])] = float(batch["old_log_probs"][t])
    merged: dict[tuple[int, int], float] = {}
    for part in trainer.ranks.gather(found):
        merged |= part
    return merged


def replay(trainer: Trainer, samples: list[Sequence], source: str) -> dict:
    """Score and two updates. `identical`: whether the first update started from exactly the scored log-probs."""
    trainer.config = replace(trainer.config, routing=replace(trainer.config.routing, source=source))
    ranks = trainer.ranks
    mine = list(range(len(samples)))[ranks.data_rank :: ranks.data_size]
    batches = trainer.pack([samples[i] for i in mine])
    layouts.score(trainer, batches)
    result: dict = {"log_probs": log_probs(trainer, batches, mine)}
    first, current = update(trainer, batches)
    scored = [b["old_log_probs"] for b in batches if "old_log_probs" in b.fields]
    pairs = list(zip(scored, current, [b.mask for b in batches], strict=False))
    result["identical"] = all(ranks.gather(all(torch.equal(a[m], b[m]) for a, b, m in pairs)))
    result["compared"] = sum(ranks.gather(len(pairs)))
    result["sums"] = [first]
    if source == "pr2":
        result["sums"].append(update(trainer, batches, learn=True)[0])
        found = {layer: router.predictor.weight for layer, router in routers(trainer.chunks)}
        result["predictors"] = ranks.gather({layer: weight.cpu().numpy().copy() for layer, weight in found.items()})
    result["sums"] = [{k: v for k, v in slots(sums).items() if k.startswith("routing/")} for sums in result["sums"]]
    result["without_route"] = ranks.total(sum(b.without_route for b in batches) if trainer.reports else 0)
    return result


def exported_predictors(trainer: Trainer) -> dict[str, np.ndarray]:
    """As a push sends them: whole, by name."""
    plan = trainer.model.export_plan(trainer.chunks, predictors=True)
    exported = trainer.model.export_hf_weights(trainer.chunks, plan)
    return {name: t.cpu().numpy().copy() for name, t in exported if name.endswith(".predictor.weight")}


def replayed_weights(trainer: Trainer, seed: int) -> dict[str, torch.Tensor]:
    """What a router of the model makes of random logits [T, E] with random routes [T, k]: weights [T, E]."""
    layer, router = next(routers(trainer.chunks))
    generator, experts = torch.Generator().manual_seed(seed), router.num_experts
    logits = 3 * torch.randn(40, experts, generator=generator)
    ids = torch.stack([torch.randperm(experts, generator=generator)[: router.topk] for _ in logits])
    ones = torch.ones(len(logits), dtype=torch.bool)
    table = RouteTable((layer,), ones, torch.arange(0), engine=ids[:, None].to(route_dtype(experts)))
    with router.router_replay.during(RoutePass(table, "r3", experts, "log_probs")):
        weights, _ = router.routing(logits[:, None])
    return {"logits": logits, "ids": ids, "weights": weights.detach()}


def replays(cases: list[tuple[str, list[Sequence], dict]], sources: list[str]) -> list[dict[str, dict]]:
    """Several (model, samples, layout) of one world size, one after the other on the same processes, all sources each."""
    results = []
    for model, samples, layout in cases:
        trainer = make_trainer(make_config(model, layout, "pr2"))
        plant_predictors(trainer, 0.3)
        beside = {"exported": exported_predictors(trainer), "weights": replayed_weights(trainer, len(results))}
        results.append({source: replay(trainer, samples, source) | beside for source in sources})
        parallel_state.destroy_model_parallel()
    return results
