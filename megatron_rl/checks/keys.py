"""Checks of sections by their keys alone: what does nothing, and what contradicts itself. No torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from packaging.version import Version

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.config import Config, DistillationConfig
from megatron_rl.config.conditions import changed, idle
from megatron_rl.config.optimizers import OPTIMIZERS
from megatron_rl.config.plan import Kind
from megatron_rl.errors import UserError

if TYPE_CHECKING:
    from megatron_rl.models.precision import Machine

PRECISION_AWARE_TE = Version("2.1")
"""The first release whose Adam keeps only what the bf16 weights lack of the fp32 ones; before, it kept these whole."""


def refuse_idle(config: Config, kind: Kind, under: str = "") -> None:
    """Errors: UserError naming a key below `under` that is set, and that a command reads only with others (conditions.py)."""
    if problem := idle(config, kind, under):
        raise UserError(f"config: {problem}")


def check_preference_keys(config: Config, kind: Kind) -> None:
    """Errors: UserError naming a key that does nothing in learning from preferences or reward models, or that is missing."""
    if kind in ("train", "dpo"):
        _check_start(config, kind)
    if kind == "dpo":
        _check_dpo(config)
    models = config.rewards.models or config.rewards.judges
    if kind == "train" and config.data.verifier == "none" and not models and not config.teaches:
        raise UserError(
            "config: data.verifier: none judges no response, and rewards.models is empty, so that nothing gives a reward;"
            " name a reward model, a judge (rewards.judges), a teacher (distillation.teacher), or another verifier"
        )
    if kind not in ("train", "sample"):
        return
    refuse_idle(config, kind, "rewards.")
    for name, model in config.rewards.models.items():
        if model.path is None and model.address is None:
            raise UserError(
                f"config: rewards.models.{name} has neither a path nor an address; give it the folder of a reward model"
            )
    if config.rewards.overlong_buffer > config.rollout.max_new_tokens:
        raise UserError(
            f"config: rewards.overlong_buffer = {config.rewards.overlong_buffer} is more than rollout.max_new_tokens ="
            f" {config.rollout.max_new_tokens}, so that every response would be punished; make it smaller"
        )


def _check_dpo(config: Config) -> None:
    dpo = config.dpo
    if dpo.loss == "kto" and config.batch.prompts_per_step < 2:
        raise UserError(
            "config: batch.prompts_per_step = 1 with dpo.loss = kto, whose baseline takes each prompt with the response to"
            " another one; use 2 or more"
        )


def _check_start(config: Config, kind: Kind) -> None:
    """A reference that nobody names is the policy's start, and a checkpoint is no folder that it could be read from."""
    key, named = (
        ("dpo.reference", config.dpo.reference)
        if kind == "dpo"
        else ("algorithm.kl.reference", config.algorithm.kl.reference)
    )
    wanted = kind == "dpo" or config.policy_reference is not None
    if config.checkpoint.load and wanted and named is None:
        raise UserError(
            f"config: checkpoint.load without {key}: the policy would begin as {config.checkpoint.load}, and its reference as"
            f" {config.model.path}; convert the checkpoint and give its folder as model.path, or name the reference"
        )


def check_teacher_keys(config: Config, kind: Kind) -> None:
    """Errors: UserError naming a key of distillation that does nothing here, or contradicts another."""
    settings = config.distillation
    if not config.teaches:
        return
    if kind not in ("sft", "train"):
        raise UserError(
            f"config: a teacher is of megatron-rl sft and train, and {kind} has none; leave distillation out"
        )
    _check_choices(settings, kind)
    if kind == "train":
        _check_advantages(config)
    if settings.recorded and config.data.tokens_key is None:
        raise UserError(
            "config: distillation.recorded learns what a teacher said of recorded tokens, and data.tokens_key: null leaves"
            " them out; set tokens_key: response_tokens"
        )


def _check_choices(settings: DistillationConfig, kind: Kind) -> None:
    default = DistillationConfig()
    sources = {
        "teacher": settings.teacher is not None,
        "address": settings.address is not None,
        "recorded": settings.recorded,
    }
    if len(given := [f"distillation.{name}" for name, there in sources.items() if there]) > 1:
        raise UserError(f"config: {given[0]} and {given[1]} are both given; leave one of them out")
    if not settings.coefficient and not settings.feature_layers:
        raise UserError("config: distillation.coefficient = 0: the teacher would teach nothing; leave distillation out")
    for key, contradicts, why, remedy in (
        (
            "placement = advantage",
            settings.placement == "advantage" and kind == "sft",
            "demonstrations have no advantages",
            "set it to loss",
        ),
        (
            "recorded",
            settings.recorded and kind == "train",
            "a record is of demonstrations, and train learns from what the model samples",
            "set distillation.teacher",
        ),
        *(
            (
                f"{key} = {getattr(settings, key)}",
                settings.recorded and wrong,
                "recorded log-probs are those of temperature 1, and of a part of the tokens",
                remedy,
            )
            for key, wrong, remedy in (
                ("temperature", settings.temperature != 1.0, "leave it out, or set distillation.teacher"),
                ("direction", settings.direction == "jensen_shannon", "set it to forward or reverse"),
            )
        ),
        (
            "address",
            settings.address is not None and settings.placement == "loss",
            "a server tells the log-probs of sampled tokens alone, and the loss asks for whole distributions",
            "set placement: advantage" if kind == "train" else "set distillation.teacher",
        ),
        *(
            (
                f"{key} = {getattr(settings, key)}",
                settings.placement == "advantage" and getattr(settings, key) != getattr(default, key),
                "placement = advantage looks at the log-probs of the sampled tokens as they are",
                "leave it out, or set placement: loss",
            )
            for key in ("direction", "mix", "temperature")
        ),
        (
            f"feature_layers = {[list(pair) for pair in settings.feature_layers]}",
            bool(settings.feature_layers) and settings.teacher is None,
            "only a model beside this one has layers to look at",
            "set distillation.teacher",
        ),
        (
            f"mix = {settings.mix}",
            settings.mix != default.mix and settings.direction != "jensen_shannon",
            f"direction = {settings.direction} has no mixture",
            "leave it out, or set direction: jensen_shannon",
        ),
    ):
        if contradicts:
            raise UserError(f"config: distillation.{key}: {why}; {remedy}")


def _check_advantages(config: Config) -> None:
    """Refuse what would be left out of the advantages, or compared with something else, without a word."""
    settings, algorithm, sampling = config.distillation, config.algorithm, config.rollout.sampling
    shaped = {
        "algorithm.entropy_reward": algorithm.entropy_reward > 0,
        "algorithm.kl.placement = reward": algorithm.kl.coefficient > 0 and algorithm.kl.placement == "reward",
    }
    for key, given in shaped.items():
        if given and not settings.task_coefficient:
            raise UserError(
                f"config: {key} with distillation.task_coefficient = 0: it is a part of the rewards, of which nothing counts;"
                " set task_coefficient, or leave it out"
            )
    cut = sampling.top_p < 1 or sampling.top_k > 0 or sampling.tail_floor is not None or config.pruning.enabled
    if settings.placement == "advantage" and (sampling.temperature != 1 or cut):
        raise UserError(
            "config: distillation.placement = advantage compares the teacher's log-probs, at temperature 1 over the whole"
            " vocabulary, with those of what is sampled from; set rollout.sampling.temperature: 1 and neither top_p, top_k nor"
            " pruning, or placement: loss"
        )


def check_prune_keys(config: Config) -> None:
    """Errors: UserError where nothing would be removed, or the rest of the config cannot go with it."""
    prune = config.prune
    sizes = (prune.layers, prune.heads, prune.width, prune.experts, prune.expert_width)
    if sizes == (None,) * len(sizes) and prune.sparsity == "none":
        raise UserError("config: prune removes nothing: set prune.experts, another size, or prune.sparsity: '2:4'")
    if config.lora.rank:
        raise UserError(
            f"config: lora.rank = {config.lora.rank}: prune cuts the model at model.path, without adapters; leave lora out"
        )
    if config.precision.train not in ("bf16", "fp32"):
        raise UserError(
            f"config: precision.train = {config.precision.train}: importance is measured in bf16 or fp32; take one of them"
        )


# -- demonstration checks ------------------------------------------------------------------------------------------------
# Checks of `megatron-rl rollout` where it writes demonstrations: keys that do nothing, and what cannot be recorded.


def check_demonstrations(config: Config, vocabulary: int | None = None) -> None:
    """Errors: UserError naming a key of rollout.demonstrations that does nothing, or cannot be.

    vocabulary: tokens that the model has, where that is known.
    """
    settings, key = config.rollout.demonstrations, "config: rollout.demonstrations"
    refuse_idle(config, "sample", "rollout.demonstrations.")
    if settings.min_reward is None:
        return
    if settings.max_tokens is not None and settings.max_tokens < settings.min_tokens:
        raise UserError(
            f"{key}.max_tokens = {settings.max_tokens} is below min_tokens = {settings.min_tokens}; swap them"
        )
    if not settings.top_log_probs:
        return
    wanted = f"{key}.top_log_probs = {settings.top_log_probs}"
    if config.rollout.load:
        raise UserError(f"{wanted}: rollout.load asks no engine; leave one of them out")
    support = SamplingSupport.from_config(config.rollout.sampling, config.pruning)
    if support != SamplingSupport():
        raise UserError(
            f"{wanted} records the plain policy, and sampling changes it ({', '.join(changed(support))}); set"
            " rollout.sampling.temperature: 1.0, top_p: 1.0, top_k: -1, and leave tail_floor and pruning out"
        )
    if vocabulary is not None and settings.top_log_probs > vocabulary:
        raise UserError(f"{wanted}: the model has {vocabulary} tokens; lower it")


def check_memory_savers(config: Config, machine: Machine | None = None) -> None:
    """Refuse a saver of the optimizer's or gradients' memory that cannot run with the rest, or here. Errors: UserError."""
    opt, vp2o = config.optimizer, config.vp2o
    sharded = config.parallel.distributed_optimizer
    sixteen_bits = config.precision.train != "fp32"
    share = f"optimizer.cpu_offload = {opt.cpu_offload:g}"
    for refused, problem in (
        (
            sharded and not OPTIMIZERS[opt.name].sharded,
            f"Megatron does not shard the state of optimizer.name = {opt.name}; set parallel.distributed_optimizer: false",
        ),
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
            0 < opt.cpu_offload < 1 and machine and machine.gpu and not machine.fused_adam,
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
            opt.precision_aware and machine and not _has_precision_aware_adam(machine),
            machine
            and (
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


def _has_precision_aware_adam(machine: Machine) -> bool:
    return machine.gpu is not None and Version(machine.transformer_engine or "0") >= PRECISION_AWARE_TE
