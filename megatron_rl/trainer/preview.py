"""Preview of the optimizer's next step for a few parameters, without taking the step."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.optimizer import ChainedOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

CLIP_EPS = 1e-6
"""Epsilon that Megatron adds to the gradient norm in clip_grad_by_total_norm_fp32."""


def owned_ranges(optimizer: ChainedOptimizer) -> dict[torch.nn.Parameter, slice] | None:
    """Return the range of each flattened parameter that this process updates; None if it updates all parameters in full."""
    found: dict[torch.nn.Parameter, slice] = {}
    for part in optimizer.chained_optimizers:
        if not isinstance(part, DistributedOptimizer):
            return None
        for parameter in part.model_param_group_index_map:
            reach = part._get_model_param_range_map(parameter)["param"]
            found[parameter] = slice(reach.start, reach.end)
    return found


class StepPreview:
    """The step that `optimizer` is about to take. Its gradients are prepared (`prepare_grads`), but not clipped yet.

    The preview runs the inner optimizer itself, on copies of a few parameters and of their state. So its arithmetic is exactly
    the optimizer's own, whether torch, Transformer Engine or Apex provides it.
    """

    def __init__(self, optimizer: ChainedOptimizer, norm: float | Tensor) -> None:
        """Create the preview. norm: norm of all gradients, as the optimizer returned it; it determines the clipping factor."""
        self.norm = norm
        config: Any = optimizer.config
        clip = config.clip_grad
        self._clip = clip / (norm + CLIP_EPS) if clip > 0 else 1.0
        self._clip = self._clip.clamp_max(1.0) if torch.is_tensor(self._clip) else min(1.0, self._clip)
        self._optimizer = optimizer
        self._parts: list[Any] = optimizer.chained_optimizers

    @cached_property
    def _owned(self) -> dict[torch.nn.Parameter, slice] | None:
        return owned_ranges(self._optimizer)

    @cached_property
    def _homes(self) -> dict[int, set[torch.nn.Parameter]]:
        """Parameters of each optimizer in `_parts`, by the optimizer's id. Other processes update some of these parameters."""
        return {id(part): {p for b in part.buffers for p in b.params} for part in self._parts}

    @cached_property
    def _places(self) -> dict[int, tuple[torch.optim.Optimizer, dict]]:
        """Inner optimizer and parameter group of each stepped tensor, by the tensor's id."""
        return {
            id(tensor): (part.optimizer, group)
            for part in self._parts
            for group in part.optimizer.param_groups
            for tensor in group["params"]
        }

    @torch.no_grad()
    def after(self, parameters: Sequence[torch.nn.Parameter], lr_scale: float) -> list[Tensor]:
        """Return the full parameters after a step at `lr_scale` times the learning rate, rounded to their dtype.

        Collective. Frozen parameters are returned unchanged.
        """
        if self._owned is None:
            mains = [getattr(p, "main_param", None) for p in parameters]
            mains = [p if main is None else main for p, main in zip(parameters, mains, strict=True)]
            stepped = self._step([m for m in mains if id(m) in self._places], lr_scale)
            return [stepped.get(id(m), m).to(p.dtype) for p, m in zip(parameters, mains, strict=True)]
        return self._after_sharded(parameters, self._owned, lr_scale)

    def changes(self, parameter: torch.nn.Parameter, place: slice) -> list[Tensor]:
        """Return views of this process's tensors that the step may change, for the range `place` of a flattened parameter.

        These are the parameter itself and, if this process updates it, its fp32 weights and moments. The step count is left
        out, because Megatron has a single one for all parameters.
        """
        found = [parameter.detach().view(-1)[place]]
        main, first = getattr(parameter, "main_param", None), 0
        if self._owned is not None:
            part = next((part for part in self._parts if parameter in part.model_param_group_index_map), None)
            if part is None:
                return found
            main, first = _main_shard(part, parameter), self._owned[parameter].start
        main = parameter if main is None else main
        inner: Any = self._places[id(main)][0]
        # Megatron's optimizer for two devices (GPU and host) steps a copy on the host.
        stepped = [getattr(inner, "param_to_inner_param", {}).get(main), *inner.state.get(main, {}).values()]
        stepped += [] if main.dtype == parameter.dtype else [main]  # else main is the parameter or its view
        own = slice(max(place.start - first, 0), max(place.stop - first, 0))
        flat = [t.detach().view(-1) for t in stepped if torch.is_tensor(t) and t.numel() == main.numel() > 1]
        return found + [tensor[own] for tensor in flat]

    def _after_sharded(
        self, parameters: Sequence[torch.nn.Parameter], owned: dict[torch.nn.Parameter, slice], lr_scale: float
    ) -> list[Tensor]:
        """Return the weights after a distributed optimizer's step. Each process steps its shard; shards are then gathered."""
        results: dict[int, Tensor] = {}
        for part in self._parts:
            chosen = [p for p in parameters if p in self._homes[id(part)]]
            if not chosen:
                continue
            shards = {p: _main_shard(part, p) for p in chosen if p in part.model_param_group_index_map}
            stepped = self._step(list(shards.values()), lr_scale)
            whole = torch.zeros(sum(p.numel() for p in chosen), device=chosen[0].device)
            for p, place in zip(chosen, whole.split([p.numel() for p in chosen]), strict=True):
                if p in shards:
                    place[owned[p]] = stepped[id(shards[p])].view(-1)
                results[id(p)] = place
            if part.data_parallel_group.size() > 1:
                dist.all_reduce(whole, group=part.data_parallel_group)  # the others' parts are zero here
        return [results[id(p)].view_as(p).to(p.dtype) if id(p) in results else p.detach() for p in parameters]

    def _step(self, tensors: list[Tensor], lr_scale: float) -> dict[int, Tensor]:
        """Step copies of the tensors, and return {id of a tensor: its stepped copy}."""
        found: dict[int, Tensor] = {}
        by_group: dict[int, list[Tensor]] = defaultdict(list)
        for tensor in tensors:
            by_group[id(self._places[id(tensor)][1])].append(tensor)
        for members in by_group.values():
            inner, group = self._places[id(members[0])]
            copies = [member.detach().clone() for member in members]
            shadow = object.__new__(type(inner))
            shadow.__dict__.update(inner.__dict__)
            shadow.param_groups = [{**group, "params": copies, "lr": group["lr"] * lr_scale}]
            shadow.state = defaultdict(dict)
            for own, member in zip(copies, members, strict=True):
                vars(own).update(vars(member))  # attributes of a weight, which an optimizer may read
                own.grad = None if member.grad is None else member.grad * self._clip
                state = inner.state.get(member, {}).items()
                shadow.state[own] = {k: v.clone() if torch.is_tensor(v) else copy.deepcopy(v) for k, v in state}
            shadow.step()
            found |= {id(member): own for member, own in zip(members, copies, strict=True)}
        return found


def _main_shard(part: DistributedOptimizer, parameter: torch.nn.Parameter) -> Tensor:
    group, order = part.model_param_group_index_map[parameter]
    return part.optimizer.param_groups[group]["params"][order]


@contextmanager
def scaled_lr(optimizer: ChainedOptimizer, scale: float) -> Iterator[None]:
    """Multiply the learning rates by `scale` within the block."""
    groups = optimizer.param_groups
    before = [group["lr"] for group in groups]
    for group, lr in zip(groups, before, strict=True):
        group["lr"] = lr * scale
    try:
        yield
    finally:
        for group, lr in zip(groups, before, strict=True):
            group["lr"] = lr
