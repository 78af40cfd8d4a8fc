"""DDP, optimizer and learning rate schedule: Megatron's own, set up from our config."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import ChainedOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_rl.config import OptimizerConfig, ParallelConfig
from megatron_rl.config.optimizers import OPTIMIZERS
from megatron_rl.models.precision import TRAIN


def wrap_ddp(
    parallel: ParallelConfig, gradients: str, chunks: Sequence[GPTModel], *, reduce_early: bool
) -> list[DistributedDataParallel]:
    """Wrap each model chunk in Megatron's DDP. Gradient buffers are reduced once a step.

    gradients: precision.gradients, the dtype of the buffers. reduce_early: let the reduction overlap with the backward pass, on
    GPUs or with parallel.overlap_param_gather.
    """
    overlap = parallel.overlap_param_gather
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=gradients == "fp32",
        use_distributed_optimizer=parallel.distributed_optimizer,
        overlap_grad_reduce=(overlap or torch.cuda.is_available()) and reduce_early,
        overlap_param_gather=overlap,
        check_for_nan_in_grad=False,  # Trainer.update checks the norm and skips the step
    )
    wrapped = [
        DistributedDataParallel(chunk.config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]
    if overlap:
        for ddp, chunk in zip(wrapped, chunks, strict=True):
            _wait_before_use(ddp, chunk)
    return wrapped


def _wait_before_use(ddp: DistributedDataParallel, chunk: GPTModel) -> None:
    """Wait for a layer's gathered weights before its forward pass, and for the head's weights after the last layer.

    Megatron's own hooks wait in the forward call of the module that owns a weight. Experts and the head need this function,
    because their weights belong to modules whose forward is never called.
    """

    def wait(parameters: list[torch.nn.Parameter], *_: object) -> None:
        for parameter in parameters:
            if group := ddp.param_to_bucket_group.get(parameter):
                group.finish_param_sync()

    for layer in chunk.decoder.layers:
        layer.register_forward_pre_hook(partial(wait, list(layer.parameters())))
    if chunk.post_process:
        chunk.decoder.register_forward_hook(partial(wait, list(chunk.output_layer.parameters())))


def gather_parameters(chunks: list[DistributedDataParallel]) -> None:
    """Finish the parameter gathers that parallel.overlap_param_gather delays until the next forward pass. Collective."""
    for ddp in chunks:
        if ddp.ddp_config.overlap_param_gather:
            for group in ddp.bucket_groups + ddp.expert_parallel_bucket_groups:
                group.finish_param_sync(skip_next_bucket_dispatch=True)


def make_optimizer(
    opt: OptimizerConfig, parallel: ParallelConfig, train: str, chunks: list[DistributedDataParallel]
) -> ChainedOptimizer:
    """Create Megatron's optimizer `optimizer.name` for the chunks' trainable parameters. train: precision.train."""
    dtype, gpu = TRAIN[train].dtype, torch.cuda.is_available()
    moments = torch.bfloat16 if opt.moments == "bf16" else torch.float32
    optimizer = get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer=opt.name,
            lr=opt.lr,
            min_lr=opt.lr * opt.min_lr_ratio,
            weight_decay=opt.weight_decay,
            clip_grad=opt.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=parallel.distributed_optimizer,
            overlap_param_gather=parallel.overlap_param_gather,
            # HybridDeviceOptimizer (GPU and host) needs the gradients of the precision-aware optimizer.
            use_precision_aware_optimizer=opt.precision_aware or opt.cpu_offload > 0,
            exp_avg_dtype=moments,
            exp_avg_sq_dtype=moments,
            optimizer_cpu_offload=opt.cpu_offload > 0,
            optimizer_offload_fraction=opt.cpu_offload,
            overlap_cpu_optimizer_d2h_h2d=opt.cpu_offload > 0,
            pin_cpu_grads=gpu,
            pin_cpu_params=gpu,
            **OPTIMIZERS[opt.name].settings(opt),
        ),
        [*chunks],
    )
    assert isinstance(optimizer, ChainedOptimizer)
    for inner in torch_optimizers(optimizer):
        for group in inner.param_groups:  # torch's default keeps temporaries of all stepped tensors on a GPU
            group["fused"] = True
    for part in optimizer.chained_optimizers:  # Megatron calls init_state_fn before it loads; some optimizers have none
        part.init_state_fn = part.init_state_fn or (lambda inner, config=None: _allocate(opt, inner))
    return optimizer


def inner_optimizers(optimizer: ChainedOptimizer) -> Iterator[Any]:
    """Yield the optimizers inside Megatron's optimizer; with optimizer.cpu_offload, one for the GPU and one for the host."""
    for part in optimizer.chained_optimizers:
        inner = getattr(part, "optimizer", None)
        yield from inner.sub_optimizers if isinstance(inner, HybridDeviceOptimizer) else [inner] if inner else []


def torch_optimizers(optimizer: ChainedOptimizer) -> list[torch.optim.Optimizer]:
    """Return the inner optimizers that come from torch.optim.

    On the host, all inner optimizers come from torch.optim; on the GPU, only without Transformer Engine and Apex.
    """
    return [one for one in inner_optimizers(optimizer) if type(one).__module__.startswith("torch.optim.")]


def allocate_states(config: OptimizerConfig, optimizer: ChainedOptimizer) -> None:
    """Create a zero optimizer state for each weight, as the first step would. A checkpoint can then save or fill it."""
    for inner in inner_optimizers(optimizer):
        _allocate(config, inner)
    for part in optimizer.chained_optimizers:
        inner = getattr(part, "optimizer", None)
        if isinstance(inner, HybridDeviceOptimizer):
            inner._sync_sub_optimizers_state_to_hdo()


def separate_steps(optimizer: ChainedOptimizer) -> None:
    """Give each weight its own step counter.

    After Megatron has loaded a checkpoint, all weights share one counter, and the step of each weight would advance it.
    """
    for inner in torch_optimizers(optimizer):
        for state in inner.state.values():
            if "step" in state:
                state["step"] = state["step"].clone()


def _allocate(config: OptimizerConfig, inner: Any) -> None:
    kind = next((kind for kind in OPTIMIZERS.values() if type(inner).__name__ in kind.classes), None)
    if kind is None:
        return
    for parameter in (p for group in inner.param_groups for p in group["params"]):
        if not inner.state[parameter]:
            steps = {"step": torch.zeros((), device=parameter.device)} if kind.counts_steps else {}
            inner.state[parameter] = steps | {name: torch.zeros_like(parameter) for name in kind.states(config)}


def make_scheduler(config: OptimizerConfig, optimizer: ChainedOptimizer, updates: int) -> OptimizerParamScheduler:
    """Return a schedule: linear warm-up, then constant, linear or cosine decay to min_lr_ratio.

    The decay ends after `decay_steps` or, if this is not set, after `updates`.
    """
    decay_steps = config.decay_steps or updates
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.lr * config.min_lr_ratio,
        lr_warmup_steps=config.warmup_steps,
        lr_decay_steps=decay_steps,
        lr_decay_style=config.decay,
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=decay_steps,
        wd_incr_style="constant",
    )
