"""DDP, optimizer and learning-rate schedule: Megatron's own, from our config."""

from __future__ import annotations

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.optimizer import MegatronOptimizer, get_megatron_optimizer
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

from megatron_rl.config import Config, OptimizerConfig
from megatron_rl.errors import UserError
from megatron_rl.models.precision import TRAIN


def wrap_ddp(config: Config, chunks: list[torch.nn.Module]) -> list[DistributedDataParallel]:
    """Megatron's DDP around each model chunk: fp32 gradient buffers, reduced once a step."""
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=config.parallel.distributed_optimizer,
        # VP2O mixes gradients of experts before they are reduced, which must not begin in the backward.
        overlap_grad_reduce=torch.cuda.is_available() and not config.vp2o.enabled,
        overlap_param_gather=False,
        check_for_nan_in_grad=False,  # the optimizer step looks at the norm and skips: see Trainer.update
    )
    return [
        DistributedDataParallel(chunk.config, ddp_config, chunk, disable_bucketing=index > 0)
        for index, chunk in enumerate(chunks)
    ]


def make_optimizer(config: Config, chunks: list[DistributedDataParallel]) -> MegatronOptimizer:
    """Megatron's Adam (decoupled weight decay) over the chunks' trainable parameters."""
    opt, dtype = config.optimizer, TRAIN[config.precision.train].dtype
    return get_megatron_optimizer(
        MegatronOptimizerConfig(
            optimizer="adam",
            lr=opt.lr,
            min_lr=opt.lr * opt.min_lr_ratio,
            adam_beta1=opt.betas[0],
            adam_beta2=opt.betas[1],
            adam_eps=opt.eps,
            weight_decay=opt.weight_decay,
            clip_grad=opt.clip_grad,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=config.parallel.distributed_optimizer,
        ),
        chunks,
    )


def make_scheduler(config: OptimizerConfig, optimizer: MegatronOptimizer, updates: int) -> OptimizerParamScheduler:
    """Linear warm-up, then constant, linear or cosine decay to min_lr_ratio over `updates` (or decay_steps)."""
    decay_steps = config.decay_steps or updates
    if config.warmup_steps >= decay_steps:
        raise UserError(
            f"config: optimizer.warmup_steps = {config.warmup_steps} leaves nothing of the {decay_steps} updates to train;"
            f" the largest is {decay_steps - 1}"
        )
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
