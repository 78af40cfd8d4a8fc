"""Keys of the model, its adapters, its optimizer, its layout and its compression."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from pydantic import Field

from megatron_rl.config.conditions import only_with, read_by
from megatron_rl.config.section import Count, Fraction, NonNegativeFloat, Positive, PositiveFloat, section


@section
class ModelConfig:
    """The policy model, its kernels and its memory."""

    path: str = ""
    """Hugging Face folder: config.json, safetensors, tokenizer. It is read at the start and never written. Or an id of the hub:
    owner/name, or owner/name@revision (branch, tag or commit), which is downloaded; the run keeps to the commit it meant. So
    can other models be given."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation (Megatron's recompute_granularity; full recomputes every layer)."""
    flash_attention: Literal["torch", "auto", "FA3", "FA4"] = "torch"
    """The attention kernel on GPUs, in bf16. torch: its own, FlashAttention 2. auto: FlashAttention 4 (the package
    flash-attn-4) where it is installed and takes the model's heads on this GPU, else torch's. FA4: FlashAttention 4 or no
    run. FA3: FlashAttention 3, which torch then takes in the place of its own."""
    kernels: Literal["compiled", "any"] = "compiled"
    """On GPUs: compiled refuses to start where our CUDA kernels cannot run; any takes plain torch there, which is slower."""
    head_chunk_tokens: Positive = 2048
    """Tokens whose logits exist at a time: the head's memory is this times the vocabulary."""
    moe_dispatcher: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """How tokens reach their experts; flex needs DeepEP."""
    moe_router_fusion: bool = False
    """Transformer Engine's fused router (GPUs); it knows no replay, so it goes with routing.source = none alone."""
    moe_aux_loss: NonNegativeFloat = 0.0
    """Coefficient of the load-balancing loss of each MoE layer; RL usually keeps it at 0, SFT of a fresh router does not. It is
    a mean over all tokens, prompts included; docs/how-it-works.md has the formula, and how Hugging Face's differs."""
    moe_z_loss: NonNegativeFloat = 0.0
    """Coefficient of the routers' z-loss, the mean over all tokens of logsumexp(logits)^2 in each MoE layer (ST-MoE: 1e-3)."""
    moe_bias_update_rate: NonNegativeFloat = 0.0
    """Balance without a loss, of models whose routers have a bias for each expert (DeepSeek-V3: 1e-3): after each update the
    biases of experts with more than the mean load fall by so much, and the others rise. Not in RL."""
    freeze: list[str] = dataclasses.field(default_factory=list)
    """Weights that are not trained: glob patterns over the names of Megatron's parameters (of its layers without Transformer
    Engine), such as *.self_attention.*, *.mlp.router.*, *.softmax_offset, decoder.layers.0.*, embedding.*. They have no
    gradient and no optimizer state, and are pushed and saved like the others."""
    keep_zeros: bool | list[str] = False
    """Weights that are zero when training starts stay zero, as those that `megatron-rl prune` has removed: in all linear layers
    of attention, MLPs and experts, or in those whose names match these patterns (as of freeze). Not those of a critic."""
    attention_sinks: Literal["exact", "ignored"] = "exact"
    """For experiments. ignored: the trainer's attention leaves the model's sinks out, as a kernel that knows none does; they
    stay in the model as they are, without a gradient, and the engine goes on using them."""


@section
class LoRAConfig:
    """Low-rank adapters, which are trained in the place of the model's weights: by SFT, DPO, reward models and RL alike."""

    rank: Count = 0
    """Rank r of each adapter, B A with A [r, in] and B [out, r]; 0: there are none, and all weights are trained."""
    alpha: PositiveFloat = 32.0
    """Scale of an adapter: it adds alpha / rank x B A x."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that an update leaves out. In RL the policy that samples has none: keep it at 0 there."""
    targets: list[str] = dataclasses.field(
        default_factory=lambda: ["*.self_attention.linear_*", "*.mlp.linear_fc*", "*.mlp.*experts.*linear_fc*"]
    )
    """Linear layers that get an adapter: glob patterns over the names of their weights, as those of model.freeze. By default
    all of attention and experts; *.mlp.router.* adds the routers."""
    kind: Literal["lora", "dora"] = "lora"
    """lora (Hu et al. 2021), or dora (Liu et al. 2024): the length of each row of the weights is trained by itself."""
    path: str | None = None
    """Folder in PEFT's format whose adapters these start as. By default B is zero: the policy starts as the model itself."""


@section
class OptimizerConfig:
    """The optimizer, its schedule and where its state lies."""

    name: Literal["adam", "sgd"] = "adam"
    """adam: AdamW (Loshchilov and Hutter 2019). sgd: stochastic gradient descent with momentum, as torch's; it keeps one number
    a weight where Adam keeps two, and Megatron does not shard them: it needs parallel.distributed_optimizer: false."""
    lr: PositiveFloat = 1e-6
    betas: Annotated[tuple[Fraction, Fraction], only_with(".name", "adam")] = (0.9, 0.95)
    eps: Annotated[PositiveFloat, only_with(".name", "adam")] = 1e-8
    momentum: Annotated[Fraction, only_with(".name", "sgd")] = 0.9
    """Factor by which the running sum of gradients, which is what steps, falls at each update; 0 keeps no sum."""
    weight_decay: NonNegativeFloat = 0.0
    """Decoupled from the gradient with adam, added to it (after clipping) with sgd."""
    clip_grad: NonNegativeFloat = 1.0
    """Norm to which gradients are clipped; 0 does not clip."""
    warmup_steps: Count = 0
    """Optimizer updates over which the learning rate rises."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end of the decay, as a share of lr."""
    decay_steps: Positive | None = None
    """Optimizer updates until the end of the decay; by default all updates of the run."""
    cpu_offload: Annotated[Fraction, only_with(".name", "adam"), only_with("parallel.distributed_optimizer", True)] = (
        0.0
    )
    """Share of the optimizer's state (fp32 weights and moments, 12 bytes a parameter) that is kept in host memory and stepped
    by the CPU: 16 bytes a parameter there, none on the GPU. The rest of the model must train in 16 bits."""
    precision_aware: Annotated[bool, only_with(".name", "adam"), only_with("parallel.distributed_optimizer", True)] = (
        False
    )
    """Transformer Engine's Adam keeps only the 16 bits of the fp32 weights that the bf16 weights lack: the same numbers in 10
    bytes a parameter instead of 12."""
    moments: Annotated[Literal["fp32", "bf16"], only_with(".name", "adam"), only_with(".precision_aware")] = "fp32"
    """Format of both moments of Adam; bf16 needs precision_aware, and makes 6 bytes a parameter of its 10."""


@section
class ParallelConfig:
    """Parallel layout of the trainer."""

    tensor: Positive = 1
    """Tensor parallelism; above 1 it always brings sequence parallelism."""
    pipeline: Positive = 1
    virtual_pipeline: Positive = 1
    """Model chunks per pipeline stage (interleaved schedule when above 1)."""
    expert: Positive = 1
    expert_tensor: Positive | None = None
    """Tensor parallelism inside an expert; by default that of the rest of the model when expert = 1, else 1."""
    context: Positive = 1
    cp_comm_type: Literal["a2a", "all_gather"] = "a2a"
    """How attention reaches the tokens of other context-parallel ranks: a2a exchanges heads for tokens (less traffic; the ranks
    must divide the heads), all_gather gathers keys and values (any number of heads)."""
    distributed_optimizer: bool = True
    """Shard the optimizer's state over the data-parallel ranks."""
    overlap_param_gather: Annotated[bool, only_with(".distributed_optimizer", True)] = False
    """Gather the sharded weights during the next forward, layer by layer, instead of after the optimizer's step."""
    timeout_s: PositiveFloat = 600.0
    """Longest wait in a collective before the run stops."""


@section
class PrecisionConfig:
    """Number formats of trainer and engine."""

    train: Literal["bf16", "fp32", "fp8_delayed", "fp8_tensorwise", "fp8_blockwise", "mxfp8"] = "bf16"
    """Matrix products of the trainer. fp8_* and mxfp8 are Transformer Engine's recipes on a GPU, and fake quantization
    by ModelOpt without one (fp8_tensorwise, fp8_blockwise); `megatron-rl doctor` says which can run here."""
    gradients: Literal["fp32", "bf16"] = "fp32"
    """Format in which gradients are summed and reduced; bf16 takes 2 bytes a parameter, not 4, and rounds each micro-batch."""
    rollout: Annotated[Literal["bf16", "fp32", "fp8"], read_by("train", "sample")] = "bf16"
    """Format of the engine's weights and products. fp8: weights are quantized in blocks of 128 x 128 when they are pushed."""
    fp32_lm_head: bool = False
    """Logits in fp32 on both sides, from hidden states and head weights as they are: bf16 logits of 16 to 32 are 0.125
    apart."""
    identical: bool = False
    """Engine and trainer compute with the same batch-invariant operators, so that log-probs of the same weights and tokens
    are equal to the last bit. `megatron-rl certify` proves it for a model and a layout."""


@section
class PruneConfig:
    """Parts that `megatron-rl prune` removes from a model; the section pruning is of the vocabulary, in RL."""

    layers: Positive | None = None
    """Layers that stay: those that turn their input the most (block influence)."""
    heads: Positive | None = None
    """Query heads of a layer that stay, in whole groups with their key-value heads: those that add the most to the output."""
    width: Positive | None = None
    """Inner channels that stay in each dense MLP."""
    experts: Positive | None = None
    """Experts that stay in each MoE layer."""
    expert_width: Positive | None = None
    """Inner channels that stay in each expert, and in shared experts as many times as they are wider."""
    expert_importance: Literal["reap", "frequency"] = "reap"
    """reap: mean of gate x norm of the output over the tokens that are sent to an expert; frequency: how many are sent."""
    channel_importance: Literal["activation", "wanda"] = "activation"
    """Importance of an inner channel: mean |activation|; or wanda: root mean square of the activation x norm of the
    weights behind it.
    """
    calibration_samples: Positive = 128
    """Demonstrations, or pieces of texts, on which importance is measured."""
    sparsity: Annotated[str, Field(pattern=r"^(none|unstructured|[1-9]\d*:[1-9]\d*)$")] = "none"
    """Zeros among the weights that stay: unstructured: a share ratio of each row; N:M such as 2:4: all but N of every M
    neighbors along a layer's input."""
    method: Annotated[Literal["magnitude", "wanda", "sparsegpt"], only_with(".sparsity", example="'2:4'")] = "wanda"
    """Which weights become zero. magnitude: the smallest; wanda: those of the smallest |W| x norm of their input; sparsegpt:
    those whose loss the others can make up for best, and these then do."""
    ratio: Annotated[float, Field(gt=0, lt=1), only_with(".sparsity", "unstructured")] = 0.5
    """unstructured: share of the weights that become zero."""
    targets: Annotated[list[str], only_with(".sparsity", example="'2:4'")] = dataclasses.field(default_factory=list)
    """Weights that get zeros: patterns as of model.freeze; empty: all linear layers of attention, MLPs and experts."""


@section
class QuantizeConfig:
    """Post-training quantization for serving (`megatron-rl quantize`) of the model at model.path, calibrated on data."""

    format: Literal["fp8_tensor", "int4"] = "fp8_tensor"
    """fp8_tensor: weights and inputs in e4m3, one scale for each matrix and one for each layer's inputs, from calibration.
    int4: weights alone, one scale for 128 inputs of an output, with the least error on the calibration data."""
    calibration_samples: Positive = 128
    """Demonstrations, or pieces of texts, of the training data by which scales are chosen."""
    keep_layers: list[Count] = dataclasses.field(default_factory=list)
    """Decoder layers that stay as they are; 0 is the first."""
