"""Rules of reinforcement learning: the algorithm, and the servers that sample. Does not import torch."""

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
        f"correction.{key} with correction.bypass: bypass computes no log-probs of the old policy, so there is no"
        f" separate mismatch ratio; set correction.bypass: false, or {key}: {valid}"
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
    _ahead(
        lambda algorithm: algorithm.on_policy, "algorithm.on_policy: older weights would have sampled the responses"
    ),
    _ahead(
        lambda routing: routing.source == "pr3",
        "routing.source: pr3: SGLang predicts from the last push, but older weights and predictors would have chosen"
        " the routes",
    ),
    Rule(
        lambda rollout, correction: rollout.max_staleness and not correction.bypass and correction.mode == "none",
        "rollout.max_staleness = {rollout.max_staleness} trains on responses of older weights without a correction;"
        " set correction.mode: truncate with high: 2.0, or correction.bypass: true (the ratio in the loss is then"
        " computed from SGLang's log-probs)",
    ),
    _filtered(
        lambda batch: batch.samples_per_prompt < 2,
        "batch.samples_per_prompt: 1: a group of one response has no spread; set 2 or more",
    ),
    _filtered(lambda rewards: rewards.models, "rewards.models, which score only after the rollout: leave them out"),
    _filtered(lambda rewards: rewards.judges, "rewards.judges, which score only after the rollout: leave them out"),
    _filtered(
        lambda routing: routing.source == "pr3" and routing.features == "engine",
        "routing.source: pr3: it decides before the rollout which responses its predictors learn from",
    ),
    _over_sampled(lambda rollout: rollout.load, "with rollout.load: no responses are sampled; set over_sample_rate: 0"),
    _over_sampled(
        lambda rollout: rollout.program == "openai_agent",
        "with rollout.program: openai_agent: an agent of your own cannot be aborted; set over_sample_rate: 0",
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
    # Other waits for outside systems do not run into the timeout of a collective (`Ranks.patiently`).
    Rule(
        lambda rollout, sync, parallel, world_size: (
            not rollout.load and world_size > 1 and sync.timeout_s >= parallel.timeout_s
        ),
        "parallel.timeout_s = {parallel.timeout_s:g} s is not longer than sync.timeout_s = {sync.timeout_s:g} s:"
        " during a push, the other processes wait for the first process, which waits for servers; increase"
        " parallel.timeout_s",
    ),
)
"""Rules for the rollout engine: when SGLang samples, and with which settings."""

LEARNING = (
    Rule(
        lambda algorithm, critic, steps: algorithm.advantage == "gae" and critic.warmup_steps >= steps,
        "critic.warmup_steps = {critic.warmup_steps} leaves none of the {steps} steps for training the policy;"
        " decrease it, or increase steps",
    ),
    Rule(
        lambda algorithm, batch: algorithm.kl.target is not None and batch.responses >= 5 * algorithm.kl.horizon,
        lambda algorithm, batch: (
            f"algorithm.kl.horizon = {algorithm.kl.horizon}: a step has {batch.responses} responses, five horizons or"
            f" more, and each horizon may change the coefficient by a fifth; set horizon: {10 * batch.responses}"
        ),
    ),
    Rule(
        lambda algorithm: algorithm.advantage == "tilt" and algorithm.whiten,
        "algorithm.whiten with advantage = tilt: the weights of tilt are never below 0, but whitened ones would be;"
        " set whiten: null",
    ),
    Rule(
        lambda algorithm, correction: algorithm.aggregation == "sequence_sum" and correction.denominator == "weights",
        "correction.denominator = weights divides by a sum of weights, and algorithm.aggregation = sequence_sum by a"
        " constant; set denominator: kept_sequences or sampled, or aggregation: token_mean",
    ),
    Rule(
        lambda routing, batch: routing.source in PREDICTING and batch.epochs > 1,
        "batch.epochs = {batch.epochs} with routing.source = {routing.source}: predictors assume that one update"
        " trains on each response; set epochs: 1, or routing.source: r2 or r3",
    ),
    Rule(
        lambda correction: (correction.low or 0.0) > 1 or (correction.high is not None and correction.high < 1),
        "correction.low = {correction.low}, high = {correction.high} exclude a ratio of 1, which means no mismatch:"
        " the bounds apply to the ratio trainer / SGLang itself; set low: 0.8 and high: 1.2 for a threshold of 0.2",
    ),
    _bypassed("veto", lambda correction: correction.veto is not None, "null"),
    _bypassed("mode", lambda correction: correction.mode != "none", "none"),
    _bypassed("reject", lambda correction: correction.reject != "none", "none"),
    Rule(
        lambda correction, routing, batch: (
            correction.bypass and routing.source in ("r2", *PREDICTING) and batch.updates > 1
        ),
        "correction.bypass skips the forward pass in which routing.source = {routing.source} records the routes; set"
        " bypass: false, or routing.source: r3",
    ),
    Rule(
        lambda rollout, routing: rollout.gates and not asks_routes(rollout, routing),
        "rollout.gates = true needs routes, which nothing asks for: set rollout.routes: true",
    ),
    Rule(
        lambda routing, model: routing.source != "none" and model.moe_router_fusion,
        "routing.source = {routing.source} with model.moe_router_fusion: the fused router would ignore the routes;"
        " set moe_router_fusion: false, or routing.source: none",
    ),
    Rule(
        lambda routing, batch: routing.source in PREDICTING and batch.updates_per_step < 2,
        "routing.source = {routing.source} predicts how routers move between the updates of a rollout batch, but"
        " batch.updates_per_step = 1 makes only one update: increase it, or use r2 or r3",
    ),
    Rule(
        lambda sync, routing: sync.refresh.when == "drift" and routing.source in FROM_ENGINE,
        "sync.refresh.when = drift with routing.source = {routing.source}: replayed routes must come from the trained"
        " weights, but SGLang's weights would be older; set sync.refresh.when: always, or routing.source: r2",
    ),
    Rule(
        lambda sync, correction: sync.refresh.when == "drift" and not correction.bypass and correction.mode == "none",
        "sync.refresh.when = drift samples with weights that are up to {sync.refresh.max_staleness} steps old without"
        " a correction; set correction.bypass: true (the ratio in the loss is then computed from SGLang's log-probs),"
        " or correction.mode: truncate with high: 2.0",
    ),
    _off_policy(
        lambda batch: batch.updates_per_step > 1,
        "batch.updates_per_step = {batch.updates_per_step}",
        "the later updates of a step train a policy that has changed since sampling",
        "set it to 1",
    ),
    _off_policy(
        lambda batch: batch.epochs > 1,
        "batch.epochs = {batch.epochs}",
        "the later updates of a step train a policy that has changed since sampling",
        "set it to 1",
    ),
    _off_policy(
        lambda sync: sync.refresh.when == "drift",
        "sync.refresh.when = drift",
        "SGLang's weights may be several steps old",
        "set it to always",
    ),
    _off_policy(
        lambda rollout: rollout.load,
        "rollout.load",
        "its responses were sampled with the weights of another run",
        "leave it out",
    ),
    _off_policy(
        lambda correction: correction.bypass,
        "correction.bypass",
        "the ratio is computed from SGLang's log-probs, which never equal the trainer's exactly",
        "set it to false",
    ),
    _off_policy(
        lambda lora: lora.rank and lora.dropout > 0,
        "lora.dropout = {lora.dropout:g}",
        "updates drop a part of the adapter that sampled",
        "set it to 0",
    ),
    _unmerged(
        lambda routing: routing.source == "pr3",
        "routing.source = pr3",
        "SGLang's predictors would not get the updates of the trainer's predictors",
        "set it to pr2 or r3",
    ),
    _unmerged(
        lambda rollout, routing: rollout.record and asks_routes(rollout, routing),
        "rollout.record with SGLang's routes",
        "a record identifies its routes by a digest of all weights, which is not computed",
        "set rollout.record: false",
    ),
    _unmerged(
        lambda lora: lora.kind == "dora", "lora.kind = dora", "SGLang does not support DoRA", "set lora.kind: lora"
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
        "SGLang's base weights would differ from the trainer's",
        "set precision.rollout: bf16",
    ),
)
"""Rules for training: what is learned from samples, and how often."""


LOOSE_OF_SEQUENCES = 0.05
"""Clip bound above which a clip of sequence-level ratios (geometric means over tokens) was probably meant for token ratios."""


def loss_hints(algorithm: AlgorithmConfig) -> list[str]:
    """Return lines to print at the start of a run whose settings seem to be meant for another loss."""
    hints = []
    clips = [clip for clip in (algorithm.clip_low, algorithm.clip_high) if clip is not None]
    if algorithm.loss == "gspo" and max(clips, default=0.0) >= LOOSE_OF_SEQUENCES:
        hints.append(
            "algorithm.loss: gspo clips the ratio of whole sequences, which hardly ever reaches clip_low ="
            f" {algorithm.clip_low}, clip_high = {algorithm.clip_high}; such bounds fit token ratios, and the GSPO"
            " paper uses 3e-4 and 4e-4"
        )
    if algorithm.loss in ("gspo", "sapo") and algorithm.aggregation != "sequence_mean":
        hints.append(
            f"algorithm.loss: {algorithm.loss} with aggregation: {algorithm.aggregation}: the paper uses the mean over"
            " sequences of each sequence's token mean; consider aggregation: sequence_mean"
        )
    return hints
