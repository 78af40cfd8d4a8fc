"""Records outputs of the trainer's operators, row by row, during the computation of log-probs.

The operators have the same names as in the engine's recordings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.identity_op import IdentityOp
from megatron_rl_plugin.trace import EMBEDDING, FINAL_NORM
from torch import Tensor, nn

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.certify.compare import Place, Recorded
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.distributed.parallel import process_group
from megatron_rl.trainer.trainer import Trainer

_OUTPUTS = {
    "input_layernorm": "input norm",
    "self_attention.linear_qkv": "qkv projection",
    "self_attention.linear_q_proj": "query projection",
    "self_attention.linear_q_up_proj": "query projection",
    "self_attention.linear_kv_down_proj": "latent projection",
    "self_attention.latent_projection": "latent projection",
    "self_attention.kv_layernorm": "latent norm",
    "self_attention.linear_proj": "output projection",
    "pre_mlp_layernorm": "MLP norm",
    "mlp.router": "router",
    "mlp": "MLP",
}
"""{module of a layer: operator whose output the module returns}."""
SUMS_OF_BIAS = ("output projection", "MLP")
"""Operators whose bias Megatron returns separately and adds later, together with the residual."""
_INPUTS = {
    "self_attention.linear_q_up_proj": ("query latents",),
    "self_attention.core_attention": ("query", "key"),
    "self_attention.linear_proj": ("attention",),
}
"""{module of a layer: operators whose outputs are the module's first inputs}."""
Note = Callable[[Place, Tensor], None]
"""Function that receives the place and the output of an operator."""


@contextmanager
def watched(chunks: Sequence[GPTModel], note: Note) -> Iterator[None]:
    """Within the block, call `note` with the output of each operator on this process, in Megatron's shapes."""
    with ExitStack() as stack:

        def output(module: nn.Module | None, place: Place) -> None:
            if module is None or isinstance(module, IdentityOp):
                return  # the norm is fused into the following product

            def see(_module: nn.Module, _args: tuple, found: Any) -> None:
                value, bias = found[:2] if isinstance(found, tuple) else (found, None)
                note(place, value + bias if place[1] in SUMS_OF_BIAS and bias is not None else value)

            stack.callback(module.register_forward_hook(see).remove)

        def inputs(module: nn.Module, layer: int, operators: tuple[str, ...]) -> None:
            def see(_module: nn.Module, args: tuple, named: dict[str, Any]) -> None:
                for operator, value in zip(operators, (*args, *named.values()), strict=False):
                    note((layer, operator), value)

            stack.callback(module.register_forward_pre_hook(see, with_kwargs=True).remove)

        for chunk in chunks:
            output(getattr(chunk, "embedding", None), (None, EMBEDDING))
            decoder: Any = chunk.decoder
            output(getattr(decoder, "final_layernorm", None), (None, FINAL_NORM))
            for layer in decoder.layers:
                number = layer.layer_number - 1
                modules = dict(layer.named_modules())
                for name, operator in _OUTPUTS.items():
                    output(modules.get(name), (number, operator))
                for name, operators in _INPUTS.items():
                    if name in modules:
                        inputs(modules[name], number, operators)
        yield


class TrainerRecorder:
    """Computes log-probs of sequences with a trainer, and records the outputs of the trainer's operators."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        config: Any = trainer.model.config
        self._heads: int = config.num_attention_heads
        self._groups: int = config.num_query_groups or config.num_attention_heads
        self._replicated: dict[str, int | None] = {}
        """{operator whose output every tensor-parallel rank holds completely: number of its columns}."""
        if config.multi_latent_attention:
            latent, whole = config.kv_lora_rank, config.kv_lora_rank + config.qk_pos_emb_head_dim
            self._replicated = {"query latents": config.q_lora_rank, "latent projection": whole, "latent norm": latent}
            if trainer.config.precision.identical:
                self._replicated["key"] = whole

    def together(
        self, samples: Sequence[Trajectory], support: SamplingSupport, *, operators: bool = True
    ) -> dict[int, Recorded]:
        """Record all samples, packed as in a training step. Rank 0 returns the result, other ranks return {}. Collective.

        support: sampling support of the log-probs. operators: record outputs of operators too. Log-probs cover the response
        only.
        """
        return self._score(samples, range(len(samples)), support, operators)

    def alone(self, samples: Sequence[Trajectory], support: SamplingSupport) -> dict[int, Recorded]:
        """Record each sample in its own micro-batch. Everything else is the same as in `together`."""
        found, step = {}, self.trainer.ranks.data_size
        for start in range(0, len(samples), step):
            found |= self._score(samples, range(start, min(start + step, len(samples))), support, True)
        return found

    def _score(
        self, samples: Sequence[Trajectory], numbers: Sequence[int], support: SamplingSupport, operators: bool
    ) -> dict[int, Recorded]:
        trainer, ranks = self.trainer, self.trainer.ranks
        mine = numbers[ranks.data_rank :: ranks.data_size]
        batches = trainer.pack([samples[n] for n in mine])
        noted: dict[Place, list[Tensor]] = {}

        def note(place: Place, value: Tensor) -> None:
            # Copied, because later operators may change it in place; to the CPU, because a device cannot hold all of them.
            noted.setdefault(place, []).append(value.detach().to("cpu", copy=True))

        with watched(trainer.chunks if operators else [], note):
            log_probs = trainer.compute_log_probs(batches, support=support, hooks=[])
        found: dict[int, dict[Place | None, tuple[Tensor, Tensor]]] = {n: {} for n in mine}
        for index, batch in enumerate(batches):
            whole = {  # in the same order on all ranks of a tensor-parallel group
                place: self._whole(place[1], values[index], batch.tokens.shape[1])
                for place, values in noted.items()
                if len(values) == len(batches)  # only operators that ran once per batch
            }
            scored = log_probs[index]
            ids, positions = batch.segments.ids.cpu(), batch.position_ids[0].cpu()
            for i, sample in enumerate(batch.samples):
                rows = (ids == i).nonzero()[:, 0]
                of_sample = found[mine[sample]]
                of_sample |= {place: (positions[rows], value[rows]) for place, value in whole.items()}
                if scored is not None and trainer.reports:
                    of_sample[None] = positions[rows], scored.float().cpu()[rows]
        return self._gather(samples, found)

    def _whole(self, operator: str, value: Tensor, tokens: int) -> Tensor:
        """Gather the output [T, n] of an operator on the CPU from this rank's rows or columns. tokens: T."""
        value = value.reshape(len(value), -1)
        group = process_group(parallel_state.get_tensor_model_parallel_group())
        whole = len(value) == tokens and value.shape[1] == self._replicated.get(operator)
        if group.size() > 1 and not whole:
            parts = [torch.empty_like(value) for _ in range(group.size())]
            dist.all_gather(parts, value.contiguous(), group=group)
            value = torch.cat(parts, dim=0 if len(value) < tokens else 1)
        if operator == "qkv projection":  # each group holds its queries, key and value
            groups = value.view(len(value), self._groups, self._heads // self._groups + 2, -1)
            parts = groups.split([groups.shape[2] - 2, 1, 1], dim=2)
            value = torch.cat([part.flatten(1) for part in parts], dim=1)
        return value

    def _gather(
        self, samples: Sequence[Trajectory], found: dict[int, dict[Place | None, tuple[Tensor, Tensor]]]
    ) -> dict[int, Recorded]:
        ranks = self.trainer.ranks
        gathered: list[Any] = [None] * ranks.world_size
        if parallel_state.get_tensor_model_parallel_rank() > 0:
            found = {}  # the first tensor-parallel rank has the same values
        dist.gather_object(found, gathered if ranks.rank == 0 else None, dst=0, group=ranks.world_group)
        merged: dict[int, dict[Place | None, list[tuple[Tensor, Tensor]]]] = {}
        for of_rank in gathered if ranks.rank == 0 else []:
            for number, places in of_rank.items():
                for place, rows in places.items():
                    merged.setdefault(number, {}).setdefault(place, []).append(rows)
        return {number: _recorded(samples[number], places) for number, places in merged.items()}


def _recorded(sample: Trajectory, places: dict[Place | None, list[tuple[Tensor, Tensor]]]) -> Recorded:
    values: dict[Place, Tensor] = {}
    log_probs = torch.full((len(sample.tokens),), torch.nan)
    for place, parts in places.items():
        positions, rows = (torch.cat(of_ranks) for of_ranks in zip(*parts, strict=True))
        rows = rows[positions.argsort()]
        if place is not None:
            values[place] = rows
        else:  # row t holds the log-prob of token t + 1; prompt tokens have no label
            log_probs[sample.prompt_length :] = rows[sample.prompt_length - 1 :]
    return Recorded(torch.from_numpy(sample.tokens.astype("int64")), log_probs, torch.arange(sample.inputs), values)
