"""Does it fit? Bytes of a run on one GPU by kind, of a save on the host, and of a push, by arithmetic.

Exact: weights, gradients, optimizer state, reference, predictors, critic, reward models. Counted from what the code keeps for
the backward: activations and logits (`activations.py`). Upper bounds: temporaries of a layer, and all that grows with the
tokens of a step, as every response may be as long as rollout.context_length allows. Assumed: RESERVE, ASLEEP and IMBALANCE.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from megatron_rl.checks.activations import GPU, Kernels, head_work, layer_work, stage_activations
from megatron_rl.config import FROM_ENGINE, PREDICTING, Config, LoRAConfig, OptimizerConfig
from megatron_rl.config.optimizers import OPTIMIZERS
from megatron_rl.config.plan import (
    Kind,
    Plan,
    critic_config,
    expert_tensor_size,
    make_plan,
    pipeline_bubble,
    reference_of,
)
from megatron_rl.errors import UserError
from megatron_rl.models.adapters import ADAPTER, is_frozen
from megatron_rl.models.parallel_check import check_parallel, read_hf_config
from megatron_rl.models.precision import ROLLOUT_DTYPES, TRAIN
from megatron_rl.models.shape import (
    Counts,
    Shape,
    Weight,
    adapter_weights,
    count,
    model_counts,
    rank_weights,
    stage_layers,
    whole_model,
)
from megatron_rl.routing.table import cache_cost, route_dtype
from megatron_rl.sync.transports import transport_class
from megatron_rl.trainer.objective import Policy

GB = 10**9
RESERVE = 3 * GB
"""CUDA's context, NCCL's buffers, workspaces of cuBLAS and attention, fragments of the allocator: an assumption."""
ASLEEP = 2 * GB
"""Bytes that a colocated engine keeps while the trainer trains, CUDA's context and graphs: an assumption."""
SEQUENCES: dict[Kind, int] = {"sft": 1, "reward": 2, "dpo": 2}
"""Sequences of a prompt where data is learned from, in one update: comparisons are counted as pairs."""
GRADIENT_WIDTH = {"fp32": 4, "bf16": 2}
NODE = 8
"""GPUs of a node."""
EXACT = ("weights", "gradients", "optimizer", "reference", "predictors", "critic", "reward_models")
STEIN_BUFFERS = 3
"""Buffers of VP2O's transform, in sizes of a layer's output projections in fp32: these, and what it solves for."""


@dataclass(frozen=True)
class Usage:
    """Bytes on one GPU of one pipeline stage."""

    stage: int
    resident: dict[str, int]
    """Bytes by kind that are held from the start, or from the first step on, to the end."""
    phases: dict[str, dict[str, int]]
    """Temporaries by phase of a step and kind. One phase follows another, so the largest of them counts."""

    @property
    def total(self) -> int:
        """Bytes at the largest phase."""
        return sum(self.resident.values()) + max(sum(kinds.values()) for kinds in self.phases.values())

    @property
    def kinds(self) -> dict[str, int]:
        """All kinds, temporaries included; their sum is more than the total, as phases share their memory."""
        merged = dict(self.resident)
        for kinds in self.phases.values():
            merged |= kinds
        return {kind: size for kind, size in merged.items() if size}

    @property
    def peak(self) -> dict[str, int]:
        """The kinds that make up the total: what is resident, and the largest phase."""
        largest = max(self.phases.values(), key=lambda kinds: sum(kinds.values()))
        return {kind: size for kind, size in {**self.resident, **largest}.items() if size}

    @property
    def largest(self) -> str:
        """The kind that has most of the total."""
        return max((size, kind) for kind, size in self.peak.items() if kind != "reserve")[1]

    @property
    def least(self) -> int:
        """Bytes without which no step is possible, whatever its tokens: exact."""
        return sum(self.resident[kind] for kind in EXACT)


@dataclass(frozen=True)
class Estimate:
    """Memory that a run needs."""

    gpus: int
    counts: Counts
    usage: Usage
    """Usage of the pipeline stage that needs most."""
    save: dict[str, int]
    push: dict[str, int]
    host: int
    """Bytes of a process's optimizer in host memory."""
    micro_batches: int
    """Most micro-batches of an update on a data-parallel rank: all responses are as long as they may be."""
    bubble: float
    """Share of an update's passes in which a pipeline stage waits with so many; with fewer it is more."""

    def fits(self, memory: int) -> bool:
        """True if the run fits in `memory` bytes of each GPU."""
        return self.usage.total <= memory


def estimate(
    config: Config, hf_config: PreTrainedConfig, gpus: int, kernels: Kernels = GPU, *, run: Kind = "train"
) -> Estimate:
    """Estimate training with this config on `gpus` trainer GPUs. Errors: UserError for sizes that do not divide."""
    if gpus < 1:
        raise UserError(f"plan: --gpus {gpus}: the trainer needs at least one")
    check_parallel(hf_config, config.parallel, gpus)
    batch = config.batch
    if run in SEQUENCES:
        batch = replace(batch, samples_per_prompt=SEQUENCES[run], updates_per_step=1)
    plan = make_plan(batch, config.parallel, gpus)
    shape = Shape.from_config(hf_config)
    stages = [stage_usage(config, shape, plan, stage, kernels, run) for stage in range(config.parallel.pipeline)]
    usage = max(stages, key=lambda usage: usage.total)
    save, push = save_cost(config, shape, gpus), push_cost(config, shape)
    micro_batches = _StepTokens.of(config, plan).micro_batches // plan.updates_per_step
    bubble = pipeline_bubble(config.parallel.pipeline, micro_batches, config.parallel.virtual_pipeline)
    host = host_bytes(config, shape, gpus)
    return Estimate(gpus, model_counts(shape), usage, save, push, host, micro_batches, bubble)


# -- one GPU -----------------------------------------------------------------------------------------------------------


def stage_usage(
    config: Config, shape: Shape, plan: Plan, stage: int, kernels: Kernels = GPU, run: Kind = "train"
) -> Usage:
    """Bytes on a GPU of one pipeline stage."""
    options = {"transformer_engine": kernels.transformer_engine, "lora": config.lora}
    weights = rank_weights(shape, config.parallel, stage, **options)
    moe_layers = [i for i in stage_layers(shape, config.parallel, stage) if i in shape.moe_layers]
    tokens = _StepTokens.of(config, plan)
    resident = (
        parameter_bytes(config, weights, plan.world_size)
        | {"reference": _reference_bytes(config, weights, run)}
        | {"masks": _mask_bytes(config, weights)}
        | {"predictors": _predictor_bytes(config, shape, moe_layers)}
        | _batch_bytes(config, shape, moe_layers, tokens)
        | _vp2o_bytes(config, shape, moe_layers)
        | _companion_bytes(config, shape, stage, tokens, plan.world_size, kernels)
        | {"push": _push_buffers(config, shape), "server": ASLEEP * config.rollout.colocate, "reserve": RESERVE}
    )
    return Usage(stage, resident, _phases(config, shape, stage, weights, tokens, plan.world_size, kernels))


def parameter_bytes(config: Config, weights: list[Weight], gpus: int) -> dict[str, int]:
    """Bytes of the weights, gradients and optimizer state that one rank holds.

    2 + 4 + 12 bytes a parameter in bf16 (the last shared by the data-parallel ranks), 4 + 4 + 8 in fp32. Padding of Megatron's
    buffers (below 256 bytes a tensor) is left out.
    """
    recipe = TRAIN[config.precision.train]
    width = recipe.dtype.itemsize
    held = count(weights)
    trained = trained_weights(config, weights)
    copies = sum(w.size for w in weights if w.is_matrix) if recipe.fp8_recipe else 0
    return {
        "weights": held * width,
        "fp8_weights": 2 * copies,  # of Transformer Engine's layers, one a direction of their products
        "gradients": GRADIENT_WIDTH[config.precision.gradients] * count(trained),
        "optimizer": int(optimizer_width(config) * sharded(config, trained, gpus)),
    }


def trained_weights(config: Config, weights: list[Weight]) -> list[Weight]:
    """Weights that have gradients and optimizer state."""
    if config.lora.rank:
        return [w for w in weights if ADAPTER in w.name or (w.part == "head" and w.shape[0] == 1)]
    # A pattern that names single experts does not match the * of all.
    return [w for w in weights if not is_frozen(w.name, config.model.freeze)]


def _mask_bytes(config: Config, weights: list[Weight]) -> int:
    """Bytes of the masks of model.keep_zeros: a byte for each number of the matrices, as if all of them had some."""
    return sum(w.size for w in weights if w.is_matrix) if config.model.keep_zeros else 0


def _reference_bytes(config: Config, weights: list[Weight], run: Kind) -> int:
    """Bytes of the frozen reference on the model's own layout; with adapters it is the model itself."""
    folder = reference_of(config.model.path, config.dpo, config.policy_reference, run)
    own = config.lora.rank > 0 and Path(folder or "").resolve() == Path(config.model.path).resolve()
    held = 0 if folder is None or own else count([w for w in weights if ADAPTER not in w.name])
    return TRAIN[config.precision.train].dtype.itemsize * held


def optimizer_width(config: Config) -> float:
    """Bytes of the optimizer's state for one parameter on the GPU, without what is on the host.

    Its moments, and where the trained weights are narrower, fp32 weights or the 16 bits that the trained ones lack
    (optimizer.precision_aware).
    """
    opt = config.optimizer
    if TRAIN[config.precision.train].dtype.itemsize == 4:
        return 4 * _moments(opt)
    if opt.precision_aware:
        return 2 + _moments(opt) * (2 if opt.moments == "bf16" else 4)
    return _master_width(opt) * (1 - opt.cpu_offload)


def _moments(opt: OptimizerConfig) -> int:
    """Numbers that the optimizer keeps for a parameter."""
    return len(OPTIMIZERS[opt.name].states(opt))


def _master_width(opt: OptimizerConfig) -> int:
    """Bytes of a parameter and its moments in fp32."""
    return 4 * (1 + _moments(opt))


def host_bytes(config: Config, shape: Shape, gpus: int) -> int:
    """Host memory of the largest process: fp32 weights, moments and gradients of its share under optimizer.cpu_offload."""
    stages = [_trained_of_stage(config, shape, stage) for stage in range(config.parallel.pipeline)]
    width = _master_width(config.optimizer) + 4  # and the gradients
    return int(width * config.optimizer.cpu_offload * max(sharded(config, weights, gpus) for weights in stages))


def _trained_of_stage(config: Config, shape: Shape, stage: int) -> list[Weight]:
    return trained_weights(config, rank_weights(shape, config.parallel, stage, lora=config.lora))


def sharded(config: Config, weights: list[Weight], gpus: int) -> int:
    """Number of parameters whose optimizer state one rank holds. Fewer ranks share those of experts than the others."""
    parallel = config.parallel
    experts, dense = count(weights, "experts"), sum(w.size for w in weights if w.part != "experts")
    if not parallel.distributed_optimizer:
        return experts + dense
    stage = gpus // parallel.pipeline
    expert_copies = stage // (parallel.expert * expert_tensor_size(parallel))
    return -(-experts // expert_copies) - (-dense // (stage // parallel.tensor))


@dataclass(frozen=True)
class _StepTokens:
    """Tokens of one context-parallel rank, before sequence parallelism shares them out."""

    responses: int
    """Responses of the whole step."""
    of_step: int
    """Tokens of the whole step if all responses are as long as they may be."""
    micro_batch: int
    micro_batches: int
    """Micro-batches of the whole step."""

    @classmethod
    def of(cls, config: Config, plan: Plan) -> _StepTokens:
        responses = -(-plan.trajectories_per_step // plan.data_parallel)
        longest = config.rollout.context_length - 1
        update = -(-responses // plan.updates_per_step) * longest
        budget = min(max(config.batch.tokens_per_micro_batch, longest), update)
        count = plan.updates_per_step * -(-update // budget)
        context = config.parallel.context
        return cls(responses, responses * longest // context, -(-budget // context), count)


def _batch_bytes(config: Config, shape: Shape, moe_layers: list[int], tokens: _StepTokens) -> dict[str, int]:
    """Bytes that all micro-batches of a step hold on the GPU until its last update."""
    per_token = 8 + 8 + 8 + 8 + 1 + 4 + 4  # ids, positions, labels, sequences, mask, log-probs, advantages
    scores = "old_log_probs" in Policy(config).needs
    per_token += 4 * (scores + (config.algorithm.kl.coefficient > 0))
    found = {"batch": per_token * tokens.of_step, "routes": 0, "features": 0}
    if not moe_layers:
        return found
    source, share = config.routing.source, config.parallel.tensor
    width = route_dtype(shape.experts).itemsize
    of_step = tokens.of_step // share

    def table(layers: int, width: int = width) -> int:
        return cache_cost(
            layers, shape.hidden, shape.experts, shape.topk, max(of_step, 1), 1, index_bytes=width
        ).index_bytes

    if source in FROM_ENGINE or config.rollout.routes:
        found["routes"] += table(len(shape.moe_layers))
        if config.rollout.gates or config.routing.replay_gates:
            found["routes"] += table(len(shape.moe_layers), width=4)
    if scores:
        found["routes"] += table(len(moe_layers)) * ((source not in FROM_ENGINE) + (source == "pr2"))
        cached = min(config.routing.cached_tokens, config.rollout.max_new_tokens) * tokens.responses
        cached //= share * config.parallel.context
        found["features"] = 4 * shape.experts * cached  # logits
        if source in PREDICTING:  # the predictor's bias, and router inputs where an update learns: in all but the first
            inputs = TRAIN[config.precision.train].dtype.itemsize * shape.hidden * cached
            found["features"] += 4 * shape.experts * cached + inputs - inputs // config.batch.updates_per_step
        found["features"] *= len(moe_layers)
    return found


def _companion_bytes(
    config: Config, shape: Shape, stage: int, tokens: _StepTokens, gpus: int, kernels: Kernels
) -> dict[str, int]:
    """Bytes of the critic, with its gradients and optimizer, of reward models and of a teacher, on a rank of a stage."""

    def weights_of(folder: str | None, lora: LoRAConfig | None = None) -> list[Weight]:
        same = not folder or folder == config.model.path
        own = (
            replace(shape, tied=False, value_head=True)
            if same
            else Shape.from_config(read_hf_config(folder or ""), value_head=True)
        )
        options = {"transformer_engine": kernels.transformer_engine, "lora": lora}
        return rank_weights(own, config.parallel, stage, **options)

    critic, width = 0, TRAIN[config.precision.train].dtype.itemsize
    if config.algorithm.advantage == "gae":
        settings = critic_config(config)
        found = parameter_bytes(settings, weights_of(config.critic.path, config.lora), gpus)
        critic = sum(found.values())
    own = [model.path for model in config.rewards.models.values() if not model.address]
    teacher, folder = 0, config.distillation.teacher
    if folder is not None:
        other = Shape.from_config(read_hf_config(folder))
        teacher = width * count(
            rank_weights(other, config.parallel, stage, transformer_engine=kernels.transformer_engine)
        )
        if config.distillation.placement == "loss" and stage == config.parallel.pipeline - 1:
            teacher += width * other.hidden * tokens.of_step  # its hidden states, of all of a step
        layers = {layer for _, layer in config.distillation.feature_layers}
        teacher += width * other.hidden * tokens.of_step * len(layers)
    models = sum(width * count(weights_of(path)) for path in own)
    return {"critic": critic, "reward_models": models, "teacher": teacher}


def _predictor_bytes(config: Config, shape: Shape, moe_layers: list[int]) -> int:
    """Bytes of the predictors' weights, gradients and Adam's two moments: fp32, whole on every rank."""
    return 16 * shape.experts * shape.hidden * len(moe_layers) if config.routing.source in PREDICTING else 0


def _vp2o_bytes(config: Config, shape: Shape, moe_layers: list[int]) -> dict[str, int]:
    vp2o, experts, hidden = config.vp2o, shape.experts, shape.hidden
    if not vp2o.enabled:
        return {"anchors": 0}
    each = 4 * experts * hidden + 4 * 4 * experts**2  # prototypes; co-activation, attraction, repulsion, kernel
    if vp2o.trust_region is not None:
        width = TRAIN[config.precision.train].dtype.itemsize
        each += (2 * 4 + width) * experts * hidden  # of the engine: prototypes and where they start, router
        each += vp2o.probe_tokens * (width * hidden + 4 * experts)
    return {"anchors": each * len(moe_layers)}


def _push_buffers(config: Config, shape: Shape) -> int:
    """Bytes of rank 0's two buffers for a push: each a bucket, or the largest tensor where that is larger."""
    if not transport_class(config.sync.transport).buffers_on_gpu:
        return 0
    width = ROLLOUT_DTYPES[config.precision.rollout].itemsize
    return 2 * max(int(config.sync.bucket_mb * 2**20), width * shape.vocab * shape.hidden)


# -- the passes --------------------------------------------------------------------------------------------------------


def _phases(
    config: Config,
    shape: Shape,
    stage: int,
    weights: list[Weight],
    tokens: _StepTokens,
    gpus: int,
    kernels: Kernels,
) -> dict[str, dict[str, int]]:
    """Temporaries of the phases of a step, on a pipeline stage."""
    activations = stage_activations(config, shape, stage, tokens.micro_batch, tokens.micro_batches, kernels)
    layers = stage_layers(shape, config.parallel, stage)
    phases = {
        "layer": {"activations": activations, **layer_work(config, shape, layers, tokens.micro_batch, kernels)},
        "optimizer": {"optimizer_step": _step_work(config, weights, gpus)},
    }
    if stage == config.parallel.pipeline - 1:
        phases["head"] = {"activations": activations, **head_work(config, shape, tokens.micro_batch, kernels)}
    if config.vp2o.enabled and (of_experts := [w for w in weights if w.part == "experts" and w.is_matrix]):
        moe_layers = len([i for i in layers if i in shape.moe_layers])
        outputs = count(of_experts) // 3 // moe_layers  # fc1 is two thirds of an expert
        phases["transform"] = {"transform": STEIN_BUFFERS * 4 * outputs + 3 * 2**24}
    return phases


def _step_work(config: Config, weights: list[Weight], gpus: int) -> int:
    """Temporaries of the optimizer's step: bf16 gradients of its share in fp32, unless it takes them as they are."""
    as_they_are = config.optimizer.precision_aware or config.optimizer.cpu_offload
    of_step = trained_weights(config, weights)
    return 0 if config.precision.gradients == "fp32" or as_they_are else 4 * sharded(config, of_step, gpus)


# -- saves and pushes --------------------------------------------------------------------------------------------------


def changed(config: Config, key: str, value: Any) -> Config:
    """The config with another value at a dotted key."""
    name, _, rest = key.partition(".")
    return replace(config, **{name: changed(getattr(config, name), rest, value) if rest else value})


def save_cost(config: Config, shape: Shape, gpus: int) -> dict[str, int]:
    """Host memory of a checkpoint, and its size on disk: weights, fp32 weights and both moments.

    Ranks share the writing, and each copies from its GPU what it writes; what optimizer.cpu_offload keeps on the host is
    written from there.
    """
    width, master = TRAIN[config.precision.train].dtype.itemsize, _master_width(config.optimizer)
    shared = changed(config, "parallel.distributed_optimizer", True)
    stages = [_trained_of_stage(config, shape, stage) for stage in range(config.parallel.pipeline)]
    share = max(sharded(shared, weights, gpus) for weights in stages)
    copied = int((master * (1 - config.optimizer.cpu_offload) + width) * share)
    saved = model_counts(shape).total
    if config.lora.rank:  # adapters, once more in PEFT's format
        saved = count(adapter_weights(whole_model(shape), config.lora))
    return {
        "host_bytes": copied,
        "host_bytes_per_node": copied * min(gpus, NODE),
        "disk_bytes": (master + width) * saved + (width * saved if config.lora.rank else 0),
    }


def push_cost(config: Config, shape: Shape) -> dict[str, int]:
    """Bytes of all weights as the engine holds them, and the buckets that they fill in the order of layers."""
    width, fp8 = ROLLOUT_DTYPES[config.precision.rollout].itemsize, config.precision.rollout == "fp8"
    capacity = int(config.sync.bucket_mb * 2**20)
    total, buckets, used = 0, 0, capacity
    for weight in whole_model(shape):
        fused = 2 if weight.part in ("mlp", "experts") and weight.shape[0] != shape.hidden else 1  # gate and up
        each = weight.size // weight.copies // fused
        size = each + 4 * (each // 128**2) if fp8 and weight.is_matrix else width * each
        for _ in range(weight.copies * fused):
            if used + size > capacity:
                buckets, used = buckets + 1, 0
            used += size
            total += size
    return {"bytes": total, "buckets": buckets}


def server_use(config: Config, shape: Shape, weights: int, memory: int) -> dict[str, int | bool]:
    """Bytes on one GPU of a server that the trainer starts: its weights, its share of the memory, and its cache.

    weights: the trainer's on a GPU, which are there too while they are pushed to a colocated engine.
    """
    served = push_cost(config, shape)["bytes"] // config.rollout.server.tensor
    share = int(config.rollout.server.memory_fraction * memory)
    beside = RESERVE if config.rollout.colocate else 0
    pushing = beside and served + weights + _push_buffers(config, shape)
    fits = share > served and max(share, pushing) + beside <= memory
    return {"weights": served, "share": share, "cache": max(0, share - served), "fits": fits}
