"""Rules of what the engine is asked for: its servers, when it samples, evaluations, demonstrations."""

from __future__ import annotations

import math

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.checks.rules import Rule, Rules, refuse, refuse_idle
from megatron_rl.config import (
    AlgorithmConfig,
    BatchConfig,
    Config,
    CorrectionConfig,
    EvalConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    PruningConfig,
    RewardsConfig,
    RolloutConfig,
    RoutingConfig,
    SyncConfig,
)
from megatron_rl.config.conditions import changed
from megatron_rl.config.plan import OFFLINE, Kind
from megatron_rl.rollout.dynamic_sampling import prompts_to_ask
from megatron_rl.servers.flags import asks_routes, check_extra_args, speculates
from megatron_rl.sync.transports import instead, transport_class


def sizes(
    rollout: RolloutConfig,
    batch: BatchConfig,
    parallel: ParallelConfig,
    model: ModelConfig,
    precision: PrecisionConfig,
    kind: Kind,
) -> Rules:
    """Rules of lengths and layouts."""
    server = rollout.server
    yield Rule(
        rollout.context_length - 1 > batch.tokens_per_micro_batch * parallel.context,
        f"a sequence of rollout.context_length = {rollout.context_length} tokens does not fit into"
        f" batch.tokens_per_micro_batch = {batch.tokens_per_micro_batch}; raise the latter",
    )
    yield Rule(
        model.moe_dispatcher == "allgather" and parallel.expert > 1,
        "model.moe_dispatcher = allgather wants equally many tokens on all expert-parallel ranks, which packed"
        " micro-batches do not have; use alltoall",
    )
    yield Rule(
        kind == "sample" and precision.rollout == "fp8",
        "precision.rollout = fp8 quantizes weights when they are pushed, and eval and rollout push none;"
        " set precision.rollout to bf16",
    )
    yield Rule(
        server.tensor % server.expert,
        f"rollout.server.expert = {server.expert} does not divide rollout.server.tensor = {server.tensor};"
        f" take {math.gcd(server.tensor, server.expert)}",
    )


def flags(kind: Kind, rollout: RolloutConfig, pruning: PruningConfig, routing: RoutingConfig) -> Rules:
    """Rules of flags of SGLang that contradict the config."""
    extra = rollout.server.extra_args
    if kind in OFFLINE or rollout.external:
        return
    yield Rule(
        speculates(extra) and pruning.enabled,
        "rollout.server.extra_args asks for speculative decoding, which skips the logit processor that prunes in"
        " the engine; leave it out, or set pruning.enabled: false",
    )
    yield Rule(
        speculates(extra) and asks_routes(rollout, routing),
        "rollout.server.extra_args asks for speculative decoding, for whose drafts SGLang's record of routes has no"
        " room; leave it out, or set routing.source: r2 and rollout.routes: false",
    )
    check_extra_args(extra, ())


def colocation(kind: Kind, rollout: RolloutConfig, sync: SyncConfig) -> Rules:
    """Rules of servers that cannot take turns with the trainer."""
    key, empty = ("addresses", "[]") if rollout.addresses else ("address_folder", "null")
    yield Rule(
        rollout.colocate and rollout.external,
        f"rollout.colocate with rollout.{key}: only servers that the trainer starts take turns with it; set"
        f" {key}: {empty}, or colocate: false",
    )
    if rollout.colocate and kind not in (*OFFLINE, "sample") and not rollout.load:
        why = transport_class(sync.transport).not_on_one_gpu
        yield Rule(
            why,
            f"rollout.colocate with sync.transport = {sync.transport}: {why}; set sync.transport:"
            f" {instead(colocate=True)}",
        )


def staleness(
    rollout: RolloutConfig, algorithm: AlgorithmConfig, routing: RoutingConfig, correction: CorrectionConfig
) -> Rules:
    """Rules of servers ahead of the trainer where that cannot be, or breaks what was promised."""
    for refused, problem in (
        (rollout.colocate, "rollout.colocate: servers that share the trainer's GPUs sleep while it learns"),
        (rollout.load, "rollout.load: no server is asked"),
        (algorithm.on_policy, "algorithm.on_policy: older weights have sampled what is learned"),
        (
            routing.source == "pr3",
            "routing.source: pr3: its engine looks ahead from the last push, and older weights and predictors have routed",
        ),
    ):
        yield Rule(rollout.max_staleness and refused, f"rollout.max_staleness with {problem}; set max_staleness: 0")
    yield Rule(
        rollout.max_staleness and not correction.bypass and correction.mode == "none",
        f"rollout.max_staleness = {rollout.max_staleness} learns from older weights' responses, and nothing"
        " corrects for it; set correction.mode: truncate with high: 2.0, or correction.bypass: true (the loss's ratio"
        " starts from the engine's log-probs)",
    )


def dynamic_sampling(
    rollout: RolloutConfig, batch: BatchConfig, rewards: RewardsConfig, routing: RoutingConfig
) -> Rules:
    """Rules of groups that are filtered by rewards that come later, or of which nothing is known."""
    key = "rollout.dynamic_sampling"
    for refused, problem in (
        (
            batch.samples_per_prompt < 2,
            "batch.samples_per_prompt: 1: a group of one response has no spread; set 2 or more",
        ),
        (rewards.models, "rewards.models, which score behind the rollout: leave them out"),
        (rewards.judges, "rewards.judges, which score behind the rollout: leave them out"),
        (
            routing.source == "pr3" and routing.features == "engine",
            "routing.source: pr3: which responses its predictors learn from is settled before they are asked for",
        ),
    ):
        yield Rule(
            rollout.dynamic_sampling.max_rounds and refused,
            f"{key} with {problem}, or set {key}.max_rounds: 0",
        )


def over_sampling(rollout: RolloutConfig, batch: BatchConfig) -> Rules:
    """Rules of what cannot be aborted, and of a rate that asks for no more prompts."""
    rate, prompts = rollout.over_sample_rate, batch.prompts_per_step
    for refused, problem in (
        (rollout.load, "with rollout.load: no server is asked; set over_sample_rate: 0"),
        (
            rollout.program == "openai_agent",
            "with rollout.program: openai_agent: an agent of your own cannot be ended from outside; set over_sample_rate: 0",
        ),
        (
            prompts_to_ask(prompts, 1.0 + rate) == prompts,
            f"adds no prompt to batch.prompts_per_step = {prompts}; set over_sample_rate: {1 / prompts:.2g}, or 0",
        ),
    ):
        yield Rule(rate and refused, f"rollout.over_sample_rate = {rate:g} {problem}")


def waits(rollout: RolloutConfig, sync: SyncConfig, parallel: ParallelConfig, world_size: int) -> Rules:
    """A rule of the other processes' wait for the first. Other waits for something outside are patient (`Ranks.patiently`)."""
    inner, outer = sync.timeout_s, parallel.timeout_s
    yield Rule(
        not rollout.load and world_size > 1 and inner >= outer,
        f"parallel.timeout_s = {outer:g} s is no longer than sync.timeout_s = {inner:g} s: in a push the other"
        " processes wait for the first, which waits for servers; make the former larger",
    )


def evaluations(kind: Kind, eval: EvalConfig, rollout: RolloutConfig, pruning: PruningConfig) -> Rules:
    """Rules of what is evaluated, and by whom."""
    also = ", and eval.sets: {}" if eval.sets else ""
    yield Rule(
        kind == "train" and rollout.load and (eval.prompts or eval.sets),
        f"rollout.load starts no engine, which could answer the prompts of an evaluation; set eval.prompts: 0{also}",
    )
    yield Rule(
        eval.sets and kind in ("reward", "dpo"),
        f"eval.sets is of train, sft and eval, and {kind} compares the held-out rows of data.eval_path alone; set"
        " eval.sets: {}",
    )
    yield Rule(
        kind == "train" and pruning.enabled and pruning.measure,
        "pruning.measure with pruning.enabled: mismatch/kl is that of the safe set already, and so is"
        " mismatch/kl_safe; set pruning.measure: false",
    )
    most = max(eval.samples, *(one.samples or 0 for one in eval.sets.values()), 0)
    for wanted in eval.pass_at:
        yield Rule(
            wanted > most,
            f"eval.pass_at: pass@{wanted} needs as many responses to a prompt, and eval.samples is {most}; raise"
            f" eval.samples, or leave {wanted} out",
        )
    yield Rule(
        eval.likelihood and kind in ("train", "reward", "dpo"),
        "eval.likelihood is of megatron-rl eval, and what megatron-rl sft does anyway; set it to false",
    )
    yield Rule(
        eval.unpruned and not pruning.enabled,
        "eval.unpruned without pruning.enabled: eval/score is the unpruned policy's already; set unpruned: false",
    )


def _demonstrations(rollout: RolloutConfig, pruning: PruningConfig, vocabulary: int | None) -> Rules:
    settings, key = rollout.demonstrations, "rollout.demonstrations"
    if settings.min_reward is None:
        return
    if settings.max_tokens is not None:
        yield Rule(
            settings.max_tokens < settings.min_tokens,
            f"{key}.max_tokens = {settings.max_tokens} is below min_tokens = {settings.min_tokens}; swap them",
        )
    top = settings.top_log_probs
    wanted = f"{key}.top_log_probs = {top}"
    yield Rule(top and rollout.load, f"{wanted}: rollout.load asks no engine; leave one of them out")
    support = SamplingSupport.from_config(rollout.sampling, pruning)
    yield Rule(
        top and support != SamplingSupport(),
        f"{wanted} records the plain policy, and sampling changes it ({', '.join(changed(support))}); set"
        " rollout.sampling.temperature: 1.0, top_p: 1.0, top_k: -1, and leave tail_floor and pruning out",
    )
    if vocabulary is not None:
        yield Rule(top > vocabulary, f"{wanted}: the model has {vocabulary} tokens; lower it")


def check_demonstrations(config: Config, vocabulary: int | None = None) -> None:
    """Errors: UserError naming a key of rollout.demonstrations that does nothing, or cannot be.

    vocabulary: tokens that the model has, where that is known.
    """
    refuse_idle(config, "sample", "rollout.demonstrations.")
    refuse(config, _demonstrations, vocabulary=vocabulary)
