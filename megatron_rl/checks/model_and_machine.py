"""Checks of a config against its models and this machine: folders, sizes, kernels, GPUs."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator, Sequence

import torch
from transformers import PreTrainedConfig

from megatron_rl.agents.programs import rollout_program
from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.algorithms.stein import neighborhood
from megatron_rl.checks.architecture import routers, teacher_folder
from megatron_rl.checks.fit import check_fits
from megatron_rl.checks.identical_precision import IDENTICAL
from megatron_rl.checks.key_rules import ADAPTERS, MEMORY
from megatron_rl.checks.lora import adapted_layers
from megatron_rl.checks.preference_learning import judges, pooling, process_rewards, reference, scorers
from megatron_rl.checks.prune_command import pruned_model
from megatron_rl.checks.refusals import Check, Refusal, Rule, errors_of, refuse
from megatron_rl.config import (
    OF_TOKENS,
    AlgorithmConfig,
    Config,
    CorrectionConfig,
    DistillationConfig,
    ModelConfig,
    ParallelConfig,
    PrecisionConfig,
    PruningConfig,
    RewardsConfig,
    RolloutConfig,
    RoutingConfig,
    SyncConfig,
    VP2OConfig,
)
from megatron_rl.config.conditions import LEARNING
from megatron_rl.config.plan import OFFLINE, Kind, critic_config
from megatron_rl.config.registry import resolve
from megatron_rl.credentials import key_of
from megatron_rl.data.hub import check_folder
from megatron_rl.errors import UserError
from megatron_rl.models.families import architecture, expert_count
from megatron_rl.models.freeze import check_patterns
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
    """Check the model folders and the abilities of this machine. Return the model's config.json.

    `preflight.check_config` has to run before. Errors: UserError that names the key or the file.
    """
    hf_config, machine = read_hf_config(config.model.path), this_machine()
    facts = {"kind": kind, "world_size": world_size, "hf_config": hf_config, "machine": machine}
    refuse(config, *(check for kinds, checks in RULES if kind in kinds for check in checks), **facts)
    if kind == "train" and config.algorithm.advantage == "gae":
        _check_critic(config, facts)
    if kind in LEARNING and torch.cuda.is_available():
        check_fits(config, hf_config, world_size, torch.cuda.mem_get_info()[1], kind)
    return hf_config


def _check_critic(config: Config, facts: dict) -> None:
    critic, own = config.critic, critic_config(config)
    if critic.path is not None:
        check_folder(critic.path, "config: critic.path")
    hf_config = read_hf_config(own.model.path)
    with errors_of("of the critic"):
        check_parallel(hf_config, config.parallel, facts["world_size"])
        refuse(own, *MEMORY, *ADAPTERS, adapted_layers, **facts | {"kind": "sft", "hf_config": hf_config})
    if critic.path is not None:
        check_same_tokenizer(config.model.path, critic.path, "critic.path")
    names = parameter_names(Shape.from_config(hf_config, value_head=True))
    in_all_layers = not config.parallel.distributed_optimizer
    check_patterns(critic.freeze, names, in_all_layers=in_all_layers, key="critic.freeze")


def _precision(
    precision: PrecisionConfig,
    parallel: ParallelConfig,
    hf_config: PreTrainedConfig,
    machine: Machine,
    kind: Kind,
    world_size: int,
) -> None:
    check_precision(precision, machine, trains=kind != "sample", rolls_out=kind not in OFFLINE)
    check_parallel(hf_config, parallel, world_size)


def _outside(
    kind: Kind,
    rollout: RolloutConfig,
    distillation: DistillationConfig,
    rewards: RewardsConfig,
    hooks: list[str],
) -> None:
    """Check the user's own programs, hooks and API keys, which are defined outside of the config."""
    rollout_program(rollout.program)
    if kind != "train":
        return
    key_of(distillation.api_key, "distillation.api_key")  # else a wrong key would show only after the first responses
    for name, scorer in rewards.models.items():
        key_of(scorer.api_key, f"rewards.models.{name}.api_key")
    for name in hooks:
        resolve("hook", name, {}, "hooks")


def _extra_args(
    rollout: RolloutConfig,
    pruning: PruningConfig,
    routing: RoutingConfig,
    precision: PrecisionConfig,
    hf_config: PreTrainedConfig,
    machine: Machine,
) -> None:
    """Refuse flags of SGLang that select kernels which the run cannot use. Errors: UserError."""
    if rollout.external:
        return
    support = SamplingSupport.from_config(rollout.sampling, pruning)
    chosen = server_flags(
        hf_config.to_dict(),
        precision.rollout,
        machine,
        routes=asks_routes(rollout, routing),
        seeded_sets=support.keeps_sets and rollout.seed_requests,
    )
    check_extra_args(rollout.server.extra_args, chosen)


def places(kind: Kind, rollout: RolloutConfig, sync: SyncConfig) -> Iterator[Refusal]:
    """Refuse GPUs that do not exist, or GPUs that must read each other's memory but cannot."""
    if rollout.load or rollout.external:
        return
    found = place_here(rollout, trains=kind == "train")
    if kind == "sample" or not transport_class(sync.transport).needs_peer_access:
        return
    for gpu in [gpu for gpus in found for gpu in gpus if gpu]:  # the bucket lies on the first process's GPU
        yield Refusal(
            not torch.cuda.can_device_access_peer(gpu, 0),
            f"sync.transport = {sync.transport}: GPU {gpu} has no peer access to GPU 0, which sends the weights; set"
            f" sync.transport: {instead(colocate=rollout.colocate, needs_peer_access=False)}",
        )


def _policy(algorithm: AlgorithmConfig, correction: CorrectionConfig) -> Iterator[Refusal]:
    """Refuse a user's function that does not exist, or a loss that has no ratio although correction.bypass needs one."""
    if algorithm.advantage not in OF_TOKENS:
        estimator(algorithm)
    loss = policy_loss(algorithm)
    yield Refusal(
        correction.bypass and not loss.has_ratio,
        f"correction.bypass with algorithm.loss = {algorithm.loss}: this loss has no ratio to SGLang's log-probs; set"
        " correction.mode: truncate and bypass: false, or algorithm.loss: ppo",
    )


def _experts(vp2o: VP2OConfig, hf_config: PreTrainedConfig) -> Iterator[Refusal]:
    """Refuse VP2O for a model without several experts per layer."""
    if not vp2o.enabled:
        return
    name, experts = architecture(hf_config), expert_count(hf_config)
    found = f"{name} has one expert per layer" if experts else f"{name} is dense"
    yield Refusal(
        experts < 2, f"vp2o updates experts with their neighbors' gradients, but {found}; set vp2o.enabled: false"
    )
    yield Refusal(
        vp2o.orthogonality and Shape.from_config(hf_config).topk < 2,
        f"vp2o.orthogonality = {vp2o.orthogonality:g}, but {name} sends each token to a single expert, which has no"
        " other output to be orthogonal to; set vp2o.orthogonality: 0",
    )
    by_number = vp2o.attract_above is None and vp2o.repel_below is None
    neighbors, inactive = neighborhood(experts, vp2o.neighbors, vp2o.inactive_neighbors)
    fitting = neighborhood(experts)
    yield Refusal(
        vp2o.repulsion
        and by_number
        and neighbors + inactive >= max(experts, 3),  # two experts can only repel each other
        f"vp2o.neighbors = {neighbors} (itself included) and inactive_neighbors = {inactive} cover all pairs of"
        f" {name}'s {experts} experts per layer; set vp2o.neighbors: {fitting[0]} and vp2o.inactive_neighbors:"
        f" {fitting[1]}, or leave both out",
    )


def _weights(
    model: ModelConfig, vp2o: VP2OConfig, parallel: ParallelConfig, hf_config: PreTrainedConfig, kind: Kind
) -> Iterator[Refusal]:
    """Refuse frozen or ignored weights that do not exist, or frozen weights that must be trained."""
    shape = Shape.from_config(hf_config)
    if model.freeze:
        moves = vp2o.enabled and kind == "train"
        in_all_layers = not parallel.distributed_optimizer
        check_patterns(model.freeze, parameter_names(shape), vp2o=moves, in_all_layers=in_all_layers)
    for pattern in model.keep_zeros if isinstance(model.keep_zeros, list) else ():
        yield Refusal(
            not linear_weights(shape, [pattern]),
            f"model.keep_zeros: '{pattern}' matches no linear layer of attention, MLPs or experts; correct it, or use"
            " true for all of them",
        )
    yield Refusal(
        model.attention_sinks == "ignored" and not shape.sinks,
        f"model.attention_sinks = ignored, but {architecture(hf_config)} has no attention sinks; set it to exact",
    )


PACKAGES = (
    Rule(
        lambda model, machine: model.moe_router_fusion and not (machine.gpu and machine.transformer_engine),
        "model.moe_router_fusion needs a GPU and Transformer Engine; set it to false, or install it (tools/setup.sh --gpu)",
    ),
    Rule(
        lambda model: model.moe_dispatcher == "flex" and importlib.util.find_spec("deep_ep") is None,
        "model.moe_dispatcher = flex needs the package deep_ep; use alltoall, or install it",
    ),
)
"""Rules that refuse features of Megatron whose package is missing. Otherwise the first forward pass would fail."""


def _kernels(
    model: ModelConfig, precision: PrecisionConfig, hf_config: PreTrainedConfig, machine: Machine
) -> Iterator[Refusal]:
    """Refuse a GPU on which plain torch would replace this package's kernels, unless model.kernels allows this."""
    if machine.gpu is None or model.kernels == "any":
        return
    otherwise = "; model.kernels: any runs without them, slower and with more memory"
    yield Refusal(
        machine.gpu < extensions.CAPABILITY,
        f"model.kernels = compiled: the kernels need compute capability {dotted(extensions.CAPABILITY)} or later, and"
        f" this GPU has {dotted(machine.gpu)}{otherwise}",
    )
    if not extensions.have_cuda():
        raise UserError(
            "megatron_rl's kernels were built without nvcc, only for the CPU: tools/setup.sh --gpu installs nvcc and"
            f" builds them{otherwise}"
        )
    heads, dtype = _heads(hf_config), TRAIN[precision.train].dtype
    if dtype == torch.bfloat16 and not flash.takes("torch", dtype, heads, machine.gpu):
        raise UserError(
            f"model folder {model.path}: no flash attention supports heads of {heads.width} (keys) and"
            f" {heads.value_width} (values) numbers; it needs multiples of 8 up to 256, with values no wider than"
            " keys. Set model.kernels: any, which computes attention in tiles"
        )


def _heads(hf_config: PreTrainedConfig) -> flash.Heads:
    shape = Shape.from_config(hf_config)
    return flash.Heads(shape.head_dim, shape.value_dim, grouped=shape.kv_heads != shape.heads)


def activate_flash(
    model: ModelConfig, precision: PrecisionConfig, hf_config: PreTrainedConfig, machine: Machine
) -> None:
    """Select the version of flash attention. Errors: UserError if it is not installed or does not work here."""
    asked, dtype = model.flash_attention, TRAIN[precision.train].dtype
    try:
        flash.activate(asked, machine.gpu)
    except ValueError as error:
        remedy = "; set it to torch, which does not need it" if asked == "auto" else ""
        raise UserError(f"config: model.flash_attention = {asked}: {error}{remedy}") from None
    heads = _heads(hf_config)
    if asked == "FA4" and machine.gpu and not flash.takes("FA4", dtype, heads, machine.gpu):
        raise UserError(
            f"config: model.flash_attention = FA4: it does not support heads of {heads.width} (keys) and"
            f" {heads.value_width} (values) numbers in {str(dtype).removeprefix('torch.')} on this GPU; set it to auto"
        )


def _shared_memory(sync: SyncConfig, rollout: RolloutConfig, machine: Machine) -> Iterator[Refusal]:
    yield Refusal(
        machine.gpu and shares_expandable_memory(transport_class(sync.transport), os.environ),
        f"sync.transport = {sync.transport} shares the trainer's memory, but PYTORCH_CUDA_ALLOC_CONF asks for"
        " expandable_segments, which torch cannot share with another process; remove expandable_segments, or set"
        f" sync.transport: {instead(colocate=rollout.colocate, shares_memory=False)}",
    )


ASKING: tuple[Kind, ...] = ("train", "sample")
RULES: tuple[tuple[tuple[Kind, ...], Sequence[Rule | Check]], ...] = (
    ((*ASKING, *OFFLINE), (_precision, *IDENTICAL)),
    (ASKING, (_outside, _extra_args, places)),
    (("reward",), (pooling,)),
    (("train", "dpo"), (reference,)),
    (ASKING, (scorers, process_rewards, judges)),
    (LEARNING, (teacher_folder,)),
    (("prune",), (pruned_model,)),
    (("train",), (_policy,)),
    (LEARNING, (_experts, _weights, routers, adapted_layers)),
    (("train", *OFFLINE), (*PACKAGES, _kernels, activate_flash)),
    (LEARNING, MEMORY),
    (("train",), (_shared_memory,)),
)
"""(kinds of runs, checks of their models and of this machine), in the order in which the checks run."""
