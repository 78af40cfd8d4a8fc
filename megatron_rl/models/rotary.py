"""Rotary position embedding of packed tokens, all at once."""

from __future__ import annotations

import torch
from megatron.core.models.common.embeddings.rope_utils import _rotate_half


def rotate_packed(
    x: torch.Tensor,
    angles: torch.Tensor,
    positions: torch.Tensor,
    *,
    interleaved: bool = False,
    mla_interleaved: bool = False,
    mscale: float = 1.0,
) -> torch.Tensor:
    """Rotate each token by its position's angles; the same arithmetic as Megatron's `_apply_rotary_pos_emb_bshd`.

    x `[T, 1, H, D]`; angles `[S, 1, 1, R]` of positions 0..S-1, R <= D (the rest of D passes); positions `[T]`;
    mscale is yarn's factor on cos and sin; mla_interleaved: pairs lie side by side in x (DeepSeek). Returns `[T, 1,
    H, D]`.
    Errors: IndexError for a position beyond S.
    """
    rotated = angles.shape[-1]
    x, rest = x[..., :rotated], x[..., rotated:]
    if mla_interleaved:
        x = torch.cat((x[..., 0::2], x[..., 1::2]), dim=-1)
    cos = (torch.cos(angles) * mscale).to(x.dtype).index_select(0, positions)
    sin = (torch.sin(angles) * mscale).to(x.dtype).index_select(0, positions)
    x = x * cos + _rotate_half(x, interleaved) * sin
    return torch.cat((x, rest), dim=-1) if rest.shape[-1] else x
