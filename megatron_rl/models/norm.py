"""RMSNorm for every norm of a layer spec, with sequence parallelism."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_rl.errors import UserError


class RMSNorm(torch.nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467), computed in fp32.

    Megatron's local `WrappedTorchNorm` refuses sequence parallelism. This class marks its weight with `sequence_parallel`, so
    that Megatron sums the weight's gradient over the tensor-parallel ranks. It fits every norm of a layer spec: the arguments
    are (config, hidden_size, eps). Errors: UserError for a normalization other than RMSNorm.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **unused: object):
        super().__init__()
        if config.normalization != "RMSNorm":
            raise UserError(f"model: normalization '{config.normalization}' is not supported; only RMSNorm is")
        if config.layernorm_zero_centered_gamma:
            raise UserError("model: a zero-centered norm weight (layernorm_zero_centered_gamma) is not supported")
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(hidden_size, dtype=config.params_dtype))
        setattr(self.weight, "sequence_parallel", config.sequence_parallel)  # noqa: B010 as Megatron marks its own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize x `[..., hidden_size]`; return the same shape and dtype."""
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class HeadsRMSNorm(RMSNorm):
    """RMSNorm over all heads together (OLMoE's q_norm and k_norm), with the heads split over the tensor-parallel ranks.

    Each rank has the full weight `[heads * head_dim]`, as the Bridge's conversion expects, and uses its own slice. Megatron
    sums the gradient of q_layernorm and k_layernorm over the ranks.
    """

    def __init__(
        self, config: TransformerConfig, hidden_size: int, eps: float, tp_group: torch.distributed.ProcessGroup
    ):
        super().__init__(config, hidden_size, eps)
        self.tp_group = tp_group

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalize x `[..., heads / tp, head_dim]`, this rank's heads; return the same shape and dtype."""
        flat = x.flatten(-2)
        if self.tp_group.size() == 1:
            return super().forward(flat).view_as(x)
        weight = self.weight.view(self.tp_group.size(), -1)[self.tp_group.rank()]
        wide = flat.float()
        total = _SumOverRanks.apply(wide.square().sum(-1, keepdim=True), self.tp_group)
        scaled = wide * torch.rsqrt(total / self.weight.numel() + self.eps)
        return (scaled * weight.float()).to(x.dtype).view_as(x)


class _SumOverRanks(torch.autograd.Function):
    """Sums over the group in the forward and backward pass, because each rank's output depends on each rank's input."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, group: torch.distributed.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        x = x.clone()
        torch.distributed.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor):
        grad = grad.clone()
        torch.distributed.all_reduce(grad, group=ctx.group)
        return grad, None
