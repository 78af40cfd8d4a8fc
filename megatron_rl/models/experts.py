"""Experts without Transformer Engine's grouped kernels: Megatron's SequentialMLP with little overhead per expert."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from megatron.bridge.peft.lora_layers import LoRALinear
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.moe.experts import SequentialMLP
from torch import Tensor

from megatron_rl.ops import matmuls


@dataclass(frozen=True)
class Groups:
    """Ranges of rows by expert, in a tensor whose rows are sorted by expert."""

    counts: list[int]
    """Number of rows (tokens) of each expert."""
    ends: torch.Tensor | None
    """End of each expert's rows, on a GPU that multiplies all experts at once; None to multiply expert by expert."""

    @classmethod
    def of(cls, x: torch.Tensor, counts: list[int]) -> Groups:
        """Return the groups of the rows of x `[N, in]`, which are sorted by expert."""
        together = matmuls.served(x, len(counts))
        return cls(counts, matmuls.ends_of(counts, x.device) if together else None)

    def together(self, weights: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """Return `ends` if one kernel can multiply all experts with weights of this shape; else None."""
        return self.ends if matmuls.aligned(*weights[0].shape) else None


Product = Callable[[torch.Tensor, Groups, Sequence[torch.Tensor]], torch.Tensor]
"""Function that multiplies rows `[N, in]`, sorted by expert, by one weight `[out, in]` per expert; it returns `[N, out]`."""


class GroupedExperts(SequentialMLP):
    """SequentialMLP with one matrix multiplication per expert and linear layer; parameters, names and checkpoints are the same.

    In bf16, one kernel multiplies all experts at once on GPUs that support this (ops/matmuls.py). The activation runs once over
    all tokens. An expert without tokens costs nothing but its zero gradient. Expert tensor parallelism needs no code here: the
    dispatcher gathers and reduces the tokens, and each rank's slices of fc1 and fc2 fit together. Low-rank adapters add two
    such multiplications. Experts with linear layers in other wrappers (ModelOpt's quantizers) use Megatron's own forward.
    """

    quantizer: FakeQuantizer | None = None
    """Object that rounds weights and inputs of the matrix multiplications if FP8 is simulated; else None."""
    watch: Callable[[torch.Tensor, list[int], Sequence[ColumnParallelLinear | RowParallelLinear]], None] | None = None
    """Function that is called for fc1 and fc2 with inputs [N, in], tokens per expert and the experts' layers. The inputs of fc2
    are already multiplied by the router's weights."""

    @staticmethod
    def product(x: torch.Tensor, groups: Groups, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        """Multiply rows x `[N, in]` by the weight `[out, in]` of each row's expert; return `[N, out]`."""
        if (ends := groups.together(weights)) is not None:
            return matmuls.product(x.contiguous(), ends, weights)
        out = x.new_empty((x.shape[0], weights[0].shape[0]))
        for expert, rows in _rows(groups.counts):
            out[rows] = torch.mm(x[rows], weights[expert].t())
        return out

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """Return weighted outputs `[N, hidden]` from tokens `[N, hidden]` sorted by expert, counts `[E]` and gates `[N]`."""
        config = self.config
        plain = all(
            type(_base(e.linear_fc1)) is ColumnParallelLinear and type(_base(e.linear_fc2)) is RowParallelLinear
            for e in self.local_experts
        )
        if not plain or config.fp8 or config.fp4 or config.moe_apply_probs_on_input or not config.gated_linear_unit:
            return super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
        groups = Groups.of(permuted_local_hidden_states, tokens_per_expert.tolist())  # the counts are on the host
        fc1, fc2 = ([getattr(e, name) for e in self.local_experts] for name in ("linear_fc1", "linear_fc2"))
        biases = None if fc1[0].bias is None else torch.stack([layer.bias for layer in fc1])  # also of wrapped layers
        hidden = self._grouped_linear(permuted_local_hidden_states, groups, fc1, biases)
        probs = permuted_probs.unsqueeze(-1)
        if (
            config.activation_func is F.silu
            and config.activation_func_clamp_value is None
            and not config.glu_linear_offset
        ):
            hidden = _WeightedSwiGLU.apply(hidden, probs)
        else:
            hidden = _Recomputed.apply(self._weighted_glu, hidden, probs)
        # The bias is weighted like the output. Megatron refuses the bias with expert tensor parallelism.
        biases = None if fc2[0].bias is None else torch.stack([layer.bias for layer in fc2])
        return self._grouped_linear(hidden, groups, fc2, biases, probs), None

    def _weighted_glu(self, hidden: torch.Tensor, probs: torch.Tensor) -> torch.Tensor:
        """Apply Megatron's gated activation with clamp and offset: `[N, 2 F]`, router weights `[N, 1]` -> `[N, F]`."""
        limit = self.config.activation_func_clamp_value
        gate, linear = hidden.chunk(2, dim=-1)
        if limit is not None:
            gate, linear = gate.clamp(max=limit), linear.clamp(min=-limit, max=limit)
        linear = linear + self.config.glu_linear_offset
        return (self.config.activation_func(gate) * linear * probs).to(hidden.dtype)

    def _grouped_linear(
        self,
        x: torch.Tensor,
        groups: Groups,
        layers: Sequence[ColumnParallelLinear | RowParallelLinear | LoRALinear],
        biases: torch.Tensor | None = None,
        scales: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if self.watch is not None:
            self.watch(x, groups.counts, [_base(layer) for layer in layers])
        weights = [cast("torch.Tensor", _base(layer).weight) for layer in layers]
        if self.quantizer is not None:
            x, weights = self.quantizer.inputs(x, groups.counts), [self.quantizer.weight(w) for w in weights]
        out = _GroupedLinear.apply(x, groups, biases, scales, self.product, *weights)
        adapters: list[Any] = [a.adapter for a in layers if isinstance(a, LoRALinear) and a._adapter_enabled]
        if adapters:
            inside, outside = ([getattr(a, name).weight for a in adapters] for name in ("linear_in", "linear_out"))
            low = _GroupedLinear.apply(adapters[0].dropout(x), groups, None, None, self.product, *inside)
            added = _GroupedLinear.apply(low, groups, None, None, self.product, *outside)
            out = out + added * (adapters[0].alpha / adapters[0].dim)
        return out


def _base(layer: Any) -> Any:
    return layer.to_wrap if isinstance(layer, LoRALinear) else layer


class _GroupedLinear(torch.autograd.Function):
    """Computes y = x W_e^T + s b_e for the rows of each expert e.

    x: `[N, in]`, sorted by expert. W_e: `[out, in]`. b: `[E, out]` or None. s: `[N, 1]` weights of the biases, or None. The
    biases are never expanded to a tensor with one bias per row.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        groups: Groups,
        biases: torch.Tensor | None,
        scales: torch.Tensor | None,
        product: Product,
        *weights: torch.Tensor,
    ):
        out = product(x, groups, weights)
        if biases is not None and (ends := groups.together(weights)) is not None:
            matmuls.add_biases(out, ends, biases, scales)
        elif biases is not None:
            for expert, rows in _rows(groups.counts):
                out[rows] += biases[expert] if scales is None else scales[rows] * biases[expert]
        ctx.groups, ctx.biased, ctx.weighted = groups, biases is not None, biases is not None and scales is not None
        inputs = x if any(ctx.needs_input_grad[5:]) else None  # frozen weights do not need the inputs
        ctx.save_for_backward(inputs, *((scales, biases) if ctx.weighted else (None, None)), *weights)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        x, scales, biases, *weights = ctx.saved_tensors
        grad = grad.contiguous()
        counts, needed = ctx.groups.counts, ctx.needs_input_grad[5:]
        if (ends := ctx.groups.together(weights)) is not None:
            grad_x = matmuls.input_gradient(grad, ends, weights)
            grad_scales = matmuls.scale_gradients(grad, ends, biases).to(scales.dtype) if ctx.weighted else None
            grad_biases = matmuls.bias_gradients(grad, ends, counts, scales) if ctx.biased else None
            grad_weights = [None] * len(weights)
            if any(needed):
                grad_weights = matmuls.weight_gradients(grad, x.contiguous(), ends, counts)
            return grad_x, None, grad_biases, grad_scales, None, *grad_weights
        grad_x = grad.new_empty((grad.shape[0], weights[0].shape[1]))
        grad_weights = [
            None if count or not need else torch.zeros_like(w)
            for count, need, w in zip(counts, needed, weights, strict=True)
        ]
        grad_biases = grad.new_zeros((len(weights), grad.shape[1])) if ctx.biased else None
        grad_scales = torch.empty_like(scales) if ctx.weighted else None
        for expert, rows in _rows(counts):
            grad_x[rows] = torch.mm(grad[rows], weights[expert])
            if needed[expert]:
                grad_weights[expert] = torch.mm(grad[rows].t(), x[rows])
            if grad_biases is not None and grad_scales is not None:
                of_output = grad[rows].to(scales.dtype)
                grad_scales[rows] = (of_output @ biases[expert].to(scales.dtype)).unsqueeze(-1)
                grad_biases[expert] = (scales[rows].t() @ of_output).squeeze(0)
            elif grad_biases is not None:
                grad_biases[expert] = grad[rows].sum(0)
        return grad_x, None, grad_biases, grad_scales, None, *grad_weights


class _Recomputed(torch.autograd.Function):
    """Computes function(*inputs), keeps only the inputs, and computes the function again in the backward pass."""

    @staticmethod
    def forward(ctx: Any, function: Callable[..., torch.Tensor], *inputs: torch.Tensor):
        ctx.function = function
        ctx.save_for_backward(*inputs)
        return function(*inputs)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor):
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        with torch.enable_grad():
            out = ctx.function(*inputs)
        return None, *torch.autograd.grad(out, inputs, grad)


class _WeightedSwiGLU(torch.autograd.Function):
    """Computes silu(gate) * linear * p, `[N, F]`, from `[N, 2 F]` = (gate, linear) and router weights p `[N, 1]`.

    It keeps only its inputs and computes all other values again in the backward pass. The number of `[N, F]` tensors that are
    written determines the time on a CPU and most of a layer's memory.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, probs: torch.Tensor):
        ctx.save_for_backward(hidden, probs)
        gate, linear = hidden.chunk(2, dim=-1)
        return F.silu(gate).mul_(linear).mul_(probs)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        hidden, probs = ctx.saved_tensors
        gate, linear = hidden.chunk(2, dim=-1)
        grad_hidden = torch.empty_like(hidden)
        grad_gate, grad_linear = grad_hidden.chunk(2, dim=-1)
        sigmoid = gate.sigmoid()
        silu = gate * sigmoid
        grad_probs = (grad * silu).mul_(linear).sum(-1, keepdim=True, dtype=probs.dtype)
        grad = grad * probs.to(grad.dtype)
        torch.mul(grad, silu, out=grad_linear)
        # silu' = sigmoid + silu (1 - sigmoid)
        silu.addcmul_(silu, sigmoid, value=-1).add_(sigmoid)
        torch.mul(grad, linear, out=grad_gate).mul_(silu)
        return grad_hidden, grad_probs


def _rows(counts: list[int]) -> Iterator[tuple[int, slice]]:
    start = 0
    for expert, count in enumerate(counts):
        if count:
            yield expert, slice(start, start + count)
        start += count


# -- fake quant ----------------------------------------------------------------------------------------------------------
# FP8 products without a GPU: weights and inputs of linear layers are rounded to e4m3 and back before a bf16 product.
# nvidia-modelopt does the rounding (`scaled_e4m3`, with straight-through gradients). Forward hooks apply it to Megatron's
# linear layers. `mtq.quantize`, which replaces the layers' classes, does not work here. Its 128 x 128 blocks need a calibration
# and then keep their scales (a change of shape is an error). It refuses tensor parallelism together with expert parallelism.
# It also adds entries to every checkpoint. Here the scales come from the current tensors, so parameters, names, checkpoints
# and exports are the same as in bf16.


class FakeQuantizer:
    """Rounds weights and inputs to e4m3, in blocks with one scale (amax / 448) each.

    block: edge length b. If b > 0, a block has b x b weights, or b inputs of one token. A last block that is smaller, because
    of the matrix size or tensor parallelism, has its own scale. If b is 0, a layer has one scale for its weights on this rank,
    and one for its inputs in the micro-batch.
    """

    def __init__(self, block: int) -> None:
        from modelopt.torch.quantization.tensor_quant import scaled_e4m3  # takes seconds to import

        self._block = block
        self._e4m3 = scaled_e4m3

    def attach(self, model: GPTModel) -> None:
        """Add rounding to linear layers of attention, MLPs and experts, not to router, embedding, output layer and norms."""
        for module in model.decoder.modules():
            if isinstance(module, GroupedExperts):
                module.quantizer = self  # its products bypass the forward of its layers
            elif isinstance(module, ColumnParallelLinear | RowParallelLinear):
                module.register_forward_pre_hook(self._enter)
                module.register_forward_hook(_leave, always_call=True)

    def weight(self, weight: Tensor) -> Tensor:
        """Return the rounded weights [N, K]."""
        return self._round(weight, self._block, self._block)

    def inputs(self, x: Tensor, counts: list[int] | None = None) -> Tensor:
        """Return the rounded inputs [..., K]. counts: tokens per expert; each expert's inputs are rounded separately."""
        rows = x.reshape(-1, x.shape[-1])
        if self._block or counts is None:
            rounded = self._round(rows, 1 if self._block else 0, self._block)
        else:
            rounded = torch.cat([self._round(part, 0, 0) for part in rows.split(counts)])
        return rounded.reshape(x.shape)

    def _round(self, x: Tensor, height: int, width: int) -> Tensor:
        """Round x [R, C] in blocks of height x width (0: the full size); gradients pass through unchanged."""
        rows, columns = x.shape
        if not x.numel():
            return x
        height, width = height or rows, width or columns
        padded = F.pad(x, (0, -columns % width, 0, -rows % height))
        blocks = padded.reshape(-1, height, padded.shape[1] // width, width)
        amax = blocks.detach().abs().amax(dim=(1, 3), keepdim=True)
        # Arguments: bias, exponent bits, mantissa bits, ONNX dtype; True passes gradients through.
        return self._e4m3(blocks, amax, None, 4, 3, None, True).view(padded.shape)[:rows, :columns]

    def _enter(self, layer: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # During the forward, this attribute hides the parameter of the same name.
        layer.__dict__["weight"] = self.weight(layer.weight)
        return self.inputs(args[0]), *args[1:]


def _leave(layer: torch.nn.Module, *_: object) -> None:
    layer.__dict__.pop("weight", None)
