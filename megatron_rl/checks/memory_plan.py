"""Memory of a run by arithmetic: bytes on one GPU by kind, host memory of a checkpoint, and size of a weight sync.

Exact: weights, gradients, optimizer state, reference, predictors, critic, reward models. Counted from the tensors that the code
keeps for the backward pass: activations and logits (`activations.py`). Upper bounds: temporaries of a layer, and everything
that grows with the tokens of a step, because every response may be as long as rollout.context_length allows. Assumed: RESERVE,
ASLEEP and IMBALANCE.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from megatron_rl.checks.activations import GPU, Kernels, head_work, layer_work, stage_activations
from megatron_rl.config import (
    FROM_ENGINE,
    PREDICTING,
    Config,
    DistillationConfig,
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
from megatron_rl.config.plan import (
    Kind,
    Plan,
    critic_config,
    expert_tensor_size,
    make_plan,
    pipeline_bubble,
    policy_needs,
    reference_of,
)
from megatron_rl.config.route_cost import cache_cost, id_bytes
from megatron_rl.errors import UserError
from megatron_rl.models.freeze import ADAPTER, is_frozen
from megatron_rl.models.parallel_check import check_parallel, read_hf_config
from megatron_rl.models.precision import ROLLOUT_DTYPES, TRAIN, WIDTHS
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
from megatron_rl.sync.transports import transport_class

GB = 10**9
RESERVE = 3 * GB
"""Bytes for the CUDA context, NCCL buffers, workspaces of cuBLAS and attention, and fragmentation: an assumption."""
ASLEEP = 2 * GB
"""Bytes that a sleeping colocated server keeps, namely its CUDA context and graphs: an assumption."""
SEQUENCES: dict[Kind, int] = {"sft": 1, "reward": 2, "dpo": 2}
"""Number of sequences per prompt in one update, for kinds of runs that train on data. All preferences are assumed to be
pairs."""
GRADIENT_WIDTH = {"fp32": 4, "bf16": 2}
NODE = 8
"""Number of GPUs in a node."""
EXACT = ("weights", "gradients", "optimizer", "reference", "predictors", "critic", "reward_models")
STEIN_BUFFERS = 3
"""Number of buffers of VP2O's transform, including the buffer for its solution. Each has the size of a layer's output
projections in fp32."""


@dataclass(frozen=True)
class Usage:
    """Memory use on one GPU of one pipeline stage, in bytes."""

    stage: int
    resident: dict[str, int]
    """Bytes by kind of memory that is held until the end of the run, from the start or from the first step."""
    phases: dict[str, dict[str, int]]
    """Bytes of temporaries: {phase of a step: {kind of memory: bytes}}. Only the largest phase counts, because phases follow
    one another."""

    @property
    def total(self) -> int:
        """Bytes in use during the largest phase: resident memory and the phase's temporaries."""
        return sum(self.resident.values()) + max(sum(kinds.values()) for kinds in self.phases.values())

    @property
    def kinds(self) -> dict[str, int]:
        """Bytes by kind, temporaries of all phases included. Their sum exceeds the total, because phases share memory."""
        merged = dict(self.resident)
        for kinds in self.phases.values():
            merged |= kinds
        return {kind: size for kind, size in merged.items() if size}

    @property
    def peak(self) -> dict[str, int]:
        """Bytes by kind during the largest phase: resident memory and the phase's temporaries."""
        largest = max(self.phases.values(), key=lambda kinds: sum(kinds.values()))
        return {kind: size for kind, size in {**self.resident, **largest}.items() if size}

    @property
    def largest(self) -> str:
        """Kind of memory with the largest share of the total, without the reserve."""
        return max((size, kind) for kind, size in self.peak.items() if kind != "reserve")[1]

    @property
    def least(self) -> int:
        """Bytes that every step needs, independent of its tokens: exact."""
        return sum(self.resident[kind] for kind in EXACT)


@dataclass(frozen=True)
class Estimate:
    """Memory that a run needs."""

    gpus: int
    counts: Counts
    usage: Usage
    """Memory use of the pipeline stage that needs most."""
    save: dict[str, int]
    push: dict[str, int]
    host: int
    """Bytes of optimizer state in host memory, per process."""
    micro_batches: int
    """Largest number of micro-batches of an update on a data-parallel rank, with all responses at their largest length."""
    bubble: float
    """Share of time in which a pipeline stage waits, for `micro_batches`. With fewer micro-batches, the share is larger."""

    def fits(self, memory: int) -> bool:
        """Return whether the run fits into `memory` bytes on each GPU."""
        return self.usage.total <= memory


def estimate(
    config: Config, hf_config: PreTrainedConfig, gpus: int, kernels: Kernels = GPU, *, run: Kind = "train"
) -> Estimate:
    """Estimate the memory of training with this config on `gpus` GPUs. Errors: UserError for sizes that do not divide."""
    if gpus < 1:
        raise UserError(f"plan: --gpus {gpus}: the trainer needs at least one GPU")
    check_parallel(hf_config, config.parallel, gpus)
    batch = config.batch
    if run in SEQUENCES:
        batch = replace(batch, samples_per_prompt=SEQUENCES[run], updates_per_step=1)
    plan = make_plan(batch, config.parallel, gpus)
    shape = Shape.from_config(hf_config)
    stages = [stage_usage(config, shape, plan, stage, kernels, run) for stage in range(config.parallel.pipeline)]
    usage = max(stages, key=lambda usage: usage.total)
    trained = [
        trained_weights(config.lora, config.model.freeze, rank_weights(shape, config.parallel, stage, lora=config.lora))
        for stage in range(config.parallel.pipeline)
    ]
    opt, sync, precision = config.optimizer, config.sync, config.precision
    save = save_cost(opt, config.lora, config.parallel, precision.train, shape, trained, gpus)
    push = push_cost(sync.bucket_mb, precision.rollout, shape)
    tokens = _StepTokens.of(config.rollout.context_length, config.batch.tokens_per_micro_batch, config.parallel, plan)
    micro_batches = tokens.micro_batches // plan.updates_per_step
    bubble = pipeline_bubble(config.parallel.pipeline, micro_batches, config.parallel.virtual_pipeline)
    host = host_bytes(opt, config.parallel, trained, gpus)
    return Estimate(gpus, model_counts(shape), usage, save, push, host, micro_batches, bubble)


# -- one GPU -----------------------------------------------------------------------------------------------------------


def stage_usage(
    config: Config, shape: Shape, plan: Plan, stage: int, kernels: Kernels = GPU, run: Kind = "train"
) -> Usage:
    """Return the memory use on a GPU of pipeline stage `stage`."""
    built_in = kernels.transformer_engine
    weights = rank_weights(shape, config.parallel, stage, transformer_engine=built_in, lora=config.lora)
    moe_layers = [i for i in stage_layers(shape, config.parallel, stage) if i in shape.moe_layers]
    tokens = _StepTokens.of(config.rollout.context_length, config.batch.tokens_per_micro_batch, config.parallel, plan)
    opt, parallel, precision, gpus = config.optimizer, config.parallel, config.precision, plan.world_size
    trained = trained_weights(config.lora, config.model.freeze, weights)
    reference = reference_of(config.model.path, config.dpo, config.policy_reference, run)
    teacher = _teacher_bytes(config.distillation, parallel, precision.train, stage, tokens, kernels)

    def with_head(folder: str | None, lora: LoRAConfig | None = None) -> list[Weight]:
        """Return the weights of a model with a value head, which outputs one number per token."""
        same = not folder or folder == config.model.path
        head = {"value_head": True}
        own = replace(shape, tied=False, **head) if same else Shape.from_config(read_hf_config(folder or ""), **head)
        return rank_weights(own, parallel, stage, transformer_engine=built_in, lora=lora)

    critic, width = 0, TRAIN[precision.train].width
    if config.algorithm.advantage == "gae":
        own, held = critic_config(config), with_head(config.critic.path, config.lora)
        learned = trained_weights(own.lora, own.model.freeze, held)
        critic = sum(parameter_bytes(own.optimizer, own.parallel, own.precision, held, learned, gpus).values())
    paths = [model.path for model in config.rewards.models.values() if not model.address]
    scorers = sum(width * count(with_head(path)) for path in paths)
    resident = (
        parameter_bytes(opt, parallel, precision, weights, trained, gpus)
        | {"reference": _reference_bytes(reference, config.model.path, config.lora, precision.train, weights)}
        | {"masks": _mask_bytes(weights) if config.model.keep_zeros else 0}
        | {"predictors": _predictor_bytes(config.routing, shape, moe_layers)}
        | _batch_bytes(
            config.routing,
            config.rollout,
            parallel,
            precision.train,
            config.batch.updates_per_step,
            shape,
            moe_layers,
            tokens,
            scores="old_log_probs" in policy_needs(config),
            referenced=config.algorithm.kl.coefficient > 0,
        )
        | _vp2o_bytes(config.vp2o, precision.train, shape, moe_layers)
        | {"critic": critic, "reward_models": scorers, "teacher": teacher}
        | {
            "push": _push_buffers(config.sync, precision.rollout, shape),
            "server": ASLEEP * config.rollout.colocate,
            "reserve": RESERVE,
        }
    )
    step_work = _step_work(opt, parallel, precision.gradients, trained, gpus)
    phases = _phases(config.model, parallel, precision, shape, stage, tokens, step_work, kernels)
    if config.vp2o.enabled and (of_experts := [w for w in weights if w.part == "experts" and w.is_matrix]):
        outputs = count(of_experts) // 3 // len(moe_layers)  # fc1 is two thirds of an expert
        phases["transform"] = {"transform": STEIN_BUFFERS * 4 * outputs + 3 * 2**24}
    return Usage(stage, resident, phases)


def parameter_bytes(
    opt: OptimizerConfig,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    weights: list[Weight],
    trained: list[Weight],
    gpus: int,
) -> dict[str, int]:
    """Return the bytes of the weights, gradients and optimizer state that one rank holds.

    trained: weights that are trained (see `trained_weights`).

    A parameter takes 2 + 4 + 12 bytes in bf16 and 4 + 4 + 8 in fp32 (weight + gradient + optimizer state). The data-parallel
    ranks share the optimizer state. The padding of Megatron's buffers (below 256 bytes per tensor) is left out.
    """
    recipe = TRAIN[precision.train]
    width = recipe.width
    held = count(weights)
    copies = sum(w.size for w in weights if w.is_matrix) if recipe.fp8_recipe else 0
    return {
        "weights": held * width,
        "fp8_weights": 2 * copies,  # in Transformer Engine's layers, one per direction of the products
        "gradients": GRADIENT_WIDTH[precision.gradients] * count(trained),
        "optimizer": int(optimizer_width(opt, precision.train) * sharded(parallel, trained, gpus)),
    }


def trained_weights(lora: LoRAConfig, freeze: list[str], weights: list[Weight]) -> list[Weight]:
    """Return the weights that have gradients and optimizer state. freeze: patterns of frozen weights (model.freeze)."""
    if lora.rank:
        return [w for w in weights if ADAPTER in w.name or (w.part == "head" and w.shape[0] == 1)]
    # Names here have * for the expert's number, which a pattern for single experts does not match.
    return [w for w in weights if not is_frozen(w.name, freeze)]


def _mask_bytes(weights: list[Weight]) -> int:
    """Return the bytes of the masks of model.keep_zeros: one byte per element of all matrices, an upper bound."""
    return sum(w.size for w in weights if w.is_matrix)


def _reference_bytes(folder: str | None, path: str, lora: LoRAConfig, train: str, weights: list[Weight]) -> int:
    """Return the bytes of the frozen reference. With adapters, the model itself is the reference.

    The reference has the model's parallel layout. path: folder of the model.
    """
    own = lora.rank > 0 and Path(folder or "").resolve() == Path(path).resolve()
    held = 0 if folder is None or own else count([w for w in weights if ADAPTER not in w.name])
    return TRAIN[train].width * held


def optimizer_width(opt: OptimizerConfig, train: str) -> float:
    """Return the bytes of optimizer state on the GPU per parameter. The share in host memory is left out.

    The state consists of the moments and, if the trained weights are narrower than fp32, of fp32 weights or of the 16 bits that
    the trained weights lack (optimizer.precision_aware). train: precision.train.
    """
    if TRAIN[train].width == 4:
        return 4 * _moments(opt)
    if opt.precision_aware:
        return 2 + _moments(opt) * (2 if opt.moments == "bf16" else 4)
    return _master_width(opt) * (1 - opt.cpu_offload)


def _moments(opt: OptimizerConfig) -> int:
    """Return the number of moments that the optimizer keeps per parameter."""
    return len(OPTIMIZERS[opt.name].states(opt))


def _master_width(opt: OptimizerConfig) -> int:
    """Return the bytes of a parameter's fp32 weight and moments."""
    return 4 * (1 + _moments(opt))


def host_bytes(opt: OptimizerConfig, parallel: ParallelConfig, trained: list[list[Weight]], gpus: int) -> int:
    """Return the bytes of optimizer data in host memory (optimizer.cpu_offload), for the process that stores most.

    The data are the process's share of fp32 weights, moments and gradients. trained: the trained weights of each pipeline
    stage.
    """
    width = _master_width(opt) + 4  # plus the gradients
    return int(width * opt.cpu_offload * max(sharded(parallel, weights, gpus) for weights in trained))


def sharded(parallel: ParallelConfig, weights: list[Weight], gpus: int) -> int:
    """Return the number of parameters whose optimizer state one rank holds. Fewer ranks share the state of experts."""
    experts, dense = count(weights, "experts"), sum(w.size for w in weights if w.part != "experts")
    if not parallel.distributed_optimizer:
        return experts + dense
    stage = gpus // parallel.pipeline
    expert_copies = stage // (parallel.expert * expert_tensor_size(parallel))
    return -(-experts // expert_copies) - (-dense // (stage // parallel.tensor))


@dataclass(frozen=True)
class _StepTokens:
    """Sizes of a step on one data-parallel rank. Tokens are counted per context-parallel rank, before sequence parallelism."""

    responses: int
    """Number of responses of the whole step."""
    of_step: int
    """Number of tokens of the whole step if all responses have the largest possible length."""
    micro_batch: int
    micro_batches: int
    """Number of micro-batches of the whole step."""

    @classmethod
    def of(cls, context_length: int, tokens_per_micro_batch: int, parallel: ParallelConfig, plan: Plan) -> _StepTokens:
        responses = -(-plan.trajectories_per_step // plan.data_parallel)
        longest = context_length - 1
        update = -(-responses // plan.updates_per_step) * longest
        budget = min(max(tokens_per_micro_batch, longest), update)
        count = plan.updates_per_step * -(-update // budget)
        context = parallel.context
        return cls(responses, responses * longest // context, -(-budget // context), count)


def _batch_bytes(
    routing: RoutingConfig,
    rollout: RolloutConfig,
    parallel: ParallelConfig,
    train: str,
    updates_per_step: int,
    shape: Shape,
    moe_layers: list[int],
    tokens: _StepTokens,
    *,
    scores: bool,
    referenced: bool,
) -> dict[str, int]:
    """Return the bytes that the micro-batches of a step hold on the GPU until the step's last update.

    scores: True if a pass computes old log-probs. referenced: True if a pass of a reference model follows.
    """
    per_token = 8 + 8 + 8 + 8 + 1 + 4 + 4  # ids, positions, labels, sequences, mask, log-probs, advantages
    per_token += 4 * (scores + referenced)
    found = {"batch": per_token * tokens.of_step, "routes": 0, "features": 0}
    if not moe_layers:
        return found
    source, share = routing.source, parallel.tensor
    width = id_bytes(shape.experts)
    of_step = tokens.of_step // share

    def table(layers: int, width: int = width) -> int:
        return cache_cost(
            layers, shape.hidden, shape.experts, shape.topk, max(of_step, 1), 1, index_bytes=width
        ).index_bytes

    if source in FROM_ENGINE or rollout.routes:
        found["routes"] += table(len(shape.moe_layers))
        if rollout.gates or routing.replay_gates:
            found["routes"] += table(len(shape.moe_layers), width=4)
    if scores:
        found["routes"] += table(len(moe_layers)) * ((source not in FROM_ENGINE) + (source == "pr2"))
        cached = min(routing.cached_tokens, rollout.max_new_tokens) * tokens.responses
        cached //= share * parallel.context
        found["features"] = 4 * shape.experts * cached  # logits
        if source in PREDICTING:  # the predictor's bias, and router inputs for all updates except the first
            inputs = TRAIN[train].width * shape.hidden * cached
            found["features"] += 4 * shape.experts * cached + inputs - inputs // updates_per_step
        found["features"] *= len(moe_layers)
    return found


def _teacher_bytes(
    distillation: DistillationConfig,
    parallel: ParallelConfig,
    train: str,
    stage: int,
    tokens: _StepTokens,
    kernels: Kernels,
) -> int:
    """Return the bytes of a teacher and of its outputs for a step, on a rank of a pipeline stage."""
    if distillation.teacher is None:
        return 0
    width, other = TRAIN[train].width, Shape.from_config(read_hf_config(distillation.teacher))
    held = width * count(rank_weights(other, parallel, stage, transformer_engine=kernels.transformer_engine))
    if distillation.placement == "loss" and stage == parallel.pipeline - 1:
        held += width * other.hidden * tokens.of_step  # its hidden states for the whole step
    layers = {layer for _, layer in distillation.feature_layers}
    return held + width * other.hidden * tokens.of_step * len(layers)


def _predictor_bytes(routing: RoutingConfig, shape: Shape, moe_layers: list[int]) -> int:
    """Return the bytes of the predictors' weights, gradients and two Adam moments: in fp32, unsharded on every rank."""
    return 16 * shape.experts * shape.hidden * len(moe_layers) if routing.source in PREDICTING else 0


def _vp2o_bytes(vp2o: VP2OConfig, train: str, shape: Shape, moe_layers: list[int]) -> dict[str, int]:
    experts, hidden = shape.experts, shape.hidden
    if not vp2o.enabled:
        return {"anchors": 0}
    each = 4 * experts * hidden + 4 * 4 * experts**2  # prototypes; co-activation, attraction, repulsion, kernel
    if vp2o.trust_region is not None:
        width = TRAIN[train].width
        each += (2 * 4 + width) * experts * hidden  # of SGLang's weights: prototypes, their start vectors, router
        each += vp2o.probe_tokens * (width * hidden + 4 * experts)
    return {"anchors": each * len(moe_layers)}


def _push_buffers(sync: SyncConfig, rollout: str, shape: Shape) -> int:
    """Return the bytes of rank 0's two buffers for a weight sync.

    Each buffer has the size of a bucket, or of the largest tensor if that is larger.
    """
    if not transport_class(sync.transport).buffers_on_gpu:
        return 0
    width = WIDTHS[ROLLOUT_DTYPES[rollout]]
    return 2 * max(int(sync.bucket_mb * 2**20), width * shape.vocab * shape.hidden)


# -- the passes --------------------------------------------------------------------------------------------------------


def _phases(
    model: ModelConfig,
    parallel: ParallelConfig,
    precision: PrecisionConfig,
    shape: Shape,
    stage: int,
    tokens: _StepTokens,
    step_work: int,
    kernels: Kernels,
) -> dict[str, dict[str, int]]:
    """Return {phase of a step: {kind of memory: bytes of temporaries}} on a pipeline stage.

    step_work: bytes of the temporaries of the optimizer's update.
    """
    recompute, train, size = model.recompute, precision.train, tokens.micro_batch
    activations = stage_activations(recompute, parallel, train, shape, stage, size, tokens.micro_batches, kernels)
    work = layer_work(recompute, parallel, train, shape, stage_layers(shape, parallel, stage), size, kernels)
    phases = {"layer": {"activations": activations, **work}, "optimizer": {"optimizer_step": step_work}}
    if stage == parallel.pipeline - 1:
        head = head_work(model.head_chunk_tokens, parallel.tensor, precision, shape, size, kernels)
        phases["head"] = {"activations": activations, **head}
    return phases


def _step_work(opt: OptimizerConfig, parallel: ParallelConfig, gradients: str, trained: list[Weight], gpus: int) -> int:
    """Return the bytes of the optimizer update's temporaries.

    They are this rank's share of bf16 gradients, converted to fp32; none if the optimizer reads bf16 gradients.
    """
    as_they_are = opt.precision_aware or opt.cpu_offload
    return 0 if gradients == "fp32" or as_they_are else 4 * sharded(parallel, trained, gpus)


# -- saves and pushes --------------------------------------------------------------------------------------------------


def changed(config: Config, key: str, value: Any) -> Config:
    """Return the config with another value for a dotted key."""
    name, _, rest = key.partition(".")
    return replace(config, **{name: changed(getattr(config, name), rest, value) if rest else value})


def save_cost(
    opt: OptimizerConfig,
    lora: LoRAConfig,
    parallel: ParallelConfig,
    train: str,
    shape: Shape,
    trained: list[list[Weight]],
    gpus: int,
) -> dict[str, int]:
    """Return a checkpoint's bytes in host memory and on disk. A checkpoint contains weights, fp32 weights and both moments.

    Each rank writes a share, and first copies this share from its GPU to host memory. The optimizer state that
    optimizer.cpu_offload stores in host memory needs no copy. train: precision.train; trained: the trained weights of each
    pipeline stage.
    """
    width, master = TRAIN[train].width, _master_width(opt)
    shared = replace(parallel, distributed_optimizer=True)
    share = max(sharded(shared, weights, gpus) for weights in trained)
    copied = int((master * (1 - opt.cpu_offload) + width) * share)
    saved = model_counts(shape).total
    if lora.rank:  # only adapters, which are also saved in PEFT's format
        saved = count(adapter_weights(whole_model(shape), lora))
    return {
        "host_bytes": copied,
        "host_bytes_per_node": copied * min(gpus, NODE),
        "disk_bytes": (master + width) * saved + (width * saved if lora.rank else 0),
    }


def push_cost(bucket_mb: float, rollout: str, shape: Shape) -> dict[str, int]:
    """Return the bytes of all weights in SGLang's format, and the number of buckets that a weight sync needs for them.

    The buckets are filled in the order of layers.
    """
    width, fp8 = WIDTHS[ROLLOUT_DTYPES[rollout]], rollout == "fp8"
    capacity = int(bucket_mb * 2**20)
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


def server_use(
    rollout: RolloutConfig, sync: SyncConfig, dtype: str, shape: Shape, weights: int, memory: int
) -> dict[str, int | bool]:
    """Return the bytes on one GPU of a server that the trainer starts: its weights, its share of the memory, and its cache.

    dtype: precision.rollout. weights: bytes of the trainer's weights on a GPU, which are also in memory during a weight sync to
    a colocated server.
    """
    served = push_cost(sync.bucket_mb, dtype, shape)["bytes"] // rollout.server.tensor
    share = int(rollout.server.memory_fraction * memory)
    beside = RESERVE if rollout.colocate else 0
    pushing = beside and served + weights + _push_buffers(sync, dtype, shape)
    fits = share > served and max(share, pushing) + beside <= memory
    return {"weights": served, "share": share, "cache": max(0, share - served), "fits": fits}
