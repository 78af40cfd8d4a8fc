"""The loss that keeps the outputs of a token's experts apart."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms.stein import orthogonality_of_products
from megatron_rl.metrics.reduce import Metrics
from megatron_rl.routing.memory import RouteTable
from megatron_rl.routing.metrics import of_layers, per_token
from megatron_rl.routing.passes import RouteObserver


class Orthogonality(RouteObserver):
    """Adds the loss of the counted tokens to the model's, as a sum over tokens.

    Its gradient is taken where outputs are seen, of some evenly spaced tokens that stand for all: no more than that is stored
    until the backward.
    """

    reads_outputs = True

    def __init__(self, table: RouteTable, weight: float, tokens: int, update: int) -> None:
        """tokens: at most so many of the micro-batch are looked at."""
        self.table, self.weight, self.tokens, self.update = table, weight, tokens, update
        self._sums: dict[int, Tensor] = {}

    def see_outputs(self, layer: int, outputs: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        """Add the gradient of the loss to those of outputs and weights."""
        tokens = self.table.evenly_spaced(self.tokens)
        share = self.table.counted.sum() / max(len(tokens), 1)
        some = rows[tokens]
        seen = outputs.detach()[some].float()  # [C, k, D]
        products = (seen @ seen.transpose(1, 2)).requires_grad_()
        weight = weights.detach()[tokens].float().requires_grad_()
        with torch.enable_grad():
            pairs = weight.unsqueeze(1) * weight.unsqueeze(2)
            loss = orthogonality_of_products(torch.where(pairs > 0, products / torch.where(pairs > 0, pairs, 1.0), 0.0))
        of_products, of_weight = torch.autograd.grad(loss, (products, weight))
        self._sums[layer] = loss.detach() * share
        scale = self.weight * share
        of_outputs = ((of_products + of_products.transpose(1, 2)) @ seen * scale).to(outputs.dtype)
        return _WithGradients.apply(outputs, weights, some, tokens, of_outputs, (of_weight * scale).to(weights.dtype))

    def metrics(self) -> Metrics:
        """Return the loss by layer."""
        tokens = len(self.table.counted_rows)
        return of_layers("orthogonality", {n: per_token(s, tokens) for n, s in self._sums.items()}, self.update)


class _WithGradients(torch.autograd.Function):
    """Passes outputs on; adds to their gradient, and to that of the weights, another loss's (a sum over tokens)."""

    @staticmethod
    def forward(
        ctx: Any, outputs: Tensor, weights: Tensor, rows: Tensor, tokens: Tensor, of_outputs: Tensor, of_weights: Tensor
    ) -> Tensor:
        """Rows [C, k] of the outputs have gradients [C, k, D], tokens [C] of the weights [C, k]."""
        ctx.save_for_backward(rows, tokens, of_outputs, of_weights)
        ctx.shape = weights.shape
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, tokens, of_outputs, of_weights = ctx.saved_tensors
        grad = grad.index_add(0, rows.flatten(), of_outputs.flatten(0, 1))
        return grad, of_weights.new_zeros(ctx.shape).index_copy(0, tokens, of_weights), None, None, None, None
