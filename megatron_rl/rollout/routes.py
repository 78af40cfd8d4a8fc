"""Routed experts as SGLang returns them, as the table that a trajectory carries."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass

import numpy as np

from megatron_rl.errors import UserError


@dataclass(frozen=True)
class RouteLayout:
    """Which rows and columns the engine's table has for a model, read off its Hugging Face config."""

    layers: int
    """All layers: the engine's table has dense ones too."""
    moe_layers: tuple[int, ...]
    """Indices of the layers that have experts: the ones that a trajectory keeps."""
    experts: int
    topk: int

    @classmethod
    def from_config(cls, config: dict) -> RouteLayout:
        """config: the content of config.json. The fields, not the model's name, say which layers are dense."""

        def first(*names: str, default: int | None = None) -> int:
            value = next((config[name] for name in names if config.get(name) is not None), default)
            if value is None:
                raise UserError(f"config.json has none of {', '.join(names)}: rollout.routes needs a MoE model")
            return value

        layers = first("num_hidden_layers")
        every = max(first("decoder_sparse_step", default=1), first("moe_layer_freq", default=1))
        dense = {*range(first("first_k_dense_replace", default=0)), *(config.get("mlp_only_layers") or [])}
        # Qwen counts from one (layer i is MoE where (i + 1) % step == 0), DeepSeek from zero (i % freq == 0).
        offset = 1 if "decoder_sparse_step" in config else 0
        moe = tuple(i for i in range(layers) if i not in dense and (i + offset) % every == 0)
        experts = first("n_routed_experts", "num_local_experts", "num_experts")
        return cls(layers, moe, experts, first("num_experts_per_tok", "experts_per_token"))

    def decode(self, encoded: str, tokens: int) -> np.ndarray:
        """Base64 of raw int32 [tokens, layers, topk] -> [tokens, moe_layers, topk] uint8 (int16 above 255 experts)."""
        try:
            raw = base64.b64decode(encoded, validate=True)
        except (binascii.Error, ValueError, TypeError) as error:
            raise UserError(f"routed_experts from SGLang is not base64 ({error}): was the reply cut off?") from None
        expected = tokens * self.layers * self.topk * 4
        if len(raw) != expected:
            raise UserError(
                f"routed_experts from SGLang has {len(raw)} bytes, but {tokens} tokens x {self.layers} layers x"
                f" {self.topk} experts of 4 bytes are {expected}: another model, or a reply that was cut off?"
            )
        table = np.frombuffer(raw, np.int32).reshape(tokens, self.layers, self.topk)[:, self.moe_layers]
        if table.size and (table.min() < 0 or table.max() >= self.experts):
            raise UserError(
                f"routed_experts from SGLang names expert {table.min() if table.min() < 0 else table.max()},"
                f" but the model has {self.experts}"
            )
        return table.astype(np.uint8 if self.experts <= 255 else np.int16)
