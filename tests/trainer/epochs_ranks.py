"""The ranks of test_epochs.py: steps of several epochs, and the same updates by hand."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from layouts import make_config, make_samples, make_trainer
from ranks import end_layout

from megatron_rl.data.packing import Batch
from megatron_rl.hooks.guards import OLD_KL
from megatron_rl.metrics.reduce import figures
from megatron_rl.trainer.hooks import UpdateContext, updates_of
from megatron_rl.trainer.objective import Policy
from megatron_rl.trainer.trainer import Trainer, Update

PARTS, EPOCHS = 2, 2


def run_layouts(model: str, seed: int, layouts: list[dict]) -> list[dict]:
    """One layout after the other on the same processes."""
    return [run_layout(model, seed, layout, every_limit=layout is layouts[0]) for layout in layouts]


def run_layout(model: str, seed: int, layout: dict, *, every_limit: bool) -> dict:
    """{way: [(fingerprints after it, KL from the old policy, updates left out) of each update]}."""
    whole = ended(epochs(model, seed, layout))
    found = {"epochs": whole}
    for way, scored_once in (("by hand", True), ("scored again", False)):
        found[way] = ended(by_hand(model, seed, layout, scored_once=scored_once))
    return found | {limit: ended(epochs(model, seed, layout, limit)) for limit in limits(whole, every=every_limit)}


def limits(updates: list[tuple], *, every: bool) -> list[float]:
    """Below the KLs that updates find and above; every: also between them."""
    found = sorted(kl for _, kl, _ in updates[1:])
    between = [(a + b) / 2 for a, b in pairwise(found)] if every else []
    return [found[0] / 2, *between, 2 * found[-1]]


def ended(updates: list[tuple]) -> list[tuple]:
    """The updates, behind which the next layout may begin."""
    end_layout()
    return updates


def start(model: str, seed: int, layout: dict, limit: float | None = None) -> tuple[Trainer, list]:
    """A trainer that is new, and this rank's samples of each part."""
    sections = {
        "batch": {"updates_per_step": PARTS, "epochs": EPOCHS, "tokens_per_micro_batch": 96},
        "algorithm": {"clip_high": 0.28, "target_kl": limit},
        "routing": {"source": "r2"},
        "optimizer": {"lr": 3e-3},
    }
    trainer = make_trainer(make_config(model, sections | layout))
    ranks, samples = trainer.ranks, make_samples(seed, 12, 64)
    return trainer, [samples[part::PARTS][ranks.data_rank :: ranks.data_size] for part in range(PARTS)]


def packed(trainer: Trainer, parts: list) -> list[list[Batch]]:
    """The micro-batches of all parts, with the log-probs and the routes of the weights as they are."""
    rollout = [trainer.pack(samples) for samples in parts]
    for index, batches in enumerate(rollout):
        trainer.compute_fields(batches, Policy(trainer.config).needs, UpdateContext(index, rollout))
    return rollout


def seen(trainer: Trainer, update: Update) -> tuple:
    found = figures(update.metrics)
    return trainer.fingerprints(), found[OLD_KL], found.get("update/left_out", 0.0)


def epochs(model: str, seed: int, layout: dict, limit: float | None = None) -> list[tuple]:
    """As `train` does a step."""
    trainer, parts = start(model, seed, layout, limit)
    rollout, found = packed(trainer, parts), []
    for part, place in updates_of(rollout, EPOCHS):
        update = trainer.update(rollout[part], Policy(trainer.config), place)
        found.append(seen(trainer, update))
        if update.ends_batch:
            break
    return found


def by_hand(model: str, seed: int, layout: dict, *, scored_once: bool) -> list[tuple]:
    """Two steps of one epoch each on batches that no update has seen; scored_once: both by the first weights."""
    trainer, parts = start(model, seed, layout)
    one_epoch = replace(trainer.config, batch=replace(trainer.config.batch, epochs=1))
    first, second, found = packed(trainer, parts), packed(trainer, parts), []
    for epoch, rollout in enumerate((first, second)):
        if epoch and not scored_once:
            rollout = packed(trainer, parts)
        for index, batches in enumerate(rollout):
            found.append(seen(trainer, trainer.update(batches, Policy(one_epoch), UpdateContext(index, rollout))))
    return found
