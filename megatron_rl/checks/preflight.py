"""Checks before anything starts: choices of the config that contradict each other, then folders and sizes.

What a config says by itself is looked at without torch, by `check_config`; so the program tells of it at once.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from typing import TYPE_CHECKING

from megatron_rl.algorithms.correction_choice import Correction
from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.checks.keys import (
    check_memory_savers,
    check_preference_keys,
    check_prune_keys,
    check_teacher_keys,
    refuse_idle,
)
from megatron_rl.checks.loss import check_loss, check_schedules
from megatron_rl.config import FROM_ENGINE, OF_TOKENS, PREDICTING, Config, PruningConfig
from megatron_rl.config.conditions import LEARNING
from megatron_rl.config.plan import OFFLINE, READ_ONLY, Kind, Plan, check_group, make_plan
from megatron_rl.config.registry import check_name
from megatron_rl.errors import UserError
from megatron_rl.rollout.dynamic_sampling import prompts_to_ask
from megatron_rl.servers.flags import asks_routes, check_extra_args, speculates
from megatron_rl.sync.transports import TRANSPORTS, instead, transport_class

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


ADVANTAGES = ("grpo", "dr_grpo", "rloo", "tilt", *OF_TOKENS)
LOSSES = ("ppo", "gspo", "reinforce", "cispo", "sapo")
PROGRAMS = ("single_turn", "agent", "openai_agent")
"""Built-in names of algorithm.advantage, algorithm.loss and rollout.program."""


def preflight(config: Config, kind: Kind) -> tuple[PreTrainedConfig, Plan, SamplingSupport]:
    """Check the config by itself, the model folders, and what of both this machine can do.

    Errors: UserError naming the key or the file.
    """
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    plan, support = check_config(config, kind, world_size)
    from megatron_rl.checks.model_and_machine import check_models  # torch and Megatron, which take seconds to import

    return check_models(config, kind, world_size), plan, support


def check_config(config: Config, kind: Kind, world_size: int) -> tuple[Plan, SamplingSupport]:
    """Check what can be told of a config without its models, for a run of this kind on so many processes.

    Errors: UserError naming the key.
    """
    if kind in LEARNING:
        refuse_idle(config, kind)
    # A demonstration, or a comparison, is one thing of one update.
    from_data = kind in OFFLINE
    batch = replace(config.batch, samples_per_prompt=1, updates_per_step=1) if from_data else config.batch
    plan = make_plan(batch, config.parallel, world_size)
    if kind == "train":
        check_group(config.batch, config.algorithm.advantage)
    support = SamplingSupport.from_config(config.rollout.sampling, config.pruning)
    if config.rollout.context_length - 1 > config.batch.tokens_per_micro_batch * config.parallel.context:
        raise UserError(
            f"config: a sequence of rollout.context_length = {config.rollout.context_length} tokens does not fit into"
            f" batch.tokens_per_micro_batch = {config.batch.tokens_per_micro_batch}; raise the latter"
        )
    if config.model.moe_dispatcher == "allgather" and config.parallel.expert > 1:
        raise UserError(
            "config: model.moe_dispatcher = allgather wants equally many tokens on all expert-parallel ranks, which packed"
            " micro-batches do not have; use alltoall"
        )
    if kind == "sample" and config.precision.rollout == "fp8":
        raise UserError(
            "config: precision.rollout = fp8 quantizes weights when they are pushed, and eval and rollout push none;"
            " set precision.rollout to bf16"
        )
    server = config.rollout.server
    if server.tensor % server.expert:
        raise UserError(
            f"config: rollout.server.expert = {server.expert} does not divide rollout.server.tensor = {server.tensor};"
            f" take {math.gcd(server.tensor, server.expert)}"
        )
    if not from_data:
        check_name("rollout program", config.rollout.program, dict.fromkeys(PROGRAMS), "rollout.program")
    if not from_data and not config.rollout.external:
        _check_flags(config)
    check_name("weight transport", config.sync.transport, TRANSPORTS, "sync.transport")
    _check_servers(config, kind, world_size)
    check_preference_keys(config, kind)
    if kind not in READ_ONLY:
        check_teacher_keys(config, kind)
    if kind == "prune":
        check_prune_keys(config)
    if kind == "train" and config.rollout.load and (config.eval.prompts or config.eval.sets):
        also = ", and eval.sets: {}" if config.eval.sets else ""
        raise UserError(
            "config: rollout.load starts no engine, which could answer the prompts of an evaluation; set eval.prompts: 0"
            f"{also}"
        )
    if config.eval.sets and kind in ("reward", "dpo"):
        raise UserError(
            f"config: eval.sets is of train, sft and eval, and {kind} compares the held-out rows of data.eval_path alone; set"
            " eval.sets: {}"
        )
    if kind == "train":
        _check_pruning(config.pruning)
    most = max(config.eval.samples, *(one.samples or 0 for one in config.eval.sets.values()), 0)
    if too_many := [k for k in config.eval.pass_at if k > most]:
        raise UserError(
            f"config: eval.pass_at: pass@{too_many[0]} needs as many responses to a prompt, and eval.samples is {most}; raise"
            f" eval.samples, or leave {too_many[0]} out"
        )
    if config.eval.likelihood and kind in ("train", "reward", "dpo"):
        raise UserError(
            "config: eval.likelihood is of megatron-rl eval, and what megatron-rl sft does anyway; set it to false"
        )
    if config.eval.unpruned and not config.pruning.enabled:
        raise UserError(
            "config: eval.unpruned without pruning.enabled: eval/score is the unpruned policy's already; set unpruned: false"
        )
    if kind == "train":
        check_name("loss", config.algorithm.loss, dict.fromkeys(LOSSES), "algorithm.loss")
        _check_algorithm(config)
        check_loss(config)
        for name in config.hooks:
            check_name("hook", name, {}, "hooks")
        _check_correction(config)
        _check_routing(config)
        _check_refresh(config)
        _check_on_policy(config)
    if kind in READ_ONLY and config.lora.path:
        raise UserError(
            f"config: lora.path = {config.lora.path}: only what trains reads adapters, and this looks at model.path; write the"
            f" whole model (megatron-rl convert {config.lora.path} OUT), set model.path: OUT, and leave lora out"
        )
    check_schedules(config, kind)
    if kind not in READ_ONLY:
        _check_vp2o(config, kind)
        check_memory_savers(config)
        if config.model.keep_zeros and config.checkpoint.load:
            raise UserError(
                "config: model.keep_zeros with checkpoint.load: the zeros are those of model.path; write the checkpoint as a"
                f" folder (megatron-rl convert {config.checkpoint.load} FOLDER), and give that as model.path"
            )
    return plan, support


def _check_algorithm(config: Config) -> None:
    """Refuse advantages that are not there, and keys that do nothing with those that are. Errors: UserError."""
    algorithm, kl = config.algorithm, config.algorithm.kl
    check_name("advantage", algorithm.advantage, dict.fromkeys(ADVANTAGES), "algorithm.advantage")
    warmup = config.critic.warmup_steps
    if algorithm.advantage == "gae" and warmup >= config.steps:
        raise UserError(
            f"config: critic.warmup_steps = {warmup} leaves none of the {config.steps} steps to the policy; make it smaller, or"
            " steps larger"
        )
    responses = config.batch.prompts_per_step * config.batch.samples_per_prompt
    if kl.target is not None and responses >= 5 * kl.horizon:
        raise UserError(
            f"config: algorithm.kl.horizon = {kl.horizon}: the {responses} responses of a step are five horizons or more, each"
            f" of which may take a fifth of the coefficient; set horizon: {10 * responses}"
        )
    if algorithm.advantage == "tilt" and algorithm.whiten:
        raise UserError(
            "config: algorithm.whiten with advantage = tilt: its weights are those of a likelihood, never below 0, and would no"
            " longer be; set whiten: null"
        )


def _check_pruning(pruning: PruningConfig) -> None:
    """Refuse to measure what is logged anyway. Errors: UserError."""
    if pruning.enabled and pruning.measure:
        raise UserError(
            "config: pruning.measure with pruning.enabled: mismatch/kl is that of the safe set already, and so is"
            " mismatch/kl_safe; set pruning.measure: false"
        )


def _check_flags(config: Config) -> None:
    """Refuse flags of SGLang that contradict the config. Errors: UserError."""
    extra = config.rollout.server.extra_args
    if speculates(extra) and config.pruning.enabled:
        raise UserError(
            "config: rollout.server.extra_args asks for speculative decoding, which skips the logit processor that prunes in"
            " the engine; leave it out, or set pruning.enabled: false"
        )
    if speculates(extra) and asks_routes(config):
        raise UserError(
            "config: rollout.server.extra_args asks for speculative decoding, for whose drafts SGLang's record of routes has no"
            " room; leave it out, or set routing.source: r2 and rollout.routes: false"
        )
    check_extra_args(extra, ())


def _check_vp2o(config: Config, kind: Kind) -> None:
    """Refuse parts of VP2O that cannot work, or do nothing. Errors: UserError."""
    vp2o = config.vp2o
    if not vp2o.enabled:
        return
    if kind in OFFLINE:
        raise UserError(f"config: vp2o is of reinforcement learning; set vp2o.enabled: false for {kind}")
    if config.model.moe_router_fusion:
        raise UserError(
            "config: vp2o with model.moe_router_fusion: the fused router does not tell which experts are active together;"
            " turn the fusion off"
        )
    if vp2o.orthogonality and config.model.moe_dispatcher != "alltoall":
        raise UserError(
            f"config: vp2o.orthogonality needs what each expert of a token puts out, which model.moe_dispatcher ="
            f" {config.model.moe_dispatcher} adds up on the way; use alltoall, or set vp2o.orthogonality: 0"
        )
    absolute = vp2o.repulsion and vp2o.repulsion_scale == "absolute"
    if vp2o.temperature is not None and vp2o.attraction == "mean" and not absolute:
        raise UserError(
            "config: vp2o.temperature with vp2o.attraction: mean and without an absolute repulsion does nothing; set"
            " vp2o.repulsion instead, or attraction: kernel"
        )
    attract, repel = vp2o.attract_above, vp2o.repel_below
    if attract is not None and repel is not None and repel >= attract:
        raise UserError(
            f"config: vp2o.repel_below = {repel:g} is not below attract_above = {attract:g}: pairs"
            " between them would attract and repel at once"
        )


def _check_servers(config: Config, kind: Kind, world_size: int) -> None:
    """Refuse servers that cannot take turns with the trainer, or contradict what it does meanwhile. Errors: UserError."""
    rollout = config.rollout
    if rollout.colocate and rollout.external:
        key, empty = ("addresses", "[]") if rollout.addresses else ("address_folder", "null")
        raise UserError(
            f"config: rollout.colocate with rollout.{key}: only servers that the trainer starts take turns with it; set"
            f" {key}: {empty}, or colocate: false"
        )
    if kind == "train":
        _check_staleness(config)
        _check_dynamic_sampling(config)
        _check_over_sampling(config)
    if kind == "train" and not rollout.load:
        _check_waits(config, world_size)
    if kind in OFFLINE or rollout.load or rollout.external:
        return
    if kind != "sample" and rollout.colocate and (why := transport_class(config.sync.transport).not_on_one_gpu):
        raise UserError(
            f"config: rollout.colocate with sync.transport = {config.sync.transport}: {why}; set sync.transport:"
            f" {instead(colocate=True)}"
        )


def _check_staleness(config: Config) -> None:
    """Refuse servers ahead of the trainer where that cannot be, or breaks what was promised. Errors: UserError."""
    if not config.rollout.max_staleness:
        return
    for refused, problem in (
        (config.rollout.colocate, "rollout.colocate: servers that share the trainer's GPUs sleep while it learns"),
        (bool(config.rollout.load), "rollout.load: no server is asked"),
        (config.algorithm.on_policy, "algorithm.on_policy: older weights have sampled what is learned"),
        (
            config.routing.source == "pr3",
            "routing.source: pr3: its engine looks ahead from the last push, and older weights and predictors have routed",
        ),
    ):
        if refused:
            raise UserError(f"config: rollout.max_staleness with {problem}; set max_staleness: 0")
    if not config.correction.bypass and config.correction.mode == "none":
        raise UserError(
            f"config: rollout.max_staleness = {config.rollout.max_staleness} learns from older weights' responses, and nothing"
            " corrects for it; set correction.mode: truncate with high: 2.0, or correction.bypass: true (the loss's ratio"
            " starts from the engine's log-probs)"
        )


def _check_dynamic_sampling(config: Config) -> None:
    """Refuse to filter groups by rewards that come later, or where nothing is known of them. Errors: UserError."""
    key = "rollout.dynamic_sampling"
    if not config.rollout.dynamic_sampling.max_rounds:
        return
    for refused, problem in (
        (
            config.batch.samples_per_prompt < 2,
            "batch.samples_per_prompt: 1: a group of one response has no spread; set 2 or more",
        ),
        (bool(config.rewards.models), "rewards.models, which score behind the rollout: leave them out"),
        (bool(config.rewards.judges), "rewards.judges, which score behind the rollout: leave them out"),
        (
            config.routing.source == "pr3" and config.routing.features == "engine",
            "routing.source: pr3: which responses its predictors learn from is settled before they are asked for",
        ),
    ):
        if refused:
            raise UserError(f"config: {key} with {problem}, or set {key}.max_rounds: 0")


def _check_over_sampling(config: Config) -> None:
    """Refuse to abort what cannot be, or a rate that asks for no more prompts. Errors: UserError."""
    rate, prompts = config.rollout.over_sample_rate, config.batch.prompts_per_step
    if not rate:
        return
    for refused, problem in (
        (bool(config.rollout.load), "with rollout.load: no server is asked; set over_sample_rate: 0"),
        (
            config.rollout.program == "openai_agent",
            "with rollout.program: openai_agent: an agent of your own cannot be ended from outside; set over_sample_rate: 0",
        ),
        (
            prompts_to_ask(prompts, 1.0 + rate) == prompts,
            f"adds no prompt to batch.prompts_per_step = {prompts}; set over_sample_rate: {1 / prompts:.2g}, or 0",
        ),
    ):
        if refused:
            raise UserError(f"config: rollout.over_sample_rate = {rate:g} {problem}")


def _check_waits(config: Config, world_size: int) -> None:
    """Refuse a wait of the other processes that ends before that of the first one, which they wait for. Errors: UserError.

    Other waits for something outside are patient (`Ranks.patiently`).
    """
    inner, outer = config.sync.timeout_s, config.parallel.timeout_s
    if world_size > 1 and inner >= outer:
        raise UserError(
            f"config: parallel.timeout_s = {outer:g} s is no longer than sync.timeout_s = {inner:g} s: in a push the other"
            " processes wait for the first, which waits for servers; make the former larger"
        )


def _check_refresh(config: Config) -> None:
    """Refuse limits that nothing looks at, and old rollouts that would be taken for new ones. Errors: UserError."""
    refresh, correction = config.sync.refresh, config.correction
    if refresh.when == "always":
        return
    if config.routing.source in FROM_ENGINE:
        raise UserError(
            f"config: sync.refresh.when = drift with routing.source = {config.routing.source}: what is replayed must be of the"
            " weights that are trained, and the engine's would be older; set sync.refresh.when: always, or routing.source:"
            " r2"
        )
    if not correction.bypass and correction.mode == "none":
        raise UserError(
            f"config: sync.refresh.when = drift samples from weights that are up to {refresh.max_staleness} steps old, and"
            " nothing corrects for it; set correction.bypass: true (the loss's ratio starts from the engine's log-probs), or"
            " correction.mode: truncate with high: 2.0"
        )


def _check_on_policy(config: Config) -> None:
    """Refuse what makes the claim of `algorithm.on_policy` untrue from the start. Errors: UserError."""
    if not config.algorithm.on_policy:
        return
    for key, contradicts, why, remedy in (
        (
            f"batch.updates_per_step = {config.batch.updates_per_step}",
            config.batch.updates_per_step > 1,
            "the later updates of a step are of a policy that has moved",
            "set it to 1",
        ),
        (
            f"batch.epochs = {config.batch.epochs}",
            config.batch.epochs > 1,
            "the later updates of a step are of a policy that has moved",
            "set it to 1",
        ),
        (
            "sync.refresh.when = drift",
            config.sync.refresh.when == "drift",
            "samples may come from weights that are steps old",
            "set it to always",
        ),
        ("rollout.load", bool(config.rollout.load), "a record was sampled by another run's weights", "leave it out"),
        (
            "correction.bypass",
            config.correction.bypass,
            "the ratio starts from the engine's log-probs, which are never exactly the trainer's",
            "set it to false",
        ),
    ):
        if contradicts:
            raise UserError(
                f"config: {key} with algorithm.on_policy: {why}; {remedy}, or set algorithm.on_policy: false"
            )


def _check_correction(config: Config) -> None:
    """Refuse bounds that are missing or cross, and two corrections of one thing. Errors: UserError."""
    correction = config.correction
    try:
        Correction.of(correction)
    except ValueError as error:
        raise UserError(f"config: correction: {error}{_REMEDIES.get(correction.mode, '')}") from None
    if (correction.low or 0.0) > 1 or (correction.high is not None and correction.high < 1):
        raise UserError(
            f"config: correction.low = {correction.low}, high = {correction.high} leave out a ratio of 1, at which nothing"
            " is wrong: bounds are of the ratio trainer / engine itself; set low: 0.8 and high: 1.2 for a threshold of 0.2"
        )
    if not correction.bypass:
        return
    for key, given, valid in (
        ("veto", correction.veto is not None, "null"),
        ("mode", correction.mode != "none", "none"),
        ("reject", correction.reject != "none", "none"),
    ):
        if given:
            raise UserError(
                f"config: correction.{key} with correction.bypass: there are no log-probs of the old policy to compare the"
                f" engine's with, as its ratio is part of the loss's; set correction.bypass: false, or {key}: {valid}"
            )
    if config.routing.source in ("r2", *PREDICTING) and config.batch.updates > 1:
        raise UserError(
            f"config: correction.bypass leaves out the pass in which routing.source = {config.routing.source} records the"
            " routes; set bypass: false, or routing.source: r3"
        )


_REMEDIES = {
    "truncate": "; set correction.high: 2.0",
    "mask": "; set correction.low: 0.5 and high: 2.0",
    "clip": "; set correction.low: 0.5 and high: 2.0",
}


def _check_routing(config: Config) -> None:
    """Refuse a source of routes that cannot work with the rest of the config. Errors: UserError."""
    source = config.routing.source
    if config.rollout.gates and not asks_routes(config):
        raise UserError("config: rollout.gates = true asks for the weights of no experts: set rollout.routes: true")
    if source == "none":
        return
    if config.model.moe_router_fusion:
        raise UserError(
            f"config: routing.source = {source} with model.moe_router_fusion: the fused router would ignore the routes;"
            " turn the fusion off, or use routing.source = none"
        )
    if source in PREDICTING and config.batch.updates_per_step < 2:
        raise UserError(
            f"config: routing.source = {source} predicts how routers move from one update of a rollout batch to the next;"
            " batch.updates_per_step = 1 has no next: raise it, or use r2 or r3"
        )
