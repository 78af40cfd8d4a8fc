"""Orthogonality loss: a penalty for similar outputs of a token's experts."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_rl.algorithms.stein import OrthogonalityForm, orthogonality_of_products
from megatron_rl.config import VP2OConfig
from megatron_rl.metrics.reduce import Metrics, derived
from megatron_rl.routing.passes import RouteObserver, of_layers, per_token
from megatron_rl.routing.table import RouteTable

GRADIENT = "orthogonality_gradient"
"""Name of the metric of the orthogonality loss's gradient norm, relative to all other losses."""


class Orthogonality(RouteObserver):
    """Adds the orthogonality loss of the counted tokens to the loss of the model, as a sum over tokens.

    The forward pass computes the gradient as soon as the experts' outputs are known, from evenly spaced tokens that represent
    all tokens. Only this gradient is stored until the backward pass.
    """

    reads_outputs = True

    def __init__(self, table: RouteTable, config: VP2OConfig, update: int) -> None:
        """Create it. At most `config.orthogonality_tokens` tokens of the micro-batch are used."""
        self.table, self.update = table, update
        self.form: OrthogonalityForm = config.orthogonality_form
        self.weight, self.tokens = config.orthogonality, config.orthogonality_tokens
        self._sums: dict[int, Tensor] = {}
        self._squares: dict[int, Tensor] = {}
        """{layer: [2] squared gradient norms at the used outputs}: of the orthogonality loss, and of all other losses."""

    def see_outputs(self, layer: int, outputs: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        """Return the outputs unchanged. The backward pass adds the loss's gradient to the gradients of outputs and weights."""
        tokens = self.table.evenly_spaced(self.tokens)
        share = self.table.counted.sum() / max(len(tokens), 1)
        some = rows[tokens]
        seen = outputs.detach()[some].float()  # [C, k, D]
        products = (seen @ seen.transpose(1, 2)).requires_grad_()
        weight = weights.detach()[tokens].float().requires_grad_()
        with torch.enable_grad():
            pairs = weight.unsqueeze(1) * weight.unsqueeze(2)
            unweighted = torch.where(pairs > 0, products / torch.where(pairs > 0, pairs, 1.0), 0.0)
            loss = orthogonality_of_products(unweighted, self.form)
        of_products, of_weight = torch.autograd.grad(loss, (products, weight))
        self._sums[layer] = loss.detach() * share
        scale = self.weight * share
        of_outputs = ((of_products + of_products.transpose(1, 2)) @ seen * scale).to(outputs.dtype)
        squares = self._squares[layer] = torch.zeros(2, device=outputs.device)
        more = (of_weight * scale).to(weights.dtype)
        return _WithGradients.apply(outputs, weights, some, tokens, of_outputs, more, squares, share)

    def metrics(self) -> Metrics:
        """Return, for each layer, the loss and the norm of its gradient relative to the gradient of all other losses.

        Both gradients are those at the outputs that the loss uses.
        """
        tokens = len(self.table.counted_rows)
        losses = {layer: per_token(loss, tokens) for layer, loss in self._sums.items()}
        shares = {layer: derived(_root_of_ratio, *squares) for layer, squares in self._squares.items()}
        return of_layers("orthogonality", losses, self.update) | of_layers(GRADIENT, shares, self.update)


class _WithGradients(torch.autograd.Function):
    """Returns the outputs unchanged. Its backward pass adds the gradient of another loss to outputs and weights."""

    @staticmethod
    def forward(
        ctx: Any,
        outputs: Tensor,
        weights: Tensor,
        rows: Tensor,
        tokens: Tensor,
        of_outputs: Tensor,
        of_weights: Tensor,
        squares: Tensor,
        share: Tensor,
    ) -> Tensor:
        """Store the gradients to add: of_outputs [C, k, D] at rows [C, k], of_weights [C, k] at tokens [C].

        Each of the C tokens represents `share` tokens. squares: [2], filled in the backward pass with the squared norms of the
        added gradient per token and of the incoming gradient.
        """
        ctx.save_for_backward(rows, tokens, of_outputs, of_weights, share)
        ctx.shape, ctx.squares = weights.shape, squares
        return outputs.view_as(outputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        rows, tokens, of_outputs, of_weights, share = ctx.saved_tensors
        own, other = of_outputs.float() / share.clamp(min=1), grad[rows].float()
        ctx.squares.copy_(torch.stack([own.square().sum(), other.square().sum()]))
        grad = grad.index_add(0, rows.flatten(), of_outputs.flatten(0, 1))
        return grad, of_weights.new_zeros(ctx.shape).index_copy(0, tokens, of_weights), *[None] * 6


def _root_of_ratio(own: float, other: float) -> float | None:
    return (own / other) ** 0.5 if other else None
