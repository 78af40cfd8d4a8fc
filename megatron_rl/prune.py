"""`megatron-rl prune`: make a smaller or sparser model, guided by the importance of the model's parts on calibration data."""

from __future__ import annotations

import json
import random
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from megatron_rl.checks.prune_command import sizes_of
from megatron_rl.compression.calibration import measure
from megatron_rl.compression.importance import largest
from megatron_rl.compression.sparsity import sparsify
from megatron_rl.compression.structured_pruning import REPORT, Sizes, choose, remove_parts
from megatron_rl.config import Config
from megatron_rl.data.balance import plan_updates
from megatron_rl.likelihood import likelihood
from megatron_rl.models.hf_folder import read_weights
from megatron_rl.models.parallel_check import read_hf_config
from megatron_rl.models.shape import Shape, count, whole_model
from megatron_rl.run.run import Run

PARTS = ("attention", "mlp", "router", "experts", "norm", "embedding", "head")


def prune(config: Config) -> None:
    """Measure the importance of the parts named in config.prune, and remove the least important. Writes `hf/` and a report."""
    with Run(config, kind="prune") as run:
        rng = random.Random(f"{config.seed}/prune")
        samples = run.stream.next_demonstrations(config.prune.calibration_samples, rng)
        [shares] = plan_updates([s.inputs for s in samples], updates=1, ranks=run.ranks.data_size)
        mine = [samples[i] for i in shares[run.ranks.data_rank]]
        source, out = Path(config.model.path), run.folder / "hf"
        shape, sizes = Shape.from_config(run.hf_config), sizes_of(config.prune)

        trainer = run.scorer(str(source), plain=True)
        loss = {"before": likelihood(run, trainer, samples)["eval/loss"]}
        report: dict[str, Any] = {"model": str(source)}
        if sizes != Sizes():
            importance = measure(trainer, trainer.pack(mine), shape, config.prune)
            del trainer  # so that only one model is in memory
            kept = choose(importance, sizes, shape, largest)
            if "sent" in importance and (unknown := int((importance["sent"][list(shape.moe_layers)] == 0).sum())):
                run.logger.say(
                    f"{unknown} of {shape.experts * len(shape.moe_layers)} experts get no token of the calibration"
                    " data, so their importance is unknown; raise prune.calibration_samples"
                )
            report["kept"] = {name: value for name, value in asdict(kept).items() if value}
            report["importance"] = {
                n: importance[n].tolist() for n in ("layers", "heads", "experts") if n in importance
            }
            run.ranks.main_does(partial(remove_parts, source, out, kept, sizes))
            trainer = run.scorer(str(out), plain=True)
        if config.prune.sparsity != "none":
            smaller = Shape.from_config(trainer.model.hf_config)
            sparsify(trainer, trainer.pack(mine), smaller, config.prune)
            trainer.save_hf(out)
            report["sparsity"] = config.prune.sparsity
        loss["after"] = likelihood(run, trainer, samples)["eval/loss"]

        if run.ranks.rank == 0:
            summary: dict[str, Any] = {"parameters": {"before": parameters(source), "after": parameters(out)}}
            if config.prune.sparsity != "none":
                summary["zeros"] = {"before": zeros(source), "after": zeros(out)}
            summary["loss"] = loss
            (out / REPORT).write_text(json.dumps(report | summary) + "\n")
            (run.folder / REPORT).write_text(json.dumps(summary, indent=2) + "\n")
            Console().print(table(summary))
            run.logger.say(f"wrote {out}")


def parameters(folder: Path) -> dict[str, int]:
    """Return the number of a model's parameters as {kind of parameter: number}."""
    weights = whole_model(Shape.from_config(read_hf_config(folder)))
    return {part: n for part in PARTS if (n := count(weights, part))} | {"total": count(weights)}


def zeros(folder: Path) -> int:
    """Return the number of zero weights in a model folder."""
    return sum(int((tensor == 0).sum()) for _, tensor in read_weights(folder))


def table(summary: dict[str, Any]) -> Table:
    """Return a table that shows parameters by kind and the loss on calibration data, before and after pruning."""
    found = Table("", "before", "after", "share")
    before, after = (summary["parameters"][when] for when in ("before", "after"))
    for part, n in before.items():
        found.add_row(part, f"{n:,}", f"{after.get(part, 0):,}", f"{after.get(part, 0) / n:.1%}")
    if "zeros" in summary:
        of = {when: f"{n:,} ({n / summary['parameters'][when]['total']:.1%})" for when, n in summary["zeros"].items()}
        found.add_row("zeros", of["before"], of["after"], "")
    found.add_row("loss", *(f"{summary['loss'][when]:.4f}" for when in ("before", "after")), "")
    return found
