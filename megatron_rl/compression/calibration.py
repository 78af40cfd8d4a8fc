"""Measures the importance of a model's layers, heads, channels and experts on calibration data.

Hooks on the modules run during forward passes of the trainer. They add sums over this process's tokens to tables of the whole
model. Each number in a table belongs to one process or is a sum over several processes. So under every parallel layout, the sum
of all processes' tables is the table of the whole model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from torch import Tensor

from megatron_rl.compression.importance import block_influence, channel_sums, gated_norms, group_norms
from megatron_rl.config import PruneConfig
from megatron_rl.data.packing import Batch
from megatron_rl.models.experts import GroupedExperts
from megatron_rl.models.shape import Shape
from megatron_rl.routing.passes import RouteObserver
from megatron_rl.routing.table import RouteTable
from megatron_rl.trainer.hooks import Stage, UpdateContext, UpdateHook
from megatron_rl.trainer.trainer import Trainer


@dataclass(frozen=True)
class RealTokens:
    """Masks of the current micro-batch's real tokens (no padding)."""

    all: Tensor
    """Mask of this context-parallel rank's tokens, [T] bool."""
    own: Tensor
    """Mask of the real tokens in this process's shard of the sequence, [T / tensor] bool, as sequence parallelism splits it."""


class Watched:
    """State of `watching`: the trainer, and the micro-batch of the current forward pass."""

    def __init__(self, trainer: Trainer, batches: Sequence[Batch]) -> None:
        self._trainer = trainer
        self._batches = {id(batch.tokens): batch for batch in batches}
        self._real: RealTokens | None = None

    @property
    def real(self) -> RealTokens:
        """Real tokens (no padding) of the current micro-batch."""
        assert self._real is not None
        return self._real

    def begin(self, chunk: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Set the current micro-batch. Runs before each forward pass of a chunk."""
        real = self._batches[id(kwargs["input_ids"])].segments.ids >= 0
        layout = self._trainer.layout
        self._real = RealTokens(real, real.tensor_split(layout.tensor)[layout.tensor_rank])

    def rows(self, hidden: Tensor) -> Tensor:
        """Return the rows of real tokens [n, d].

        hidden: [T, 1, d] or [T, d] with all tokens, or [T / tensor, 1, d] with this process's shard of the sequence.
        """
        real = self.real.all if len(hidden) == len(self.real.all) else self.real.own
        return hidden[real].flatten(1)

    def without_padding(self, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Set padding rows to zero before a MoE layer's forward pass; padding cannot be identified after routing."""
        hidden, *rest = args
        return (hidden * self.real.own.view(-1, 1, 1), *rest), kwargs


@contextmanager
def watching(trainer: Trainer, batches: Sequence[Batch]) -> Iterator[tuple[Watched, ExitStack]]:
    """Watch the trainer's model within the block. Yield (state of the micro-batch, exit stack for the caller's hooks).

    All hooks are removed at the end of the block.
    """
    watched = Watched(trainer, batches)
    with ExitStack() as stack:
        for chunk in trainer.chunks:
            stack.callback(chunk.register_forward_pre_hook(watched.begin, with_kwargs=True).remove)
            for layer in layers_of(chunk):
                if is_moe(layer):
                    handle = layer.mlp.register_forward_pre_hook(watched.without_padding, with_kwargs=True)
                    stack.callback(handle.remove)
        yield watched, stack


def layers_of(chunk: GPTModel) -> list[Any]:
    """Return the chunk's transformer layers, untyped, because Megatron's submodules have no types."""
    return [*chunk.decoder.layers]


def is_moe(layer: Any) -> bool:
    """Return True if a transformer layer has experts."""
    return hasattr(layer.mlp, "router")


def watch_experts(
    experts: GroupedExperts, see: Callable[[Tensor, list[int], Sequence[Any]], None], stack: ExitStack
) -> None:
    """Call `see` with the inputs of each of the experts' two matrix multiplications, without padding.

    Arguments of `see`: rows [N, in] ordered by expert, number of rows of each expert, and the experts' linear layers.
    """
    real = torch.zeros(0)

    def watch(rows: Tensor, counts: list[int], layers: Sequence[Any]) -> None:
        nonlocal real
        if isinstance(layers[0], ColumnParallelLinear):  # first product; a real token is never all zeros
            real = rows.any(dim=1)
        kept = [int(part.sum()) for part in real.split(counts)]
        see(rows[real], kept, layers)

    experts.watch = watch
    stack.callback(setattr, experts, "watch", None)


class Calibration(UpdateHook):
    """Measures importance during a forward pass, with router observers and with hooks on modules."""

    reads_outputs = True

    def __init__(self, config: PruneConfig, shape: Shape, watched: Watched) -> None:
        self.config, self.watched = config, watched
        self.shape = shape
        layers, experts = shape.layers, shape.experts
        sizes: dict[str, tuple[bool, tuple[int, ...]]] = {
            "layers": (config.layers is not None, (layers,)),
            "heads": (config.heads is not None, (layers, shape.kv_heads)),
            "width": (config.width is not None, (layers, shape.intermediate)),
            "experts": (config.experts is not None, (layers, experts)),
            "sent": (bool(config.experts or config.expert_width), (layers, experts)),
            "expert_width": (config.expert_width is not None, (layers, experts, shape.expert_intermediate)),
            "shared": (config.expert_width is not None, (layers, shape.shared_intermediate)),
        }
        self.sums = {name: torch.zeros(size, dtype=torch.float64) for name, (wanted, size) in sizes.items() if wanted}
        self.tokens = 0
        """Number of real tokens that this process measured. Sequence parallelism splits the tokens over the processes."""

    # -- the experts, where their tokens come from --------------------------------------------------------------------

    def observers(self, table: RouteTable, stage: Stage, place: UpdateContext) -> list[RouteObserver]:
        """Return the observer that measures the experts of a micro-batch."""
        return [_SeeExperts(self)] if "sent" in self.sums else []

    # -- modules ------------------------------------------------------------------------------------------------------

    def look_at(self, layer: Any, stack: ExitStack) -> None:
        """Add hooks that measure a layer."""
        number = layer.layer_number - 1

        def inputs(linear: torch.nn.Module, see: Callable[..., None]) -> None:
            stack.callback(linear.register_forward_pre_hook(see).remove)

        if "layers" in self.sums:
            stack.callback(layer.register_forward_hook(self._see_layer(number), with_kwargs=True).remove)
        if "heads" in self.sums:
            inputs(layer.self_attention.linear_proj, self._see_heads(number))
        if "width" in self.sums and not is_moe(layer):
            inputs(layer.mlp.linear_fc2, self._see_channels("width", number))
        if "expert_width" in self.sums and is_moe(layer):
            watch_experts(layer.mlp.experts, self._see_experts(number), stack)
            if layer.mlp.shared_experts is not None:
                inputs(layer.mlp.shared_experts.linear_fc2, self._see_channels("shared", number))

    def _see_layer(self, number: int) -> Callable[..., None]:
        def see(module: Any, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            hidden = kwargs["hidden_states"] if "hidden_states" in kwargs else args[0]
            left = output[0] if isinstance(output, tuple) else output
            self.add(
                "layers",
                number,
                slice(None),
                block_influence(self.watched.rows(hidden), self.watched.rows(left)),
            )

        return see

    def _see_heads(self, number: int) -> Callable[..., None]:
        groups = self.shape.kv_heads // parallel_state.get_tensor_model_parallel_world_size()
        own = _slice(groups, parallel_state.get_tensor_model_parallel_rank())

        def see(module: Any, args: Any) -> None:
            heads = self.watched.rows(args[0])
            norms = group_norms(
                heads.view(len(heads), groups, -1), module.weight.view(module.weight.shape[0], groups, -1)
            )
            self.add("heads", number, own, norms)

        return see

    def _see_channels(self, name: str, number: int) -> Callable[..., None]:
        rank = parallel_state.get_tensor_model_parallel_rank()

        def see(module: Any, args: Any) -> None:
            self.add(
                name,
                number,
                _slice(module.weight.shape[1], rank),
                self._channels(self.watched.rows(args[0]), module.weight),
            )

        return see

    def _see_experts(self, number: int) -> Callable[[Tensor, list[int], Sequence[Any]], None]:
        first = parallel_state.get_expert_model_parallel_rank() * (
            self.shape.experts // parallel_state.get_expert_model_parallel_world_size()
        )
        rank = parallel_state.get_expert_tensor_parallel_rank() or 0

        def see(rows: Tensor, counts: list[int], layers: Sequence[Any]) -> None:
            if isinstance(layers[0], ColumnParallelLinear):
                return
            own = _slice(rows.shape[1], rank)
            for expert, (part, layer) in enumerate(zip(rows.split(counts), layers, strict=True), start=first):
                self.add("expert_width", number, (expert, own), self._channels(part, layer.weight))

        return see

    def _channels(self, activations: Tensor, weight: Tensor) -> Tensor:
        return channel_sums(activations, weight if self.config.channel_importance == "wanda" else None)

    def add(self, name: str, number: int, place: Any, found: Tensor) -> None:
        """Add measured values to the entries `place` of layer `number` in the table `name`."""
        row = self.sums[name][number] if found.dim() else self.sums[name]
        row[place if found.dim() else number] += found.cpu()

    # -- the result ---------------------------------------------------------------------------------------------------

    def importance(self, tokens: int, group: dist.ProcessGroup) -> dict[str, Tensor]:
        """Return {name: importance [layers, ...] fp64}, the same on every process. Collective.

        tokens: number of tokens of the calibration data.
        """
        for table in self.sums.values():
            dist.all_reduce(table, group=group)
        found = {name: table / tokens for name, table in self.sums.items()}
        if "experts" in found:
            reap = self.config.expert_importance == "reap"
            found["experts"] = self.sums["experts"] / self.sums["sent"].clamp(min=1) if reap else found["sent"]
        if self.config.channel_importance == "wanda":
            found |= {name: found[name].sqrt() for name in ("width", "expert_width", "shared") if name in found}
        return found


class _SeeExperts(RouteObserver):
    reads_outputs = True

    def __init__(self, calibration: Calibration) -> None:
        self.calibration = calibration
        self._chosen = torch.zeros(0)

    def see_choice(self, layer: int, own: Tensor, chosen: Tensor) -> None:
        self._chosen = chosen

    def see_outputs(self, layer: int, outputs: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
        real = self.calibration.watched.real.own
        norms = outputs.float().norm(dim=-1)[rows]  # outputs are weighted; rows are in the order of experts
        sums, sent = gated_norms(norms[real], self._chosen.sort(dim=1).values[real], self.calibration.shape.experts)
        self.calibration.add("sent", layer, slice(None), sent)
        if "experts" in self.calibration.sums:
            self.calibration.add("experts", layer, slice(None), sums)
        return outputs


def _slice(size: int, rank: int) -> slice:
    return slice(rank * size, (rank + 1) * size)


def measure(trainer: Trainer, batches: list[Batch], shape: Shape, config: PruneConfig) -> dict[str, Tensor]:
    """Measure the importance of everything that the config prunes, on all data-parallel ranks' micro-batches. Collective.

    Keys: layers [L]; heads [L, key-value heads]; width and shared [L, channels]; experts [L, E]; expert_width [L, E, channels];
    sent [L, E], the share of tokens that are routed to each expert. A layer that lacks such a component has zeros. Values are
    fp64 and the same on every process.
    """
    tokens = trainer.totals(batches).inputs
    with watching(trainer, batches) as (watched, stack):
        calibration = Calibration(config, shape, watched)
        for chunk in trainer.chunks:
            for layer in layers_of(chunk):
                calibration.look_at(layer, stack)
        trainer.compute_log_probs(batches, hooks=[calibration])
    return calibration.importance(tokens, trainer.ranks.world_group)
