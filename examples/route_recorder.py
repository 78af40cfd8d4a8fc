"""A custom hook that stores what routers see, for route_shadow.py: `hooks: [examples/route_recorder.py:RouteRecorder]`.

For each rollout batch, RUN/routes/batch_BBB/ has `routers.pt`, the routers' weights before its first update, and
`update_UU.pt` for each update. An update's file has its learning rate (0 if the update was skipped) and, for the
cached tokens, the router inputs and logits when routes were recorded, and the current logits. This takes (2 d + 8 E)
x L bytes per cached token (`routing.cached_tokens` of each response), and 4 E d L bytes per rollout batch for the
routers' weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megatron_rl.config import Config
from megatron_rl.data.packing import Batch
from megatron_rl.errors import UserError
from megatron_rl.models.router import routers
from megatron_rl.routing.passes import RouteObserver, Router
from megatron_rl.routing.table import RouteTable
from megatron_rl.trainer.hooks import Stage, Step, UpdateContext, UpdateHook

if TYPE_CHECKING:
    from megatron_rl.trainer.trainer import Trainer


@dataclass(frozen=True)
class Seen:
    """Data that one router saw for C tokens."""

    hidden: Tensor
    """[C, d] fp16: its input when routes were recorded."""
    recorded: Tensor
    """[C, E] fp32 logits at that time."""
    current: Tensor
    """[C, E] fp32 logits in the update."""

    @classmethod
    def joined(cls, parts: Sequence[Seen]) -> Seen:
        """Return the concatenated data of several micro-batches."""
        return cls(*(torch.cat([getattr(p, name) for p in parts]) for name in ("hidden", "recorded", "current")))


@dataclass
class _Kept:
    """Data that a recording pass keeps for the update, and the update for the hook, by layer."""

    hidden: dict[int, Tensor] = field(default_factory=dict)
    seen: dict[int, Seen] = field(default_factory=dict)


class _Watch(RouteObserver):
    def __init__(self, table: RouteTable, stage: Stage) -> None:
        self.table, self.stage, self.kept = table, stage, table.left(_Kept)

    def see_logits(self, layer: int, hidden: Tensor, logits: Tensor, router: Router) -> Tensor:
        rows = self.table.cached
        if self.stage == "log_probs":
            self.kept.hidden[layer] = hidden[rows].half().cpu()
        elif layer not in self.kept.seen:
            recorded = self.table.features[layer].logits
            now = logits.detach()[rows]
            self.kept.seen[layer] = Seen(self.kept.hidden.pop(layer), recorded.float().cpu(), now.float().cpu())
        return logits


class RouteRecorder(UpdateHook):
    """Hook that stores what routers see in a run with routing.source r2, on one process."""

    def __init__(self, config: Config) -> None:
        """Check the config. Errors: UserError for another source."""
        if config.routing.source != "r2" or config.batch.updates_per_step < 2:
            raise UserError(
                "config: hooks: RouteRecorder needs routing.source: r2 and batch.updates_per_step of at least 2;"
                " other settings have no recorded routes whose routers move"
            )
        self.folder = config.run_dir / "routes"
        self.number = len(list(self.folder.glob("batch_*"))) - 1
        self.place = UpdateContext()
        self.tables: list[RouteTable] = []

    def attach(self, trainer: Trainer) -> None:
        """Find the routers. Errors: UserError with several processes."""
        if trainer.ranks.world_size > 1:
            raise UserError("config: hooks: RouteRecorder works only with one process; start a single process")
        self.weights = {layer: router.weight for layer, router in routers(trainer.chunks)}

    def before_forward(self, batches: Sequence[Batch], stage: Stage, place: UpdateContext) -> None:
        """Store the routers' weights at the start of a rollout batch."""
        self.place, self.tables = place, [batch.routes for batch in batches if batch.routes]
        if stage == "log_probs" and place.update == 0:
            self.number += 1
            self.batch.mkdir(parents=True)
            weights = {layer: weight.detach().float().cpu().clone() for layer, weight in self.weights.items()}
            torch.save(weights, self.batch / "routers.pt")

    @property
    def batch(self) -> Path:
        """Folder of the rollout batch."""
        return self.folder / f"batch_{self.number:03}"

    def observers(self, table: RouteTable, stage: Stage, place: UpdateContext) -> list[RouteObserver]:
        """Return observers of the routers, which run after the trainer's own recording."""
        return [_Watch(table, stage)]

    def after_step(self, step: Step) -> None:
        """Write what the routers saw in the update."""
        parts = [table.left(_Kept).seen for table in self.tables]
        layers = {layer: vars(Seen.joined([part[layer] for part in parts])) for layer in self.weights}
        lr = step.lr if step.done else 0.0
        torch.save({"lr": lr, "layers": layers}, self.batch / f"update_{self.place.update:02}.pt")
        self.tables = []
