"""Rules of the model's training state: what saves memory, and adapters, beside the rest of the config."""

from __future__ import annotations

from typing import TYPE_CHECKING

from packaging.version import Version

from megatron_rl.checks.rules import Rule, Rules
from megatron_rl.config import (
    FROM_ENGINE,
    AlgorithmConfig,
    LoRAConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    PrecisionConfig,
    RolloutConfig,
    RoutingConfig,
    SyncConfig,
    VP2OConfig,
)
from megatron_rl.config.optimizers import OPTIMIZERS
from megatron_rl.config.plan import READ_ONLY, Kind

if TYPE_CHECKING:
    from megatron_rl.models.precision import Machine

PRECISION_AWARE_TE = Version("2.1")
"""The first release whose Adam keeps only what the bf16 weights lack of the fp32 ones; before, it kept these whole."""


def memory_savers(
    optimizer: OptimizerConfig,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    vp2o: VP2OConfig,
    machine: Machine | None,
) -> Rules:
    """Rules of savers of the optimizer's or gradients' memory that cannot run with the rest, or on this machine."""
    sharded = parallel.distributed_optimizer
    sixteen_bits = precision.train != "fp32"
    offload, aware = optimizer.cpu_offload, optimizer.precision_aware
    share = f"optimizer.cpu_offload = {offload:g}"
    yield Rule(
        sharded and not OPTIMIZERS[optimizer.name].sharded,
        f"Megatron does not shard the state of optimizer.name = {optimizer.name}; set parallel.distributed_optimizer: false",
    )
    yield Rule(
        offload and not sharded,
        f"{share} is of the sharded optimizer; set parallel.distributed_optimizer: true",
    )
    yield Rule(
        offload and not sixteen_bits,
        f"{share} with precision.train = fp32: there are no 16-bit weights whose fp32 copies could be on the host; set"
        " precision.train: bf16, or cpu_offload: 0",
    )
    yield Rule(
        0 < offload < 1 and machine and machine.gpu and not machine.fused_adam,
        f"{share}: the share that stays on the GPU needs Transformer Engine or Apex, whose Adam a resumed run can tell"
        " from that of the host; install one, or set cpu_offload: 1.0",
    )
    yield Rule(
        offload and aware,
        f"{share} with optimizer.precision_aware: the host keeps whole fp32 weights; set one of the two",
    )
    yield Rule(
        aware and not sharded,
        "optimizer.precision_aware is of the sharded optimizer; set parallel.distributed_optimizer: true",
    )
    yield Rule(
        aware and not sixteen_bits,
        "optimizer.precision_aware with precision.train = fp32: there are no 16-bit weights to complete; set"
        " precision.train: bf16",
    )
    if machine:
        has_adam = machine.gpu is not None and Version(machine.transformer_engine or "0") >= PRECISION_AWARE_TE
        yield Rule(
            aware and not has_adam,
            "optimizer.precision_aware needs a GPU and the Adam of Transformer Engine 2.1 or later (found:"
            f" {machine.transformer_engine or 'none'}{'' if machine.gpu else ', no GPU'}); set it to false, or save by"
            " optimizer.cpu_offload",
        )
    yield Rule(
        optimizer.moments == "bf16" and not aware,
        "optimizer.moments = bf16 needs an Adam that takes them; set optimizer.precision_aware: true",
    )
    yield Rule(
        vp2o.trust_region is not None and (offload or aware),
        "vp2o.trust_region looks at a step before it is done, by the fp32 weights that"
        f" optimizer.{'cpu_offload' if offload else 'precision_aware'} keeps elsewhere; set one of the two",
    )
    yield Rule(
        precision.gradients == "bf16" and not sixteen_bits,
        "precision.gradients = bf16 with precision.train = fp32: gradients have the type of the weights, or fp32; set"
        " precision.train: bf16, or gradients: fp32",
    )
    yield Rule(
        precision.gradients == "bf16" and vp2o.enabled,
        "precision.gradients = bf16 with vp2o.enabled, whose repulsion is lost in bf16 sums; set gradients: fp32",
    )
    yield Rule(
        parallel.overlap_param_gather and not sharded,
        "parallel.overlap_param_gather without parallel.distributed_optimizer: there is nothing to gather; set"
        " overlap_param_gather: false",
    )
    yield Rule(
        parallel.overlap_param_gather and vp2o.enabled,
        "parallel.overlap_param_gather with vp2o.enabled, which reads the experts' weights between passes; set"
        " overlap_param_gather: false",
    )


def adapters(
    kind: Kind,
    lora: LoRAConfig,
    model: ModelConfig,
    vp2o: VP2OConfig,
    algorithm: AlgorithmConfig,
) -> Rules:
    """Rules of what adapters cannot go with."""
    yield Rule(
        kind in READ_ONLY and lora.path,
        f"lora.path = {lora.path}: only what trains reads adapters, and this looks at model.path; write the"
        f" whole model (megatron-rl convert {lora.path} OUT), set model.path: OUT, and leave lora out",
    )
    if kind in READ_ONLY or not lora.rank:
        return
    for contradicts, key, why, remedy in (
        (
            model.freeze,
            f"model.freeze = {model.freeze}",
            "adapters leave all weights as they are",
            "leave it out",
        ),
        (model.keep_zeros, "model.keep_zeros", "what is merged adds B A to zeros too", "leave it out"),
        (
            vp2o.enabled and kind == "train",
            "vp2o.enabled",
            "it transforms gradients of the experts' weights, which have none",
            "set it to false",
        ),
        (
            lora.dropout > 0 and algorithm.on_policy and kind == "train",
            f"lora.dropout = {lora.dropout:g} with algorithm.on_policy",
            "an update's policy lacks a part of what sampled",
            "set it to 0",
        ),
    ):
        yield Rule(contradicts, f"{key} with lora.rank = {lora.rank}: {why}; {remedy}, or set lora.rank: 0")


def unmerged_adapters(
    kind: Kind,
    lora: LoRAConfig,
    sync: SyncConfig,
    routing: RoutingConfig,
    rollout: RolloutConfig,
    precision: PrecisionConfig,
) -> Rules:
    """Rules of what SGLang does not serve beside a model."""
    if not lora.rank or sync.adapters != "unmerged" or kind != "train":
        return
    for contradicts, key, why, remedy in (
        (
            routing.source == "pr3",
            "routing.source = pr3",
            "the engine's predictors would not get what the trainer's have learned",
            "take pr2 or r3",
        ),
        (
            rollout.record and (rollout.routes or routing.source in FROM_ENGINE),
            "rollout.record with routes of the engine",
            "a record says whose routes it has by a digest of all weights",
            "set rollout.record: false",
        ),
        (lora.kind == "dora", "lora.kind = dora", "SGLang knows no lengths of rows", "set lora.kind: lora"),
        (
            rollout.colocate,
            "rollout.colocate",
            "servers lose their adapters when they sleep",
            "set rollout.colocate: false",
        ),
        (
            precision.rollout == "fp8",
            "precision.rollout = fp8",
            "the model's own weights would not be those that the trainer has",
            "set precision.rollout: bf16",
        ),
    ):
        yield Rule(contradicts, f"sync.adapters = unmerged: {key}: {why}; {remedy}, or set sync.adapters: merged")
