"""Time and memory of scoring and updates in several variants, in turns on the same rollout batch. Prints one JSON line.

`benchmarks/step.py --compare` starts this script. A variant is a route source (none, r2, ...), or one of the following, without
route replay:

- pruned: vocabulary pruning with the default rho
- corrected: masked importance sampling with the veto
- vp2o_transform: only attraction and repulsion
- vp2o: also the orthogonality loss
- vp2o_region: also a trust region, with a limit that no step exceeds
- critic: PPO's critic, with values of all states and its own updates
- lora: adapters of rank 16 on attention and experts instead of all weights, in a separate trainer
- identical: precision.identical, in a separate trainer

Variants take turns in one process, because the speed of a machine varies by more than the differences to be measured. The
figures are medians over rounds of the seconds of each variant, and of the difference to the first variant in the same round,
with quartiles. peak_bytes is the largest amount that one update holds beyond the memory at its start. A variant of VP2O also
reports the size of the prototypes and anchors that it keeps between two updates, and the size of the fp32 gradients of one
layer's experts. The critic and the adapters report the size of their model, gradients and optimizer state; with adapters the
first variant does so too.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import get_args

import numpy as np
import torch
from peak_memory import peak_bytes

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.config import PREDICTING, Config, CorrectionConfig, LoRAConfig, PruningConfig, VP2OConfig
from megatron_rl.config.load import build_config
from megatron_rl.config.plan import critic_config
from megatron_rl.data.packing import Batch
from megatron_rl.data.sequence import Sequence
from megatron_rl.distributed import parallel
from megatron_rl.hooks.predictors import Predictors
from megatron_rl.hooks.routing_replay import RoutingReplay
from megatron_rl.routing.replay import RouteSource
from megatron_rl.run.update_hooks import update_hooks
from megatron_rl.trainer.critic import Critic
from megatron_rl.trainer.hooks import UpdateContext, UpdateHook
from megatron_rl.trainer.objective import Policy
from megatron_rl.trainer.optimizer import torch_optimizers
from megatron_rl.trainer.trainer import Trainer, build_trainer
from megatron_rl.vp2o.transform import Stein
from megatron_rl.vp2o.trust_region import TrustRegion

WARM_UP = 2
VP2O = {
    "vp2o_transform": VP2OConfig(enabled=True, orthogonality=0.0),
    "vp2o": VP2OConfig(enabled=True),
    "vp2o_region": VP2OConfig(enabled=True, trust_region=2.0),
}
VARIANTS = (*get_args(RouteSource), "pruned", "corrected", *VP2O, "critic", "lora", "identical")
ADAPTERS = LoRAConfig(rank=16, alpha=16.0)


def make_samples(count: int, prompt: int, new: int, vocab: int) -> list[Sequence]:
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(count):
        sample = Sequence(tokens=rng.integers(4, vocab, prompt + new).astype(np.int32), prompt_length=prompt)
        sample["loss_mask"], sample["rollout_log_probs"] = True, 0.0
        sample["advantages"] = float(rng.normal())
        samples.append(sample)
    return samples


Hooks = dict[str, list[UpdateHook]]
"""Hooks by variant. Each variant has its own hooks, because hooks keep state of the last update."""


def make_hooks(trainer: Trainer, variants: list[str]) -> Hooks:
    """Make the hooks of all variants. All predicting variants share the trainer's own predictors."""
    hooks: Hooks = {}
    for variant in variants:
        source = variant if variant in get_args(RouteSource) else "none"
        hooks[variant] = [RoutingReplay(source)]
        if source in PREDICTING:
            predictors = next(hook for hook in trainer.hooks if isinstance(hook, Predictors))
            predictors.config = replace(predictors.config, source=source)
            hooks[variant].append(copy.copy(predictors))
        if variant in VP2O:
            stein = Stein(VP2O[variant])
            others = [TrustRegion(VP2O[variant], stein)] if VP2O[variant].trust_region else []
            for hook in (stein, *others):
                hook.attach(trainer)
                hooks[variant].append(hook)
    return hooks


def use(trainer: Trainer, variant: str, hooks: Hooks) -> None:
    pruning, correction = PruningConfig(enabled=variant == "pruned"), CorrectionConfig()
    if variant == "corrected":
        correction = CorrectionConfig(mode="mask", low=0.5, high=2.0, veto=1e-4)
    trainer.config = replace(trainer.config, pruning=pruning, correction=correction)
    trainer.hooks = hooks[variant]
    trainer.support = SamplingSupport.from_config(trainer.config.rollout.sampling, pruning)


def make_critic(config: Config, ranks: parallel.Ranks) -> Trainer:
    """Build the trainer of a critic that starts from the policy's weights."""
    own = critic_config(config)
    return build_trainer(own, ranks, total_updates=config.steps, support=SamplingSupport(), value_head=True)


def one_round(
    trainers: dict[str, Trainer],
    critic: Critic | None,
    samples: list[Sequence],
    updates: int,
    variants: list[str],
    hooks: Hooks,
) -> dict[str, dict[str, float]]:
    """Measure the seconds of packing and scoring, and of all updates, of one rollout batch, by variant.

    Variants take turns at every update, each time in another order, so that compared measurements are close in time.
    """
    seconds = {variant: {"score": 0.0, "train": 0.0} for variant in variants}
    per_update = len(samples) // updates
    packed: dict[tuple[str, int], list[Batch]] = {}
    shares = [samples[index * per_update : (index + 1) * per_update] for index in range(updates)]

    for index in range(updates):
        for variant in random.sample(variants, len(variants)):
            trainer = trainers[variant]
            use(trainer, variant, hooks)
            start = time.perf_counter()
            batches = packed[variant, index] = trainer.pack(shares[index])
            trainer.compute_fields(batches, Policy(trainer.config).needs, UpdateContext(index))
            if variant == "critic" and critic and index == 0:
                critic.score(shares)
            seconds[variant]["score"] += time.perf_counter() - start
    for index in range(updates):
        for variant in random.sample(variants, len(variants)):
            trainer = trainers[variant]
            use(trainer, variant, hooks)
            start = time.perf_counter()
            if index == 0:
                trainer.weights_pushed()  # lets the trust region set its anchor
            batches = packed[variant, index]
            trainer.update(batches, Policy(trainer.config), UpdateContext(index))
            if variant == "critic" and critic:
                critic.update(index, torch.ones(sum(sample.response_length for sample in shares[index])))
            seconds[variant]["train"] += time.perf_counter() - start
    return seconds


def measure_memory(
    trainer: Trainer, critic: Critic | None, samples: list[Sequence], variant: str, hooks: Hooks
) -> dict[str, float]:
    """Return the peak bytes of one update beyond the memory before it, and the bytes that VP2O or a critic keep."""
    use(trainer, variant, hooks)
    batches = trainer.pack(samples)
    objective = Policy(trainer.config)
    trainer.compute_fields(batches, objective.needs)
    figures: dict[str, float] = {"peak_bytes": peak_bytes(lambda: trainer.update(batches, objective))}
    if variant == "critic" and critic:
        critic.score([samples])
        returns = torch.ones(sum(sample.response_length for sample in samples))
        figures["critic_peak_bytes"] = peak_bytes(lambda: critic.update(0, returns))
        figures["kept_bytes"] = sum(_sizes(critic.trainer))
    for stein in (hook for hook in trainer.hooks if isinstance(hook, Stein)):
        kept = list(stein.experts._prototypes.values())
        kept += [m for one in stein._interactions.values() for m in (one.kernel, one.attract, one.repel)]
        regions = [hook for hook in trainer.hooks if isinstance(hook, TrustRegion)]
        anchors = [anchor for region in regions for anchor in region._anchors.values()]
        kept += [tensor for anchor in anchors for tensor in vars(anchor).values() if tensor is not None]
        figures["kept_bytes"] = sum(tensor.numel() * tensor.element_size() for tensor in kept)
        layer = next(iter(stein.experts.layers.values()))
        parameters = {id(one.parameter): one.parameter for slices in layer.slices.values() for one in slices}
        figures["layer_gradient_bytes"] = sum(4 * p.numel() for p in parameters.values())
    return figures


def _sizes(trainer: Trainer) -> Iterator[int]:
    """Yield the bytes of a trainer's weights, gradient buffers and optimizer state."""
    parameters = [p for chunk in trainer.chunks for p in chunk.parameters()]
    yield from (p.numel() * p.element_size() for p in parameters)
    trained = [p.main_grad for p in parameters if p.requires_grad]  # pyright: ignore[reportAttributeAccessIssue]
    yield from (gradient.numel() * gradient.element_size() for gradient in trained)
    for inner in torch_optimizers(trainer.optimizer):
        yield from (s.numel() * s.element_size() for state in inner.state.values() for s in state.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--sequences", type=int, required=True)
    parser.add_argument("--prompt-tokens", type=int, required=True)
    parser.add_argument("--new-tokens", type=int, required=True)
    parser.add_argument("--updates", type=int, required=True)
    parser.add_argument("--micro-batch-tokens", type=int, required=True)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--variants", nargs="+", required=True, choices=VARIANTS)
    args = parser.parse_args()

    # Built with predictors; variants without prediction do not use them.
    config = build_config(
        {
            "steps": 1_000_000,
            "model": {"path": args.model},
            "batch": {"tokens_per_micro_batch": args.micro_batch_tokens, "updates_per_step": args.updates},
            "precision": {"train": args.precision},
            "rollout": {"agreement_floor": None},  # log-probs are made up
            "optimizer": {"lr": 1e-7},
            "routing": {"source": "pr2" if args.updates > 1 else "none"},
            "vp2o": {"enabled": any(variant in VP2O for variant in args.variants), "orthogonality": 0.0},
        }
    )
    ranks = parallel.initialize(config.parallel, config.seed)
    trainer = build_trainer(
        config, ranks, total_updates=config.steps, support=SamplingSupport(), hooks=update_hooks(config)
    )
    hooks = make_hooks(trainer, args.variants)
    critic = Critic(make_critic(config, ranks), 0.2) if "critic" in args.variants else None
    trainers = dict.fromkeys(args.variants, trainer)
    others = {
        "lora": replace(config, lora=ADAPTERS),
        "identical": replace(config, precision=replace(config.precision, identical=True)),
    }
    for variant in others.keys() & trainers.keys():
        own = {"total_updates": config.steps, "support": SamplingSupport()}
        trainers[variant] = build_trainer(others[variant], ranks, **own)
    vocab = trainer.model.hf_config.vocab_size
    samples = make_samples(args.sequences, args.prompt_tokens, args.new_tokens, vocab)
    rounds = []
    for _ in range(WARM_UP + args.rounds):
        rounds.append(one_round(trainers, critic, samples, args.updates, args.variants, hooks))
    rounds = rounds[WARM_UP:]
    first = args.variants[0]
    result = {}
    for variant in args.variants:
        whole = [sum(one[variant].values()) for one in rounds]
        added = [a - sum(one[first].values()) for a, one in zip(whole, rounds, strict=True)]
        result[variant] = {part: statistics.median(one[variant][part] for one in rounds) for part in ("score", "train")}
        low, result[variant]["added_s"], high = statistics.quantiles(added, n=4)
        result[variant]["added_quartiles_s"] = [low, high]
    for variant in args.variants:
        result[variant] |= measure_memory(
            trainers[variant], critic, samples[: len(samples) // args.updates], variant, hooks
        )
        if "lora" in trainers and variant in (first, "lora"):
            result[variant]["kept_bytes"] = sum(_sizes(trainers[variant]))
        result[variant]["added_peak_bytes"] = result[variant]["peak_bytes"] - result[first]["peak_bytes"]
    print(json.dumps({"rounds": len(rounds), "variants": result}))


if __name__ == "__main__":
    main()
