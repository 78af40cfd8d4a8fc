"""Records the outputs of a served model's operators for `megatron-rl certify`: one file per forward pass.

The server records if the model's config has the key FLAG (--json-model-override-args), whose value is the folder. Each forward
pass writes one file `NUMBER-MODE.pt` (torch.save), which appears only when it is complete:

    rids:        ids of the requests

    rows:        [R] int64: request of each row, as an index into rids

    positions:   [R] int64: position of each row in its sequence, from 0

    values:      {(layer, operator): [R, n]}; layers are counted from 0, None is outside of the layers

If a server uses several GPUs, only its first process writes. It writes only values that it holds completely, so no values split
by heads, and no partial sums. CUDA graphs do not run hooks, so the server must be started without them.
"""

from __future__ import annotations

import os
import re
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

FLAG = "megatron_rl_trace"
"""Key of a served model's config. Its value is the folder for the files."""

EMBEDDING, FINAL_NORM = "embedding", "final norm"
"""Names of the recorded operators outside of the layers."""
OF_LAYER = (
    "input norm",
    "qkv projection",
    "query latents",
    "query projection",
    "latent projection",
    "latent norm",
    "query",
    "key",
    "attention",
    "output projection",
    "MLP norm",
    "router",
    "MLP",
)
"""Names of the recorded operators of a layer, in the order of their computation. The four after `qkv projection` belong to
multi-latent attention: query latents (after their norm, if the model has one), queries, latents, and the norm of the latents.
`query` and `key` are the inputs of the attention, after rotation. `router` holds the gates of all experts, [R, E], with 0 for
experts that are not chosen."""
SHARED_OUT = ("qkv projection", "query projection", "query", "key", "attention", "output projection", "MLP")
"""Operators for which each GPU of a server holds only some of the heads, or a partial sum."""
_OUTPUTS = {
    "input_layernorm": "input norm",
    "self_attn.qkv_proj": "qkv projection",
    "self_attn.q_proj": "query projection",
    "self_attn.q_b_proj": "query projection",
    "self_attn.kv_a_proj_with_mqa": "latent projection",
    "self_attn.kv_a_layernorm": "latent norm",
    "self_attn.o_proj": "output projection",
    "post_attention_layernorm": "MLP norm",
    "mlp": "MLP",
    "block_sparse_moe": "MLP",
}
"""{module of a layer: operator whose output the module returns}."""
_INPUTS = {"self_attn.o_proj": "attention", "self_attn.q_b_proj": "query latents"}
"""{module of a layer: operator whose output is the module's input}."""
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.(.+)$")


def after_load(_result: None, runner: Any, *_, **__) -> None:
    """Start recording if the model's config asks for it (hook after `ModelRunner.load_model`)."""
    folder = getattr(runner.model_config.hf_config, FLAG, None)
    if folder is None or runner.is_draft_worker:
        return
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    if parallel.tp_rank == 0:
        Trace(Path(folder), alone=parallel.tp_size == 1).watch(runner.model)


class Trace:
    """Records the current forward pass, and writes each forward pass to a file."""

    def __init__(self, folder: Path, *, alone: bool) -> None:
        """alone: True if this process has the whole model."""
        self.folder, self.alone = folder, alone
        self.number = 0
        self._batch: Any = None
        self._values: dict[tuple[int | None, str], Tensor] = {}

    def watch(self, model: nn.Module) -> None:
        """Register the hooks that record the model's operators."""
        from sglang.srt.layers.moe.topk import TopK
        from sglang.srt.layers.radix_attention import RadixAttention

        decoder: nn.Module = model.model
        decoder.register_forward_pre_hook(self._begin, with_kwargs=True)
        decoder.register_forward_hook(self._end)
        self._output(decoder.embed_tokens, None, EMBEDDING)
        self._output(decoder.norm, None, FINAL_NORM)
        for name, module in decoder.named_modules():
            if (match := _LAYER.search(name)) is None:
                continue
            layer, place = int(match[1]), match[2]
            if isinstance(module, RadixAttention):
                module.register_forward_pre_hook(partial(self._see_attention, layer), with_kwargs=True)
            elif isinstance(module, TopK):
                block = decoder.get_submodule(name.rpartition(".")[0])
                module.register_forward_hook(partial(self._see_choice, layer, block))
            elif place in _OUTPUTS:
                self._output(module, layer, _OUTPUTS[place])
            if place in _INPUTS:
                module.register_forward_pre_hook(partial(self._see_input, layer, _INPUTS[place]))
            if place == "self_attn.fused_qkv_a_proj_with_mqa":  # query latents, then key latents
                attention = decoder.get_submodule(name.rpartition(".")[0])
                module.register_forward_hook(partial(self._see_latents, layer, attention.q_lora_rank))

    def _output(self, module: nn.Module, layer: int | None, operator: str) -> None:
        def see(_module: nn.Module, _args: tuple, output: Any) -> None:
            # A norm that adds the residual also returns the sum; a linear layer also returns its bias.
            self.see(layer, operator, output[0] if isinstance(output, tuple) else output)

        module.register_forward_hook(see)

    def _see_input(self, layer: int, operator: str, _module: nn.Module, args: tuple) -> None:
        self.see(layer, operator, args[0])

    def _see_latents(self, layer: int, start: int, _module: nn.Module, _args: tuple, output: Any) -> None:
        self.see(layer, "latent projection", output[0][..., start:])

    def _see_attention(self, layer: int, _module: nn.Module, args: tuple, named: dict[str, Any]) -> None:
        query, key = (args[i] if len(args) > i else named.get(name) for i, name in enumerate("qk"))
        for operator, value in (("query", query), ("key", key)):
            if value is not None:
                self.see(layer, operator, value)

    def _see_choice(self, layer: int, block: nn.Module, _module: nn.Module, _args: tuple, output: Any) -> None:
        ids, weights = output.topk_ids.long(), output.topk_weights.float()
        if not getattr(
            block, "routed_scaling_factor_fused_in_topk", False
        ):  # the block scales the outputs of its experts
            weights = weights * getattr(block, "routed_scaling_factor", 1.0)
        experts = weights.new_zeros(len(ids), output.router_logits.shape[-1])
        self.see(layer, "router", experts.scatter_(1, ids, weights))

    def see(self, layer: int | None, operator: str, value: Tensor) -> None:
        """Store a copy of an operator's output [R, ...] of the current pass.

        Later operators may change the original in place.
        """
        if self._batch is not None and (self.alone or operator not in SHARED_OUT):
            self._values[layer, operator] = value.detach().reshape(len(value), -1).cpu().clone()

    def _begin(self, _module: nn.Module, args: tuple, named: dict[str, Any]) -> None:
        batch = next((one for one in (*args, *named.values()) if hasattr(one, "forward_mode")), None)
        plain = batch is not None and batch.rids and batch.spec_info is None
        self._batch = batch if plain and (batch.forward_mode.is_decode() or batch.forward_mode.is_extend()) else None
        self._values = {}

    def _end(self, _module: nn.Module, _args: tuple, _output: Any) -> None:
        batch, self._batch = self._batch, None
        if batch is None:
            return
        decode = batch.forward_mode.is_decode()
        counts = torch.tensor([1] * len(batch.rids) if decode else list(batch.extend_seq_lens_cpu))
        rows = torch.arange(len(counts)).repeat_interleave(counts)
        self.number += 1
        self._write(
            f"{self.number:08d}-{'decode' if decode else 'extend'}.pt",
            {
                "rids": list(batch.rids),
                "rows": rows,
                "positions": batch.positions[: len(rows)].long().cpu(),
                "values": {place: value[: len(rows)] for place, value in self._values.items()},
            },
        )
        self._values = {}

    def _write(self, name: str, content: dict[str, Any]) -> None:
        incomplete = self.folder / f"{name}.partial"
        torch.save(content, incomplete)
        os.replace(incomplete, self.folder / name)
