"""What each rank does in the replay tests: score, then update, with the real trainer under one parallel layout."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import numpy as np
import torch
from ranks import end_layout

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.config import Config
from megatron_rl.config.load import build_config
from megatron_rl.data.packing import Batch
from megatron_rl.data.sequence import Sequence
from megatron_rl.distributed import parallel
from megatron_rl.hooks.predictors import Predictors
from megatron_rl.hooks.routing_replay import RoutingReplay
from megatron_rl.metrics.reduce import Metrics, figures
from megatron_rl.models.router import routers
from megatron_rl.models.shape import engine_routes
from megatron_rl.routing.measure import Load
from megatron_rl.routing.passes import RoutePass
from megatron_rl.routing.replay import ReplayRoutes
from megatron_rl.routing.table import RouteShape, RouteTable, route_dtype
from megatron_rl.run.update_hooks import update_hooks
from megatron_rl.trainer.hooks import UpdateContext, UpdateHook
from megatron_rl.trainer.objective import HeadOutputs, Policy, Result
from megatron_rl.trainer.trainer import Trainer, build_trainer
from tests.trainer import layouts

logging.getLogger("megatron").setLevel(logging.ERROR)

POLICY_LR = 1e-10


def shape_of(hf_config) -> RouteShape:
    return engine_routes(hf_config).shape


def random_routes(rng: np.random.Generator, shape: RouteShape, tokens: int, missing: float = 0.1) -> np.ndarray:
    """Different experts for every token and layer, so that a slice of the wrong place shows; some tokens without."""
    routes = shape.empty(tokens)
    for token in range(tokens):
        if rng.random() > missing:
            for layer in range(len(shape.moe_layers)):
                routes[token, layer] = rng.permutation(shape.experts)[: shape.topk]
    return routes


def make_samples(seed: int, count: int, vocab: int, shape: RouteShape) -> list[Sequence]:
    """The parity tests' random sequences, with random routes and gates."""
    samples = layouts.make_samples(seed, count, vocab)
    rng = np.random.default_rng(seed)
    for sample in samples:
        sample.routes = random_routes(rng, shape, sample.inputs)
        known = sample.routes[..., :1] != 255
        sample.gates = np.where(known, 1 - rng.random(sample.routes.shape, np.float32), np.float32(0))
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
    hooks = update_hooks(config)
    return build_trainer(config, ranks, total_updates=config.steps, support=SamplingSupport(0.7), hooks=hooks)


@dataclass(frozen=True)
class Watched(Policy):
    """The policy's own objective, which tells the log-probs that it saw."""

    seen: dict[int, torch.Tensor] = field(default_factory=dict)
    """Of each micro-batch, by its id."""
    per_token = False  # whole micro-batches

    def __call__(self, batch: Batch, outputs: HeadOutputs) -> Result:
        self.seen.setdefault(id(batch), outputs.log_probs.detach().clone())
        return super().__call__(batch, outputs)


def update(trainer: Trainer, batches, number: int = 0) -> tuple[Metrics, list[torch.Tensor]]:
    """An update of a rollout batch by the policy's own objective; returns its metrics, and the log-probs of each micro-batch at
    its start. Predictors learn in all but number 0."""
    objective = Watched(trainer.config)
    done = trainer.update(batches, objective, UpdateContext(number))
    seen = [objective.seen[id(batch)] for batch in batches if id(batch) in objective.seen]
    return done.metrics, seen


def sums_of(metrics: Metrics) -> dict[str, float]:
    """What metrics are figures of: NAME/J of counts, NAME and NAME/tokens of a mean."""
    flat: dict[str, float] = {}
    for name, metric in metrics.items():
        first, *tokens = metric.parts
        flat |= {f"{name}/{j}": float(count) for j, count in enumerate(first)} if np.ndim(first) else {name: first}
        flat |= {f"{name}/tokens": float(number) for number in tokens}
    return flat


def loads_of(trainer: Trainer, batches) -> dict[str, float]:
    """Tokens of each expert, over all processes."""
    mine = [(layer, load) for batch in batches for layer, load in batch.routes.left(Load).items()]
    found: dict[str, float] = {}
    for layer, load in (one for part in trainer.ranks.gather(mine) for one in part):
        for expert, count in enumerate(load.tolist()):
            key = f"routing/layer_{layer:02}/load/{expert}"
            found[key] = found.get(key, 0.0) + count
    return found


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


def replay(trainer: Trainer, samples: list[Sequence], source: str, hooks: list[UpdateHook]) -> dict:
    """Score and two updates. `identical`: whether the first update started from exactly the scored log-probs."""
    routes = RoutingReplay("r3", gates=True, give_up_below=0.75) if source == "gated r3" else RoutingReplay(source)
    routes.attach(trainer)
    trainer.hooks = [routes, *(h for h in hooks if isinstance(h, Predictors) and source == "pr2")]
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
    done = [first]
    if source == "pr2":
        done.append(update(trainer, batches, 1)[0])
        found = {layer: router.predictor.weight for layer, router in routers(trainer.chunks)}
        result["predictors"] = ranks.gather({layer: weight.cpu().numpy().copy() for layer, weight in found.items()})
    of_layers = [{k: v for k, v in sums_of(metrics).items() if k.startswith("routing/layer_")} for metrics in done]
    # How busy the busiest is turns on single tokens: all counts are compared instead.
    result["sums"] = [{k: v for k, v in sums.items() if "/load_max" not in k} for sums in of_layers]
    result["sums"][0] |= loads_of(trainer, batches)
    result["without_route"] = figures(first).get("routing/fallback_tokens")
    return result


def exported_predictors(trainer: Trainer) -> dict[str, np.ndarray]:
    """As a push sends them: whole, by name."""
    plan = trainer.model.export_plan(trainer.chunks, foreign=True)
    exported = trainer.model.export_hf_weights(trainer.chunks, plan)
    return {name: t.cpu().numpy().copy() for name, t in exported if name.endswith(".predictor.weight")}


def replayed_weights(trainer: Trainer, seed: int) -> dict[str, torch.Tensor]:
    """What a router of the model makes of random logits [T, E] with random routes [T, k]: weights [T, E]."""
    layer, router = next(routers(trainer.chunks))
    generator, experts = torch.Generator().manual_seed(seed), router.num_experts
    logits = 3 * torch.randn(40, experts, generator=generator)
    ids = torch.stack([torch.randperm(experts, generator=generator)[: router.topk] for _ in logits])
    ones = torch.ones(len(logits), dtype=torch.bool)
    shape = RouteShape((layer,), experts, router.topk)
    table = RouteTable(shape, ones, torch.arange(0), engine=ids[:, None].to(route_dtype(experts)))
    with router.router_replay.during(RoutePass([ReplayRoutes(table, "r3")])):
        weights, _ = router.routing(logits[:, None])
    return {"logits": logits, "ids": ids, "weights": weights.detach()}


def replays(cases: list[tuple[str, list[Sequence], dict, list[str]]]) -> list[dict[str, dict]]:
    """Several (model, samples, layout, sources) of one world size, one after the other on the same processes."""
    results = []
    for model, samples, layout, sources in cases:
        trainer = make_trainer(make_config(model, layout, "pr2"))
        plant_predictors(trainer, 0.3)
        beside = {"exported": exported_predictors(trainer), "weights": replayed_weights(trainer, len(results))}
        hooks = trainer.hooks
        results.append({source: replay(trainer, samples, source, hooks) | beside for source in sources})
        end_layout()
    return results
