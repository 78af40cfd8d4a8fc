"""Rules of reinforcement learning: what is learned and how, and the engine that samples for it. No torch."""

from __future__ import annotations

from collections.abc import Callable

from megatron_rl.checks.refusals import Rule
from megatron_rl.config import FROM_ENGINE, PREDICTING, AlgorithmConfig
from megatron_rl.rollout.dynamic_sampling import prompts_to_ask
from megatron_rl.servers.flags import asks_routes
from megatron_rl.sync.transports import instead, transport_class


def _off_policy(when: Callable[..., object], key: str, why: str, remedy: str) -> Rule:
    text = f"{key} with algorithm.on_policy: {why}; {remedy}, or set algorithm.on_policy: false"
    return Rule(when, text, also=lambda algorithm: algorithm.on_policy)


def _ahead(when: Callable[..., object], other: str) -> Rule:
    text = f"rollout.max_staleness with {other}; set max_staleness: 0"
    return Rule(when, text, also=lambda rollout: rollout.max_staleness)


def _filtered(when: Callable[..., object], other: str) -> Rule:
    key = "rollout.dynamic_sampling"
    text = f"{key} with {other}, or set {key}.max_rounds: 0"
    return Rule(when, text, also=lambda rollout: rollout.dynamic_sampling.max_rounds)


def _over_sampled(when: Callable[..., object], problem: str) -> Rule:
    text = f"rollout.over_sample_rate = {{rollout.over_sample_rate:g}} {problem}"
    return Rule(when, text, also=lambda rollout: rollout.over_sample_rate)


def _bypassed(key: str, when: Callable[..., object], valid: str) -> Rule:
    text = (
        f"correction.{key} with correction.bypass: there are no log-probs of the old policy to compare the engine's"
        f" with, as its ratio is part of the loss's; set correction.bypass: false, or {key}: {valid}"
    )
    return Rule(when, text, also=lambda correction: correction.bypass)


def _unmerged(when: Callable[..., object], key: str, why: str, remedy: str) -> Rule:
    text = f"sync.adapters = unmerged: {key}: {why}; {remedy}, or set sync.adapters: merged"
    return Rule(when, text, also=lambda lora, sync: lora.rank and sync.adapters == "unmerged")


ENGINE = (
    Rule(
        lambda rollout, sync: rollout.colocate and not rollout.load and transport_class(sync.transport).not_on_one_gpu,
        lambda sync: (
            f"rollout.colocate with sync.transport = {sync.transport}:"
            f" {transport_class(sync.transport).not_on_one_gpu}; set sync.transport: {instead(colocate=True)}"
        ),
    ),
    _ahead(
        lambda rollout: rollout.colocate,
        "rollout.colocate: servers that share the trainer's GPUs sleep while it learns",
    ),
    _ahead(lambda rollout: rollout.load, "rollout.load: no server is asked"),
    _ahead(lambda algorithm: algorithm.on_policy, "algorithm.on_policy: older weights have sampled what is learned"),
    _ahead(
        lambda routing: routing.source == "pr3",
        "routing.source: pr3: its engine looks ahead from the last push, and older weights and predictors have routed",
    ),
    Rule(
        lambda rollout, correction: rollout.max_staleness and not correction.bypass and correction.mode == "none",
        "rollout.max_staleness = {rollout.max_staleness} learns from older weights' responses, and nothing corrects"
        " for it; set correction.mode: truncate with high: 2.0, or correction.bypass: true (the loss's ratio starts"
        " from the engine's log-probs)",
    ),
    _filtered(
        lambda batch: batch.samples_per_prompt < 2,
        "batch.samples_per_prompt: 1: a group of one response has no spread; set 2 or more",
    ),
    _filtered(lambda rewards: rewards.models, "rewards.models, which score behind the rollout: leave them out"),
    _filtered(lambda rewards: rewards.judges, "rewards.judges, which score behind the rollout: leave them out"),
    _filtered(
        lambda routing: routing.source == "pr3" and routing.features == "engine",
        "routing.source: pr3: which responses its predictors learn from is settled before they are asked for",
    ),
    _over_sampled(lambda rollout: rollout.load, "with rollout.load: no server is asked; set over_sample_rate: 0"),
    _over_sampled(
        lambda rollout: rollout.program == "openai_agent",
        "with rollout.program: openai_agent: an agent of your own cannot be ended from outside; set over_sample_rate:"
        " 0",
    ),
    Rule(
        lambda rollout, batch: (
            rollout.over_sample_rate
            and prompts_to_ask(batch.prompts_per_step, 1 + rollout.over_sample_rate) == batch.prompts_per_step
        ),
        lambda rollout, batch: (
            f"rollout.over_sample_rate = {rollout.over_sample_rate:g} adds no prompt to batch.prompts_per_step ="
            f" {batch.prompts_per_step}; set over_sample_rate: {1 / batch.prompts_per_step:.2g}, or 0"
        ),
    ),
    # Other waits for something outside are patient (`Ranks.patiently`).
    Rule(
        lambda rollout, sync, parallel, world_size: (
            not rollout.load and world_size > 1 and sync.timeout_s >= parallel.timeout_s
        ),
        "parallel.timeout_s = {parallel.timeout_s:g} s is no longer than sync.timeout_s = {sync.timeout_s:g} s: in a"
        " push the other processes wait for the first, which waits for servers; make the former larger",
    ),
)
"""Rules of when the engine samples, and with what."""

LEARNING = (
    Rule(
        lambda algorithm, critic, steps: algorithm.advantage == "gae" and critic.warmup_steps >= steps,
        "critic.warmup_steps = {critic.warmup_steps} leaves none of the {steps} steps to the policy; make it smaller,"
        " or steps larger",
    ),
    Rule(
        lambda algorithm, batch: algorithm.kl.target is not None and batch.responses >= 5 * algorithm.kl.horizon,
        lambda algorithm, batch: (
            f"algorithm.kl.horizon = {algorithm.kl.horizon}: the {batch.responses} responses of a step are five"
            " horizons or more, each of which may take a fifth of the coefficient; set horizon:"
            f" {10 * batch.responses}"
        ),
    ),
    Rule(
        lambda algorithm: algorithm.advantage == "tilt" and algorithm.whiten,
        "algorithm.whiten with advantage = tilt: its weights are those of a likelihood, never below 0, and would no"
        " longer be; set whiten: null",
    ),
    Rule(
        lambda algorithm, correction: algorithm.aggregation == "sequence_sum" and correction.denominator == "weights",
        "correction.denominator = weights divides by a sum of weights, and algorithm.aggregation = sequence_sum by a"
        " constant; set denominator: kept_sequences or sampled, or aggregation: token_mean",
    ),
    Rule(
        lambda routing, batch: routing.source in PREDICTING and batch.epochs > 1,
        "batch.epochs = {batch.epochs} with routing.source = {routing.source}: predictors anticipate the routers of"
        " the one update that learns from a response; set epochs: 1, or routing.source: r2 or r3",
    ),
    Rule(
        lambda correction: (correction.low or 0.0) > 1 or (correction.high is not None and correction.high < 1),
        "correction.low = {correction.low}, high = {correction.high} leave out a ratio of 1, at which nothing is"
        " wrong: bounds are of the ratio trainer / engine itself; set low: 0.8 and high: 1.2 for a threshold of 0.2",
    ),
    _bypassed("veto", lambda correction: correction.veto is not None, "null"),
    _bypassed("mode", lambda correction: correction.mode != "none", "none"),
    _bypassed("reject", lambda correction: correction.reject != "none", "none"),
    Rule(
        lambda correction, routing, batch: (
            correction.bypass and routing.source in ("r2", *PREDICTING) and batch.updates > 1
        ),
        "correction.bypass leaves out the pass in which routing.source = {routing.source} records the routes; set"
        " bypass: false, or routing.source: r3",
    ),
    Rule(
        lambda rollout, routing: rollout.gates and not asks_routes(rollout, routing),
        "rollout.gates = true asks for the weights of no experts: set rollout.routes: true",
    ),
    Rule(
        lambda routing, model: routing.source != "none" and model.moe_router_fusion,
        "routing.source = {routing.source} with model.moe_router_fusion: the fused router would ignore the routes;"
        " turn the fusion off, or use routing.source = none",
    ),
    Rule(
        lambda routing, batch: routing.source in PREDICTING and batch.updates_per_step < 2,
        "routing.source = {routing.source} predicts how routers move from one update of a rollout batch to the next;"
        " batch.updates_per_step = 1 has no next: raise it, or use r2 or r3",
    ),
    Rule(
        lambda sync, routing: sync.refresh.when == "drift" and routing.source in FROM_ENGINE,
        "sync.refresh.when = drift with routing.source = {routing.source}: what is replayed must be of the weights"
        " that are trained, and the engine's would be older; set sync.refresh.when: always, or routing.source: r2",
    ),
    Rule(
        lambda sync, correction: sync.refresh.when == "drift" and not correction.bypass and correction.mode == "none",
        "sync.refresh.when = drift samples from weights that are up to {sync.refresh.max_staleness} steps old, and"
        " nothing corrects for it; set correction.bypass: true (the loss's ratio starts from the engine's log-probs),"
        " or correction.mode: truncate with high: 2.0",
    ),
    _off_policy(
        lambda batch: batch.updates_per_step > 1,
        "batch.updates_per_step = {batch.updates_per_step}",
        "the later updates of a step are of a policy that has moved",
        "set it to 1",
    ),
    _off_policy(
        lambda batch: batch.epochs > 1,
        "batch.epochs = {batch.epochs}",
        "the later updates of a step are of a policy that has moved",
        "set it to 1",
    ),
    _off_policy(
        lambda sync: sync.refresh.when == "drift",
        "sync.refresh.when = drift",
        "samples may come from weights that are steps old",
        "set it to always",
    ),
    _off_policy(
        lambda rollout: rollout.load, "rollout.load", "a record was sampled by another run's weights", "leave it out"
    ),
    _off_policy(
        lambda correction: correction.bypass,
        "correction.bypass",
        "the ratio starts from the engine's log-probs, which are never exactly the trainer's",
        "set it to false",
    ),
    _off_policy(
        lambda lora: lora.rank and lora.dropout > 0,
        "lora.dropout = {lora.dropout:g}",
        "an update's policy lacks a part of what sampled",
        "set it to 0",
    ),
    _unmerged(
        lambda routing: routing.source == "pr3",
        "routing.source = pr3",
        "the engine's predictors would not get what the trainer's have learned",
        "take pr2 or r3",
    ),
    _unmerged(
        lambda rollout, routing: rollout.record and asks_routes(rollout, routing),
        "rollout.record with routes of the engine",
        "a record says whose routes it has by a digest of all weights",
        "set rollout.record: false",
    ),
    _unmerged(
        lambda lora: lora.kind == "dora", "lora.kind = dora", "SGLang knows no lengths of rows", "set lora.kind: lora"
    ),
    _unmerged(
        lambda rollout: rollout.colocate,
        "rollout.colocate",
        "servers lose their adapters when they sleep",
        "set rollout.colocate: false",
    ),
    _unmerged(
        lambda precision: precision.rollout == "fp8",
        "precision.rollout = fp8",
        "the model's own weights would not be those that the trainer has",
        "set precision.rollout: bf16",
    ),
)
"""Rules of what is learned from samples, and of how often."""


LOOSE_OF_SEQUENCES = 0.05
"""Bound of a sequence's ratio, a geometric mean over its tokens, from which on it is taken for one of tokens."""


def loss_hints(algorithm: AlgorithmConfig) -> list[str]:
    """Lines for the start of a run whose loss has settings that are another loss's."""
    hints = []
    clips = [clip for clip in (algorithm.clip_low, algorithm.clip_high) if clip is not None]
    if algorithm.loss == "gspo" and max(clips, default=0.0) >= LOOSE_OF_SEQUENCES:
        hints.append(
            "algorithm.loss: gspo clips the ratio of whole sequences, which hardly ever reaches clip_low ="
            f" {algorithm.clip_low}, clip_high = {algorithm.clip_high}, bounds for tokens; GSPO's own are 3e-4 and"
            " 4e-4"
        )
    if algorithm.loss in ("gspo", "sapo") and algorithm.aggregation != "sequence_mean":
        hints.append(
            f"algorithm.loss: {algorithm.loss} with aggregation: {algorithm.aggregation}: its paper takes the mean"
            " over sequences of each one's mean (sequence_mean)"
        )
    return hints
