"""FP8 products without a GPU: weights and inputs of linear layers are rounded to e4m3 and back before a bf16 product.

The rounding is nvidia-modelopt's (`scaled_e4m3`: straight-through gradients), put around Megatron's linear layers by
forward hooks. `mtq.quantize`, which would swap the layers' classes, does not serve here: its 128 x 128 blocks need a
calibration and then keep their scales (a change of shape is an error), it refuses tensor together with expert parallelism,
and it adds entries to every checkpoint. Here scales are those of the tensors at hand, so parameters, their names,
checkpoints and exports are those of bf16.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from torch import Tensor

from megatron_rl.models.experts import GroupedExperts


class FakeQuantizer:
    """Rounds to e4m3 with one scale (amax / 448) for each block of weights, and of the inputs of each token.

    block b > 0: blocks of b x b weights and 1 x b inputs; a last one that is cut (by the size, or by tensor parallelism)
    has a scale of its own. 0: one scale for a layer's weights on this rank and one for its inputs in this micro-batch.
    """

    def __init__(self, block: int) -> None:
        from modelopt.torch.quantization.tensor_quant import scaled_e4m3  # seconds, for who needs it

        self._block = block
        self._e4m3 = scaled_e4m3

    def attach(self, model: GPTModel) -> None:
        """Quantize the linear layers of attention, MLPs and experts; router, embedding, output layer and norms stay."""
        for module in model.decoder.modules():
            if isinstance(module, GroupedExperts):
                module.quantizer = self  # its products do not go through its layers' forward
            elif isinstance(module, ColumnParallelLinear | RowParallelLinear):
                module.register_forward_pre_hook(self._enter)
                module.register_forward_hook(_leave, always_call=True)

    def weight(self, weight: Tensor) -> Tensor:
        """The weights [N, K], rounded."""
        return self._round(weight, self._block, self._block)

    def inputs(self, x: Tensor, counts: list[int] | None = None) -> Tensor:
        """The inputs [..., K], rounded. counts: tokens of each expert, whose inputs are tensors of their own."""
        rows = x.reshape(-1, x.shape[-1])
        if self._block or counts is None:
            rounded = self._round(rows, 1 if self._block else 0, self._block)
        else:
            rounded = torch.cat([self._round(part, 0, 0) for part in rows.split(counts)])
        return rounded.reshape(x.shape)

    def _round(self, x: Tensor, height: int, width: int) -> Tensor:
        """Round x [R, C] in blocks of height x width (0: all of it); gradients pass through unchanged."""
        rows, columns = x.shape
        if not x.numel():
            return x
        height, width = height or rows, width or columns
        padded = F.pad(x, (0, -columns % width, 0, -rows % height))
        blocks = padded.reshape(-1, height, padded.shape[1] // width, width)
        amax = blocks.detach().abs().amax(dim=(1, 3), keepdim=True)
        # bias, bits of exponent and mantissa, an ONNX dtype; True: gradients pass through
        return self._e4m3(blocks, amax, None, 4, 3, None, True).view(padded.shape)[:rows, :columns]

    def _enter(self, layer: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        # Found before the parameter of that name for as long as the forward takes.
        layer.__dict__["weight"] = self.weight(layer.weight)
        return self.inputs(args[0]), *args[1:]


def _leave(layer: torch.nn.Module, *_: object) -> None:
    layer.__dict__.pop("weight", None)
