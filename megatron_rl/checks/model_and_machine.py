"""Checks of a config beside its models and this machine: folders, sizes, kernels, GPUs."""

from __future__ import annotations

import importlib.util
import os

import torch
from transformers import PreTrainedConfig

from megatron_rl.agents.programs import rollout_program
from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.algorithms.stein import neighborhood
from megatron_rl.checks.architecture import check_routers, check_teacher
from megatron_rl.checks.fit import check_fits
from megatron_rl.checks.identical_precision import check_identical
from megatron_rl.checks.keys import check_memory_savers
from megatron_rl.checks.lora import check_lora
from megatron_rl.checks.preference_learning import check_preferences
from megatron_rl.checks.prune_command import check_prune
from megatron_rl.config import OF_TOKENS, Config
from megatron_rl.config.credentials import key_of
from megatron_rl.config.plan import OFFLINE, READ_ONLY, Kind, critic_config
from megatron_rl.config.registry import resolve
from megatron_rl.data.hub import check_folder
from megatron_rl.errors import UserError
from megatron_rl.models.adapters import check_patterns
from megatron_rl.models.families import architecture, expert_count
from megatron_rl.models.hf_folder import check_same_tokenizer
from megatron_rl.models.parallel_check import check_parallel, read_hf_config
from megatron_rl.models.precision import TRAIN, Machine, check_precision, dotted, this_machine
from megatron_rl.models.shape import Shape, linear_weights, parameter_names
from megatron_rl.ops import extensions, flash
from megatron_rl.servers.flags import asks_routes, check_extra_args, server_flags
from megatron_rl.servers.local import place_here
from megatron_rl.sync.allocator import shares_expandable_memory
from megatron_rl.sync.transports import instead, transport_class
from megatron_rl.trainer.compute_advantages import estimator
from megatron_rl.trainer.objective import policy_loss


def check_models(config: Config, kind: Kind, world_size: int) -> PreTrainedConfig:
    """Check the model folders and what this machine can do, behind `preflight.check_config`. Returns the model's config.json.

    Errors: UserError naming the key or the file.
    """
    hf_config = read_hf_config(config.model.path)
    machine, from_data = this_machine(), kind in OFFLINE
    check_precision(config.precision, machine, trains=kind != "sample", rolls_out=not from_data)
    check_parallel(hf_config, config.parallel, world_size)
    check_identical(config, hf_config, machine)
    if not from_data:
        rollout_program(config.rollout.program)
    if not from_data and not config.rollout.external:
        _check_extra_args(config, hf_config)
    _check_places(config, kind)
    check_preferences(config, kind, world_size)
    if kind not in READ_ONLY:
        check_teacher(config, hf_config, kind, world_size)
    if kind == "prune":
        check_prune(config, hf_config, world_size)
    if kind == "train":
        key_of(config.distillation.api_key, "distillation.api_key")  # both are asked after the first responses only
        for name, scorer in config.rewards.models.items():
            key_of(scorer.api_key, f"rewards.models.{name}.api_key")
        _check_algorithm(config)
        _check_critic(config, world_size, machine)
        for name in config.hooks:
            resolve("hook", name, {}, "hooks")
        source = config.routing.source
        if source != "none" and not expert_count(hf_config):
            raise UserError(f"config: routing.source = {source}, but {architecture(hf_config)} is dense; use none")
    if kind not in READ_ONLY:
        _check_vp2o(config, hf_config)
        _check_weights(config, hf_config, kind)
        check_routers(config, hf_config, kind)
        check_lora(config, hf_config, kind)
    if kind != "sample":
        _check_packages(config, machine)
        _check_kernels(config, hf_config, machine)
        activate_flash(config, hf_config, machine)
    if kind not in READ_ONLY:
        check_memory_savers(config, machine)
        if torch.cuda.is_available():
            check_fits(config, hf_config, world_size, torch.cuda.mem_get_info()[1], kind)
    if kind == "train" and machine.gpu and shares_expandable_memory(transport_class(config.sync.transport), os.environ):
        raise UserError(
            f"config: sync.transport = {config.sync.transport} shares the trainer's memory, and PYTORCH_CUDA_ALLOC_CONF asks"
            " for expandable_segments, which torch shares with no other process; take it out, or set sync.transport:"
            f" {instead(colocate=config.rollout.colocate, shares_memory=False)}"
        )
    return hf_config


def _check_algorithm(config: Config) -> None:
    """Refuse functions of the user's own that are not there, and a loss without the ratio to correct. Errors: UserError."""
    if config.algorithm.advantage not in OF_TOKENS:
        estimator(config.algorithm)
    loss = policy_loss(config.algorithm)
    if config.correction.bypass and not loss.has_ratio:
        raise UserError(
            f"config: correction.bypass with algorithm.loss = {config.algorithm.loss}, which has no ratio that could start from"
            " the engine's log-probs; set correction.mode: truncate and bypass: false, or algorithm.loss: ppo"
        )


def _check_critic(config: Config, world_size: int, machine: Machine) -> None:
    """Refuse a critic that cannot learn beside the policy, or leaves it no step. Errors: UserError."""
    if config.algorithm.advantage != "gae":
        return
    critic, own = config.critic, critic_config(config)
    if critic.path is not None:
        check_folder(critic.path, "config: critic.path")
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


def _check_extra_args(config: Config, hf_config: PreTrainedConfig) -> None:
    """Refuse flags of SGLang that ask for other kernels than the run can use. Errors: UserError."""
    support = SamplingSupport.from_config(config.rollout.sampling, config.pruning)
    chosen = server_flags(
        hf_config.to_dict(),
        config.precision.rollout,
        this_machine(),
        routes=asks_routes(config),
        seeded_sets=support.keeps_sets and config.rollout.seed_requests,
    )
    check_extra_args(config.rollout.server.extra_args, chosen)


def _check_vp2o(config: Config, hf_config: PreTrainedConfig) -> None:
    """Refuse VP2O for a model without experts that interact. Errors: UserError."""
    vp2o, name = config.vp2o, architecture(hf_config)
    if not vp2o.enabled:
        return
    experts = expert_count(hf_config)
    if experts < 2:
        found = f"{name} has one expert a layer" if experts else f"{name} is dense"
        raise UserError(f"config: vp2o updates experts by their neighbors, but {found}; set vp2o.enabled: false")
    if vp2o.orthogonality and Shape.from_config(hf_config).topk < 2:
        raise UserError(
            f"config: vp2o.orthogonality = {vp2o.orthogonality:g}, but {name} sends a token to one expert, which has nothing to"
            " be kept apart from; set vp2o.orthogonality: 0"
        )
    by_number = vp2o.attract_above is None and vp2o.repel_below is None
    neighbors, inactive = neighborhood(experts, vp2o.neighbors, vp2o.inactive_neighbors)
    if vp2o.repulsion and by_number and neighbors + inactive >= max(experts, 3):  # two experts can but repel each other
        fitting = neighborhood(experts)
        raise UserError(
            f"config: vp2o.neighbors = {neighbors} (itself among them) and inactive_neighbors = {inactive} leave no pair of"
            f" {name}'s {experts} experts a layer alone; set vp2o.neighbors: {fitting[0]} and vp2o.inactive_neighbors:"
            f" {fitting[1]}, or leave both out"
        )


def _check_places(config: Config, kind: Kind) -> None:
    """Refuse GPUs that are not there, or cannot read each other's memory where they have to. Errors: UserError."""
    rollout = config.rollout
    if kind in OFFLINE or rollout.load or rollout.external:
        return
    places = place_here(config, trains=kind == "train")
    if kind == "sample":
        return
    if transport_class(config.sync.transport).needs_peer_access:  # the bucket lies on the first process's GPU
        far = [gpu for gpus in places for gpu in gpus if gpu and not torch.cuda.can_device_access_peer(gpu, 0)]
        if far:
            raise UserError(
                f"config: sync.transport = {config.sync.transport}: GPU {far[0]} has no peer access to GPU 0, where the weights"
                f" are sent from; set sync.transport: {instead(colocate=rollout.colocate, needs_peer_access=False)}"
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
    heads, dtype = _heads(hf_config), TRAIN[config.precision.train].dtype
    if dtype == torch.bfloat16 and not flash.takes("torch", dtype, heads, machine.gpu):
        raise UserError(
            f"model folder {config.model.path}: no flash attention takes heads of {heads.width} (keys) and"
            f" {heads.value_width} (values) numbers: multiples of 8 up to 256, values no wider than keys; model.kernels: any"
            " computes them tile by tile"
        )


def _heads(hf_config: PreTrainedConfig) -> flash.Heads:
    shape = Shape.from_config(hf_config)
    return flash.Heads(shape.head_dim, shape.value_dim, grouped=shape.kv_heads != shape.heads)


def activate_flash(config: Config, hf_config: PreTrainedConfig, machine: Machine) -> None:
    """Choose the version of flash attention. Errors: UserError for one that is not installed or cannot be taken here."""
    asked, dtype = config.model.flash_attention, TRAIN[config.precision.train].dtype
    try:
        flash.activate(asked, machine.gpu)
    except ValueError as error:
        remedy = "; torch does without it" if asked == "auto" else ""
        raise UserError(f"config: model.flash_attention = {asked}: {error}{remedy}") from None
    heads = _heads(hf_config)
    if asked == "FA4" and machine.gpu and not flash.takes("FA4", dtype, heads, machine.gpu):
        raise UserError(
            f"config: model.flash_attention = FA4: it does not take heads of {heads.width} (keys) and {heads.value_width}"
            f" (values) numbers in {str(dtype).removeprefix('torch.')} on this GPU; auto takes what does"
        )
