"""Checks before anything starts: folders, sizes, and choices of the config that contradict each other."""

from __future__ import annotations

import importlib.util
import math
import os
from dataclasses import replace

import torch
from packaging.version import Version
from transformers import PreTrainedConfig

from megatron_rl.algorithms.stein import neighborhood
from megatron_rl.config import (
    AlgorithmConfig,
    Config,
    CriticConfig,
    DynamicSamplingConfig,
    PruningConfig,
    RefreshConfig,
    VP2OConfig,
)
from megatron_rl.credentials import key_of
from megatron_rl.errors import UserError
from megatron_rl.launch.fit import check_fits
from megatron_rl.launch.identical_checks import check_identical
from megatron_rl.launch.lora_checks import check_lora
from megatron_rl.launch.plan import FROM_DATA, LOOKS, Kind, Plan, check_group, make_plan
from megatron_rl.launch.preference_checks import check_preferences
from megatron_rl.launch.prune_checks import check_prune
from megatron_rl.launch.router_checks import check_routers
from megatron_rl.launch.teacher_checks import check_teacher
from megatron_rl.models.freeze import check_patterns
from megatron_rl.models.hf_folder import check_local_folder, check_same_tokenizer
from megatron_rl.models.parallel_check import architecture, check_parallel, expert_count, read_hf_config
from megatron_rl.models.precision import TRAIN, Machine, check_precision, dotted, this_machine
from megatron_rl.models.sizes import Shape, linear_weights, parameter_names
from megatron_rl.ops import extensions, flash
from megatron_rl.ops.sink_attention import flash_takes
from megatron_rl.registry import resolve
from megatron_rl.rollout.children import place_here
from megatron_rl.rollout.choices import check_extra_args, choices, speculates
from megatron_rl.rollout.dynamic_sampling import prompts_to_ask
from megatron_rl.rollout.programs import rollout_program
from megatron_rl.rollout.routes import EngineRoutes
from megatron_rl.rollout.sampling import SamplingSupport
from megatron_rl.rollout.server import asks_routes
from megatron_rl.routing.replay import FROM_ENGINE, PREDICTING
from megatron_rl.sync.allocator import shares_expandable_memory
from megatron_rl.trainer.advantages import OF_TOKENS, estimator
from megatron_rl.trainer.critic import critic_config
from megatron_rl.trainer.objective import correction_of, policy_loss

PRECISION_AWARE_TE = Version("2.1")
"""The first release whose Adam keeps only what the bf16 weights lack of the fp32 ones; before, it kept these whole."""


def preflight(config: Config, kind: Kind) -> tuple[PreTrainedConfig, Plan, SamplingSupport]:
    """Check the model folder, parallel sizes, batch sizes, sampling, correction and routing.

    Errors: UserError naming the key or the file.
    """
    world_size = int(os.environ.get("WORLD_SIZE", 1))
    hf_config = read_hf_config(config.model.path)
    machine = this_machine()
    check_precision(config.precision, machine, trains=kind != "ask", rolls_out=kind not in FROM_DATA)
    check_parallel(hf_config, config.parallel, world_size)
    check_identical(config, hf_config, machine)
    # A demonstration, or a comparison, is one thing of one update.
    from_data = kind in FROM_DATA
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
    if kind == "ask" and config.precision.rollout == "fp8":
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
        rollout_program(config.rollout.program)
    if not from_data and not config.rollout.external:
        _check_extra_args(config, hf_config)
    _check_servers(config, kind, world_size)
    check_preferences(config, kind, world_size)
    if kind not in LOOKS:
        check_teacher(config, hf_config, kind, world_size)
    if kind == "prune":
        check_prune(config, hf_config, world_size)
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
        policy_loss(config.algorithm)
        _check_algorithm(config)
        _check_critic(config, world_size, machine)
        for name in config.hooks:
            resolve("hook", name, {}, "hooks")
        _check_correction(config)
        _check_routing(config, hf_config)
        _check_refresh(config)
        _check_on_policy(config)
    if kind in LOOKS and config.lora.path:
        raise UserError(
            f"config: lora.path = {config.lora.path}: only what trains reads adapters, and this looks at model.path; write the"
            f" whole model (megatron-rl convert {config.lora.path} OUT), set model.path: OUT, and leave lora out"
        )
    if kind not in LOOKS:
        _check_vp2o(config, hf_config, kind)
        _check_weights(config, hf_config, kind)
        check_routers(config, hf_config, kind)
        check_lora(config, hf_config, kind)
    if kind != "ask":
        _check_packages(config, machine)
        _check_kernels(config, hf_config, machine)
    if kind not in LOOKS:
        check_memory_savers(config, machine)
        if torch.cuda.is_available():
            check_fits(config, hf_config, world_size, torch.cuda.mem_get_info()[1], kind)
    if kind == "train" and machine.gpu and shares_expandable_memory(config, os.environ):
        raise UserError(
            "config: sync.transport = tensor shares the trainer's memory, and PYTORCH_CUDA_ALLOC_CONF asks for"
            " expandable_segments, which torch shares with no other process; take it out, or set sync.transport: distributed"
        )
    activate_flash(config)
    return hf_config, plan, support


def _check_algorithm(config: Config) -> None:
    """Refuse advantages that are not there, and keys that do nothing with those that are. Errors: UserError."""
    algorithm, kl, default = config.algorithm, config.algorithm.kl, AlgorithmConfig()
    if algorithm.advantage not in OF_TOKENS:
        estimator(algorithm)
    of_critic = algorithm.advantage == "gae"
    for key, idle, why, remedy in (
        ("algorithm.lam", not of_critic and algorithm.lam != default.lam, "is of gae", "set algorithm.advantage: gae"),
        (
            "algorithm.bootstrap_truncated",
            not of_critic and not algorithm.bootstrap_truncated,
            "is of gae",
            "set algorithm.advantage: gae",
        ),
        (
            "algorithm.gamma",
            algorithm.advantage not in OF_TOKENS and algorithm.gamma != default.gamma,
            "is of advantages that go from token to token",
            "set algorithm.advantage: gae",
        ),
        (
            "algorithm.tilt_temperature",
            algorithm.advantage != "tilt" and algorithm.tilt_temperature != default.tilt_temperature,
            "is of tilt",
            "set algorithm.advantage: tilt",
        ),
        ("critic", not of_critic and config.critic != CriticConfig(), "is of gae", "set algorithm.advantage: gae"),
        (
            "algorithm.kl.target",
            kl.target is not None and not kl.coefficient,
            "moves a coefficient, and that of algorithm.kl.coefficient is 0",
            "set algorithm.kl.coefficient: 0.1 to begin with",
        ),
        (
            "algorithm.kl.placement",
            kl.placement == "reward" and not kl.coefficient,
            "places a penalty, and its algorithm.kl.coefficient is 0",
            "set algorithm.kl.coefficient: 0.05",
        ),
        (
            "algorithm.kl.horizon",
            kl.target is None and kl.horizon != default.kl.horizon,
            "is of a coefficient that moves",
            "set algorithm.kl.target",
        ),
        (
            "algorithm.kl.reference",
            kl.reference is not None and not kl.coefficient,
            "is what a penalty is taken from, and its algorithm.kl.coefficient is 0",
            "set algorithm.kl.coefficient: 0.05",
        ),
    ):
        if idle:
            raise UserError(
                f"config: {key} does nothing with algorithm.advantage = {algorithm.advantage}: it {why}; {remedy}"
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


def _check_critic(config: Config, world_size: int, machine: Machine) -> None:
    """Refuse a critic that cannot learn beside the policy, or leaves it no step. Errors: UserError."""
    if config.algorithm.advantage != "gae":
        return
    critic, own = config.critic, critic_config(config)
    if critic.warmup_steps >= config.steps:
        raise UserError(
            f"config: critic.warmup_steps = {critic.warmup_steps} leaves none of the {config.steps} steps to the policy; make"
            " it smaller, or steps larger"
        )
    if critic.path is not None:
        check_local_folder(critic.path, "critic.path")
    hf_config = read_hf_config(own.model.path)
    try:
        check_parallel(hf_config, config.parallel, world_size)
        check_memory_savers(own, machine)
    except UserError as error:
        raise UserError(f"{error} (of the critic)") from None
    if critic.path is not None:
        check_same_tokenizer(config.model.path, critic.path, "critic.path")
    if config.lora.rank:
        try:
            check_lora(own, hf_config, "sft")
        except UserError as error:
            raise UserError(f"{error} (of the critic)") from None
    check_patterns(
        critic.freeze,
        parameter_names(Shape.from_config(hf_config, value_head=True)),
        in_all_layers=not config.parallel.distributed_optimizer,
        key="critic.freeze",
    )


def _check_pruning(pruning: PruningConfig) -> None:
    """Refuse what prunes nothing, or measures what is logged anyway. Errors: UserError."""
    if not pruning.enabled and not pruning.measure and pruning.rho != PruningConfig().rho:
        raise UserError(
            f"config: pruning.rho = {pruning.rho:g} without pruning.enabled prunes nothing; set pruning.enabled: true, or"
            " pruning.measure: true to log mismatch/kl_safe alone"
        )
    if not pruning.enabled and pruning.engine_rho is not None:
        raise UserError(
            f"config: pruning.engine_rho = {pruning.engine_rho:g} without pruning.enabled prunes nothing; set pruning.enabled:"
            " true, or engine_rho: null"
        )
    if pruning.enabled and pruning.measure:
        raise UserError(
            "config: pruning.measure with pruning.enabled: mismatch/kl is that of the safe set already, and so is"
            " mismatch/kl_safe; set pruning.measure: false"
        )


def _check_extra_args(config: Config, hf_config: PreTrainedConfig) -> None:
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
    support = SamplingSupport.from_config(config.rollout.sampling, config.pruning)
    chosen = choices(
        hf_config.to_dict(),
        config.precision.rollout,
        this_machine(),
        routes=asks_routes(config),
        seeded_sets=support.keeps_sets and config.rollout.seed_requests,
    )
    check_extra_args(extra, chosen)


def _check_vp2o(config: Config, hf_config: PreTrainedConfig, kind: Kind) -> None:
    """Refuse VP2O for a model without experts that interact, and parts of it that cannot work. Errors: UserError."""
    vp2o, name = config.vp2o, architecture(hf_config)
    if not vp2o.enabled:
        if changed := [field for field in vars(vp2o) if getattr(vp2o, field) != getattr(VP2OConfig(), field)]:
            raise UserError(f"config: vp2o.{changed[0]} without vp2o.enabled does nothing; set vp2o.enabled: true")
        return
    if kind in FROM_DATA:
        raise UserError(f"config: vp2o is of reinforcement learning; set vp2o.enabled: false for {kind}")
    experts = expert_count(hf_config)
    if experts < 2:
        found = f"{name} has one expert a layer" if experts else f"{name} is dense"
        raise UserError(f"config: vp2o updates experts by their neighbors, but {found}; set vp2o.enabled: false")
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
    if vp2o.orthogonality and EngineRoutes.from_config(hf_config.to_dict()).shape.topk < 2:
        raise UserError(
            f"config: vp2o.orthogonality = {vp2o.orthogonality:g}, but {name} sends a token to one expert, which has nothing to"
            " be kept apart from; set vp2o.orthogonality: 0"
        )
    for key, idle, reason, remedy in (
        ("on_violation", vp2o.trust_region is None, "without vp2o.trust_region", "set vp2o.trust_region: 0.1"),
        ("probe_tokens", vp2o.trust_region is None, "without vp2o.trust_region", "set vp2o.trust_region: 0.1"),
        ("orthogonality_tokens", not vp2o.orthogonality, "with vp2o.orthogonality: 0", "set vp2o.orthogonality: 0.01"),
        ("orthogonality_form", not vp2o.orthogonality, "with vp2o.orthogonality: 0", "set vp2o.orthogonality: 0.01"),
        ("repulsion_scale", not vp2o.repulsion, "with vp2o.repulsion: 0", "set vp2o.repulsion: 0.1"),
        (
            "temperature",
            vp2o.attraction == "mean" and (not vp2o.repulsion or vp2o.repulsion_scale == "relative"),
            "with vp2o.attraction: mean and without an absolute repulsion",
            "set vp2o.repulsion instead, or attraction: kernel",
        ),
        ("attraction", vp2o.neighbors == 1, "with vp2o.neighbors: 1", "set vp2o.neighbors: 2"),
        ("neighbors", vp2o.attract_above is not None, "beside vp2o.attract_above", "set one of the two"),
        ("inactive_neighbors", vp2o.repel_below is not None, "beside vp2o.repel_below", "set one of the two"),
    ):
        if idle and getattr(vp2o, key) != getattr(VP2OConfig(), key):
            raise UserError(f"config: vp2o.{key} {reason} does nothing; {remedy}")
    by_number = vp2o.attract_above is None and vp2o.repel_below is None
    neighbors, inactive = neighborhood(experts, vp2o.neighbors, vp2o.inactive_neighbors)
    if vp2o.repulsion and by_number and neighbors + inactive >= max(experts, 3):  # two experts can but repel each other
        fitting = neighborhood(experts)
        raise UserError(
            f"config: vp2o.neighbors = {neighbors} (itself among them) and inactive_neighbors = {inactive} leave no pair of"
            f" {name}'s {experts} experts a layer alone; set vp2o.neighbors: {fitting[0]} and vp2o.inactive_neighbors:"
            f" {fitting[1]}, or leave both out"
        )
    attract, repel = vp2o.attract_above, vp2o.repel_below
    if attract is not None and repel is not None and repel >= attract:
        raise UserError(
            f"config: vp2o.repel_below = {repel:g} is not below attract_above = {attract:g}: pairs"
            " between them would attract and repel at once"
        )


def check_memory_savers(config: Config, machine: Machine) -> None:
    """Refuse a saver of the optimizer's or gradients' memory that cannot run here or with the rest. Errors: UserError."""
    opt, vp2o = config.optimizer, config.vp2o
    sharded = config.parallel.distributed_optimizer
    sixteen_bits = config.precision.train != "fp32"
    share = f"optimizer.cpu_offload = {opt.cpu_offload:g}"
    for refused, problem in (
        (
            opt.cpu_offload and not sharded,
            f"{share} is of the sharded optimizer; set parallel.distributed_optimizer: true",
        ),
        (
            opt.cpu_offload and not sixteen_bits,
            (
                f"{share} with precision.train = fp32: there are no 16-bit weights whose fp32 copies could be on the host; set"
                " precision.train: bf16, or cpu_offload: 0"
            ),
        ),
        (
            0 < opt.cpu_offload < 1 and machine.gpu and not machine.fused_adam,
            (
                f"{share}: the share that stays on the GPU needs Transformer Engine or Apex, whose Adam a resumed run can tell"
                " from that of the host; install one, or set cpu_offload: 1.0"
            ),
        ),
        (
            opt.cpu_offload and opt.precision_aware,
            f"{share} with optimizer.precision_aware: the host keeps whole fp32 weights; set one of the two",
        ),
        (
            opt.precision_aware and not sharded,
            "optimizer.precision_aware is of the sharded optimizer; set parallel.distributed_optimizer: true",
        ),
        (
            opt.precision_aware and not sixteen_bits,
            (
                "optimizer.precision_aware with precision.train = fp32: there are no 16-bit weights to complete; set"
                " precision.train: bf16"
            ),
        ),
        (
            opt.precision_aware
            and not (machine.gpu and Version(machine.transformer_engine or "0") >= PRECISION_AWARE_TE),
            (
                "optimizer.precision_aware needs a GPU and the Adam of Transformer Engine 2.1 or later (found:"
                f" {machine.transformer_engine or 'none'}{'' if machine.gpu else ', no GPU'}); set it to false, or save by"
                " optimizer.cpu_offload"
            ),
        ),
        (
            opt.moments == "bf16" and not opt.precision_aware,
            "optimizer.moments = bf16 needs an Adam that takes them; set optimizer.precision_aware: true",
        ),
        (
            vp2o.trust_region is not None and (opt.cpu_offload or opt.precision_aware),
            (
                "vp2o.trust_region looks at a step before it is done, by the fp32 weights that"
                f" optimizer.{'cpu_offload' if opt.cpu_offload else 'precision_aware'} keeps elsewhere; set one of the two"
            ),
        ),
        (
            config.precision.gradients == "bf16" and not sixteen_bits,
            (
                "precision.gradients = bf16 with precision.train = fp32: gradients have the type of the weights, or fp32; set"
                " precision.train: bf16, or gradients: fp32"
            ),
        ),
        (
            config.precision.gradients == "bf16" and vp2o.enabled,
            "precision.gradients = bf16 with vp2o.enabled, whose repulsion is lost in bf16 sums; set gradients: fp32",
        ),
        (
            config.parallel.overlap_param_gather and not sharded,
            (
                "parallel.overlap_param_gather without parallel.distributed_optimizer: there is nothing to gather; set"
                " overlap_param_gather: false"
            ),
        ),
        (
            config.parallel.overlap_param_gather and vp2o.enabled,
            (
                "parallel.overlap_param_gather with vp2o.enabled, which reads the experts' weights between passes; set"
                " overlap_param_gather: false"
            ),
        ),
    ):
        if refused:
            raise UserError(f"config: {problem}")


def _check_servers(config: Config, kind: Kind, world_size: int) -> None:
    """Refuse GPUs that are not there, and servers that cannot take turns with the trainer. Errors: UserError."""
    rollout = config.rollout
    if rollout.colocate and rollout.external:
        key, empty = ("addresses", "[]") if rollout.addresses else ("address_folder", "null")
        raise UserError(
            f"config: rollout.colocate with rollout.{key}: only servers that the trainer starts take turns with it; set"
            f" {key}: {empty}, or colocate: false"
        )
    if kind == "train":
        key_of(config.distillation.api_key, "distillation.api_key")  # both are asked after the first responses only
        for name, scorer in config.rewards.models.items():
            key_of(scorer.api_key, f"rewards.models.{name}.api_key")
        _check_staleness(config)
        _check_dynamic_sampling(config)
        _check_over_sampling(config)
    if kind == "train" and not rollout.load:
        _check_waits(config, world_size)
    if kind in FROM_DATA or rollout.load or rollout.external:
        return
    places = place_here(config, trains=kind == "train")
    if kind == "ask" or config.sync.transport == "disk":
        return
    if rollout.colocate and config.sync.transport == "distributed":
        raise UserError(
            "config: rollout.colocate with sync.transport = distributed: NCCL takes no two processes of a group on one GPU; set"
            " sync.transport: tensor"
        )
    if config.sync.transport == "tensor":  # the bucket lies on the first process's GPU
        far = [gpu for gpus in places for gpu in gpus if gpu and not torch.cuda.can_device_access_peer(gpu, 0)]
        if far:
            raise UserError(
                f"config: sync.transport = tensor: GPU {far[0]} has no peer access to GPU 0, where the weights are sent from;"
                f" set sync.transport: {'disk' if rollout.colocate else 'distributed'}"
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
    settings, defaults = config.rollout.dynamic_sampling, DynamicSamplingConfig()
    key = "rollout.dynamic_sampling"
    if not settings.max_rounds:
        if settings != defaults:
            raise UserError(
                f"config: {key}.over_sampling with {key}.max_rounds = 0 does nothing; set {key}.max_rounds: 10"
            )
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
        if changed := [field for field in vars(refresh) if getattr(refresh, field) != getattr(RefreshConfig(), field)]:
            raise UserError(
                f"config: sync.refresh.{changed[0]} with when = always does nothing; set sync.refresh.when: drift"
            )
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


def _check_weights(config: Config, hf_config: PreTrainedConfig, kind: Kind) -> None:
    """Refuse what is frozen or ignored and is not there, or is needed. Errors: UserError."""
    shape = Shape.from_config(hf_config)
    if config.model.freeze:
        check_patterns(
            config.model.freeze,
            parameter_names(shape),
            vp2o=config.vp2o.enabled and kind == "train",
            in_all_layers=not config.parallel.distributed_optimizer,
        )
    if isinstance(keep := config.model.keep_zeros, list):
        for pattern in keep:
            if not linear_weights(shape, [pattern]):
                raise UserError(
                    f"config: model.keep_zeros: '{pattern}' matches no linear layer of attention, MLPs or experts; true"
                    " stands for all of them"
                )
    if config.model.keep_zeros and config.checkpoint.load:
        raise UserError(
            "config: model.keep_zeros with checkpoint.load: the zeros are those of model.path; write the checkpoint as a folder"
            f" (megatron-rl convert {config.checkpoint.load} FOLDER), and give that as model.path"
        )
    if config.model.attention_sinks == "ignored" and not shape.sinks:
        raise UserError(
            f"config: model.attention_sinks = ignored, but {architecture(hf_config)} has no attention sinks; set it to exact"
        )


def _check_packages(config: Config, machine: Machine) -> None:
    """Refuse a part of Megatron whose package is missing: the first forward pass would fail. Errors: UserError."""
    if config.model.moe_router_fusion and not (machine.gpu and machine.transformer_engine):
        raise UserError(
            "config: model.moe_router_fusion needs a GPU and Transformer Engine; set it to false, or install it"
            " (tools/setup.sh --gpu)"
        )
    if config.model.moe_dispatcher == "flex" and importlib.util.find_spec("deep_ep") is None:
        raise UserError("config: model.moe_dispatcher = flex needs the package deep_ep; take alltoall, or install it")


def _check_kernels(config: Config, hf_config: PreTrainedConfig, machine: Machine) -> None:
    """Refuse a GPU on which plain torch would do our kernels' work, unless model.kernels allows it. Errors: UserError."""
    if machine.gpu is None or config.model.kernels == "any":
        return
    otherwise = "; model.kernels: any computes without, slower and with more memory"
    if machine.gpu < extensions.CAPABILITY:
        raise UserError(
            f"config: model.kernels = compiled: they run on compute capability {dotted(extensions.CAPABILITY)} and later,"
            f" this GPU has {dotted(machine.gpu)}{otherwise}"
        )
    if not extensions.have_cuda():
        raise UserError(
            "megatron_rl's kernels were built without nvcc, for the CPU alone: tools/setup.sh --gpu installs it and builds"
            f" them{otherwise}"
        )
    width, value_width = _head_widths(hf_config)
    dtype = TRAIN[config.precision.train].dtype
    if dtype == torch.bfloat16 and not flash_takes(dtype, width, value_width, machine.gpu):
        raise UserError(
            f"model folder {config.model.path}: no flash attention takes heads of {width} (keys) and {value_width} (values)"
            " numbers: multiples of 8 up to 256, values no wider than keys; model.kernels: any computes them tile by tile"
        )


def _head_widths(hf_config: PreTrainedConfig) -> tuple[int, int]:
    """Width of a head's queries and keys, and of its values."""
    if getattr(hf_config, "kv_lora_rank", None):
        return hf_config.qk_nope_head_dim + hf_config.qk_rope_head_dim, hf_config.v_head_dim
    width = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // hf_config.num_attention_heads
    return width, width


def activate_flash(config: Config) -> None:
    """Choose the version of flash attention. Errors: UserError for one that is not installed."""
    try:
        flash.activate(config.model.flash_attention)
    except ValueError as error:
        raise UserError(f"config: model.flash_attention = {config.model.flash_attention}: {error}") from None


def _check_correction(config: Config) -> None:
    """Refuse bounds that are missing or cross, and two corrections of one thing. Errors: UserError."""
    correction = config.correction
    try:
        correction_of(config)
    except ValueError as error:
        raise UserError(f"config: correction: {error}{_REMEDIES.get(correction.mode, '')}") from None
    if (correction.low or 0.0) > 1 or (correction.high is not None and correction.high < 1):
        raise UserError(
            f"config: correction.low = {correction.low}, high = {correction.high} leave out a ratio of 1, at which nothing"
            " is wrong: bounds are of the ratio trainer / engine itself; set low: 0.8 and high: 1.2 for a threshold of 0.2"
        )
    if correction.mode == "truncate" and correction.low is not None:
        raise UserError("config: correction.low with mode = truncate does nothing; set mode: clip, or low: null")
    if correction.mode == "none" and correction.level != "token":
        raise UserError("config: correction.level without a mode does nothing; set correction.mode, or reject_level")
    if correction.mode == "none" and (correction.low is not None or correction.high is not None):
        raise UserError(
            "config: correction.low or high without a mode does nothing; set correction.mode: mask, or remove it"
        )
    for key, given in (
        ("above", correction.reject_above is not None),
        ("level", correction.reject_level != "geometric"),
    ):
        if given and correction.reject == "none":
            raise UserError(
                f"config: correction.reject_{key} without a statistic does nothing; set correction.reject: k3, or remove it"
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
    if not policy_loss(config.algorithm).has_ratio:
        raise UserError(
            f"config: correction.bypass with algorithm.loss = {config.algorithm.loss}, which has no ratio that could start from"
            " the engine's log-probs; set correction.mode: truncate and bypass: false, or algorithm.loss: ppo"
        )
    if config.routing.source in ("r2", *PREDICTING) and config.batch.updates_per_step > 1:
        raise UserError(
            f"config: correction.bypass leaves out the pass in which routing.source = {config.routing.source} records the"
            " routes; set bypass: false, or routing.source: r3"
        )


_REMEDIES = {
    "truncate": "; set correction.high: 2.0",
    "mask": "; set correction.low: 0.5 and high: 2.0",
    "clip": "; set correction.low: 0.5 and high: 2.0",
}


def _check_routing(config: Config, hf_config: PreTrainedConfig) -> None:
    """Refuse a source of routes that cannot work with the rest of the config. Errors: UserError."""
    source = config.routing.source
    if config.routing.replay_gates and source != "r3":
        raise UserError(
            "config: routing.replay_gates replays the weights of experts that the engine chose, and routing.source ="
            f" {source} replays none of these: set routing.source: r3, or replay_gates: false"
        )
    if config.routing.give_up_below and source != "r3":
        raise UserError(
            "config: routing.give_up_below is for experts that the engine chose, and routing.source ="
            f" {source} takes none of these as they are: set routing.source: r3, or give_up_below: 0"
        )
    if config.rollout.gates and not asks_routes(config):
        raise UserError("config: rollout.gates = true asks for the weights of no experts: set rollout.routes: true")
    if source == "none":
        return
    if not expert_count(hf_config):
        raise UserError(f"config: routing.source = {source}, but {architecture(hf_config)} is dense; use none")
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
    if config.routing.features == "engine" and source != "pr3":
        raise UserError("config: routing.features = engine goes with routing.source = pr3 alone")
