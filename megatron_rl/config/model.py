"""Keys of the model, its adapters, optimizer, parallel layout, precision and compression."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Literal

from pydantic import Field

from megatron_rl.config.conditions import only_with, read_by
from megatron_rl.config.section import Count, Fraction, NonNegativeFloat, Positive, PositiveFloat, section


@section
class ModelConfig:
    """The policy model, its kernels and its memory use."""

    path: str = ""
    """Hugging Face folder of the model: config.json, safetensors, tokenizer. The folder is read at the start and never
    written. An id on the Hugging Face Hub is possible too: owner/name or owner/name@revision (branch, tag or commit).
    The run downloads it, and keeps the commit of its first download. All other keys for models accept the same forms."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation (Megatron's recompute_granularity). `full` recomputes every layer."""
    flash_attention: Literal["torch", "auto", "FA3", "FA4"] = "torch"
    """Attention kernel on GPUs in bf16. `torch`: torch's own, FlashAttention 2; `auto`: FlashAttention 4 (package
    flash-attn-4) if it is installed and supports the model's heads on this GPU, else torch's; `FA4`: FlashAttention 4,
    and an error if it cannot run; `FA3`: FlashAttention 3, which replaces torch's own kernel."""
    kernels: Literal["compiled", "any"] = "compiled"
    """Kernels on GPUs. `compiled`: stop with an error if the CUDA kernels of this package cannot run; `any`: use plain
    torch in that case, which is slower."""
    head_chunk_tokens: Positive = 2048
    """Number of tokens whose logits are in memory at the same time. The memory of the output head is proportional to
    this number x the vocabulary size."""
    moe_dispatcher: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """Megatron's method of sending tokens to their experts; `flex` needs DeepEP."""
    moe_router_fusion: bool = False
    """Use Transformer Engine's fused router (GPUs). The fused router cannot replay routes and needs routing.source =
    none."""
    moe_aux_loss: NonNegativeFloat = 0.0
    """Coefficient of the load-balancing loss of each MoE layer, a mean over all tokens, prompts included. RL usually
    keeps it at 0; SFT of an untrained router needs this loss. docs/how-it-works.md has the formula, and the difference
    from Hugging Face's."""
    moe_z_loss: NonNegativeFloat = 0.0
    """Coefficient of the routers' z-loss: the mean over all tokens of logsumexp(logits)^2 in each MoE layer (ST-MoE:
    1e-3)."""
    moe_bias_update_rate: NonNegativeFloat = 0.0
    """Step size of load balancing without a loss, for models whose routers have a bias per expert (DeepSeek-V3: 1e-3).
    After each update, the biases of experts with more than the mean load fall by this amount, and all other biases rise
    by it. RL refuses this key."""
    freeze: list[str] = dataclasses.field(default_factory=list)
    """Weights that are not trained: glob patterns for the names of Megatron's parameters (as in its layers without
    Transformer Engine), such as *.self_attention.*, *.mlp.router.*, *.softmax_offset, decoder.layers.0.*, embedding.*.
    Frozen weights have no gradient and no optimizer state; they are pushed to SGLang and saved like all others."""
    keep_zeros: bool | list[str] = False
    """Keep weights at zero if they are zero when training starts, such as weights that `megatron-rl prune` set to zero.
    true: in all linear layers of attention, MLPs and experts. A list: in the layers whose names match these patterns
    (see model.freeze). The critic's weights are not affected."""
    attention_sinks: Literal["exact", "ignored"] = "exact"
    """Attention sinks in the trainer. `exact`: as in the model; `ignored` (experiments only): the trainer leaves the
    model's attention sinks out and does not train them, while SGLang still uses them. This simulates a trainer kernel
    without sink support."""


@section
class LoRAConfig:
    """Low-rank adapters, trained instead of the model's weights. They work in SFT, DPO, reward models and RL."""

    rank: Count = 0
    """Rank r of each adapter B A, with A [r, in] and B [out, r]. 0: no adapters, and all weights are trained."""
    alpha: PositiveFloat = 32.0
    """Scale of the adapters: each adapter adds alpha / rank x B A x to the output of its layer for the input x."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Dropout probability of an adapter's inputs in updates. In RL the sampling policy has no dropout, so keep it at 0."""
    targets: list[str] = dataclasses.field(
        default_factory=lambda: ["*.self_attention.linear_*", "*.mlp.linear_fc*", "*.mlp.*experts.*linear_fc*"]
    )
    """Linear layers with an adapter: glob patterns for the names of their weights (see model.freeze). By default all
    linear layers of attention, MLPs and experts; *.mlp.router.* adds the routers."""
    kind: Literal["lora", "dora"] = "lora"
    """`lora` (Hu et al. 2021), or `dora` (Liu et al. 2024), which also trains the norm of each row of the weights
    separately."""
    path: str | None = None
    """Folder in PEFT's format with initial adapters. By default B is zero, so that training starts from the unchanged
    model."""


@section
class OptimizerConfig:
    """The optimizer, its learning rate schedule, and the memory that holds its state."""

    name: Literal["adam", "sgd"] = "adam"
    """Optimizer. `adam`: AdamW (Loshchilov and Hutter 2019). `sgd`: stochastic gradient descent with momentum, as in torch. The
    optimizer state of sgd has one number per weight instead of two. Megatron does not shard this state, so sgd needs
    parallel.distributed_optimizer: false."""
    lr: PositiveFloat = 1e-6
    """Learning rate after the warmup."""
    betas: Annotated[tuple[Fraction, Fraction], only_with(".name", "adam")] = (0.9, 0.95)
    """Decay rates of Adam's two moments."""
    eps: Annotated[PositiveFloat, only_with(".name", "adam")] = 1e-8
    """Number that Adam adds to the denominator of a step."""
    momentum: Annotated[Fraction, only_with(".name", "sgd")] = 0.9
    """Decay factor of SGD's running sum of gradients at each update; 0: no momentum."""
    weight_decay: NonNegativeFloat = 0.0
    """Weight decay. adam: decoupled from the gradient; sgd: added to the gradient after clipping."""
    clip_grad: NonNegativeFloat = 1.0
    """Largest norm of the gradient; larger gradients are scaled down to it. 0: no clipping."""
    warmup_steps: Count = 0
    """Number of optimizer updates in which the learning rate rises to lr."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Learning rate schedule after the warmup."""
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end of the decay, as a fraction of lr."""
    decay_steps: Positive | None = None
    """Number of optimizer updates until the end of the decay; by default all updates of the run."""
    cpu_offload: Annotated[Fraction, only_with(".name", "adam"), only_with("parallel.distributed_optimizer", True)] = (
        0.0
    )
    """Share of the optimizer state (fp32 weights and moments, 12 bytes per parameter) that is kept in host memory and
    updated by the CPU. This share needs 16 bytes per parameter of host memory, and no GPU memory. The model must train
    in a 16-bit format."""
    precision_aware: Annotated[bool, only_with(".name", "adam"), only_with("parallel.distributed_optimizer", True)] = (
        False
    )
    """Use Transformer Engine's Adam, which stores only those 16 bits of each fp32 weight that the bf16 weight lacks.
    Results are the same; the state takes 10 bytes per parameter instead of 12."""
    moments: Annotated[Literal["fp32", "bf16"], only_with(".name", "adam"), only_with(".precision_aware")] = "fp32"
    """Format of both moments of Adam. `bf16` needs precision_aware, and reduces the optimizer state from 10 to 6 bytes per
    parameter."""


@section
class ParallelConfig:
    """Parallel layout of the trainer."""

    tensor: Positive = 1
    """Tensor-parallel size. A size above 1 also turns on sequence parallelism."""
    pipeline: Positive = 1
    """Pipeline-parallel size."""
    virtual_pipeline: Positive = 1
    """Number of model chunks per pipeline stage. A number above 1 selects the interleaved schedule."""
    expert: Positive = 1
    """Expert-parallel size."""
    expert_tensor: Positive | None = None
    """Tensor-parallel size inside an expert. By default `tensor` if expert = 1, else 1."""
    context: Positive = 1
    """Context-parallel size."""
    cp_comm_type: Literal["a2a", "all_gather"] = "a2a"
    """Communication of attention between context-parallel ranks. `a2a`: an all-to-all gives each rank all tokens of
    some heads (less traffic; the number of ranks must divide the number of heads); `all_gather`: each rank gathers all
    keys and values (any number of heads)."""
    distributed_optimizer: bool = True
    """Shard the optimizer state over the data-parallel ranks."""
    overlap_param_gather: Annotated[bool, only_with(".distributed_optimizer", True)] = False
    """Gather the sharded weights layer by layer during the next forward pass, instead of after the optimizer's update."""
    timeout_s: PositiveFloat = 600.0
    """Longest wait in a collective operation, in seconds, before the run stops."""


@section
class PrecisionConfig:
    """Number formats of the trainer and of SGLang."""

    train: Literal["bf16", "fp32", "fp8_delayed", "fp8_tensorwise", "fp8_blockwise", "mxfp8"] = "bf16"
    """Format of the trainer's matrix multiplications. fp8_* and mxfp8 are Transformer Engine's recipes on a GPU.
    Without a GPU, fp8_tensorwise and fp8_blockwise are simulated (fake quantization by ModelOpt). `megatron-rl doctor`
    lists the formats that can run on this machine."""
    gradients: Literal["fp32", "bf16"] = "fp32"
    """Format in which gradients are summed and reduced. `bf16` takes 2 bytes per parameter instead of 4, and rounds the
    sum at each micro-batch."""
    rollout: Annotated[Literal["bf16", "fp32", "fp8"], read_by("train", "sample")] = "bf16"
    """Format of SGLang's weights and matrix multiplications. `fp8`: each push of weights quantizes them in blocks of
    128 x 128."""
    fp32_lm_head: bool = False
    """Compute logits in fp32, in SGLang and in the trainer, from unchanged hidden states and head weights. In bf16,
    neighboring logits between 16 and 32 are 0.125 apart."""
    identical: bool = False
    """Compute with the same batch-invariant operators in SGLang and in the trainer, so that log-probs of the same
    weights and tokens are equal to the last bit. `megatron-rl certify` proves this for a model and a layout."""


@section
class PruneConfig:
    """Parts of the model that `megatron-rl prune` removes.

    The section `pruning` is a different feature: vocabulary pruning in RL.
    """

    layers: Positive | None = None
    """Number of decoder layers to keep: the layers that change the direction of their input most (block influence)."""
    heads: Positive | None = None
    """Number of query heads to keep in each layer: the heads that contribute most to the output. Heads are kept in
    whole groups with their key-value heads."""
    width: Positive | None = None
    """Number of inner channels to keep in each dense MLP."""
    experts: Positive | None = None
    """Number of experts to keep in each MoE layer."""
    expert_width: Positive | None = None
    """Number of inner channels to keep in each expert. Wider shared experts keep proportionally more channels."""
    expert_importance: Literal["reap", "frequency"] = "reap"
    """Importance of an expert. `reap`: mean of gate x norm of the expert's output, over the tokens of the expert;
    `frequency`: number of these tokens."""
    channel_importance: Literal["activation", "wanda"] = "activation"
    """Importance of an inner channel. `activation`: mean |activation|; `wanda`: root mean square of the activation x
    norm of the weights that read it."""
    calibration_samples: Positive = 128
    """Number of demonstrations, or of pieces of texts, on which importance is measured."""
    sparsity: Annotated[str, Field(pattern=r"^(none|unstructured|[1-9]\d*:[1-9]\d*)$")] = "none"
    """Pattern of zeros in the weights that remain. `unstructured`: a share `ratio` of each row is zero; `N:M`, such as
    2:4: all but N of every M neighboring weights along a layer's input are zero."""
    method: Annotated[Literal["magnitude", "wanda", "sparsegpt"], only_with(".sparsity", example="'2:4'")] = "wanda"
    """Choice of the weights that become zero. `magnitude`: the smallest weights; `wanda`: the weights with the smallest
    |W| x norm of their input; `sparsegpt`: the weights whose removal the other weights can best compensate. sparsegpt
    then adjusts the other weights."""
    ratio: Annotated[float, Field(gt=0, lt=1), only_with(".sparsity", "unstructured")] = 0.5
    """unstructured: share of the weights that become zero."""
    targets: Annotated[list[str], only_with(".sparsity", example="'2:4'")] = dataclasses.field(default_factory=list)
    """Weights that get zeros: patterns as in model.freeze. Empty: all linear layers of attention, MLPs and experts."""


@section
class QuantizeConfig:
    """Post-training quantization for serving (`megatron-rl quantize`) of the model at model.path, calibrated on data."""

    format: Literal["fp8_tensor", "int4"] = "fp8_tensor"
    """Format of the quantized model. `fp8_tensor`: weights and inputs in e4m3, with one scale per matrix and one per
    layer's inputs, from calibration. `int4`: weights only. Each 128 neighboring weights of a row share a scale, chosen for the
    smallest error on the calibration data."""
    calibration_samples: Positive = 128
    """Number of demonstrations, or of pieces of texts, from the training data. The scales are computed from them."""
    keep_layers: list[Count] = dataclasses.field(default_factory=list)
    """Decoder layers that are not quantized; 0 is the first."""
