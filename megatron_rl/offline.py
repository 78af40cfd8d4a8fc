"""Training loop of the methods that learn from data alone: update, evaluate, log, save. The method supplies the update."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_rl.data.sequence import Sequence as Tokens
from megatron_rl.errors import UserError
from megatron_rl.metrics.reduce import Metrics
from megatron_rl.report.step import log_line
from megatron_rl.run.run import Run
from megatron_rl.trainer.trainer import Update

SEVERAL = {"pair": "pairs", "list": "lists", "label": "labels", "point": "scores", "steps": "steps"}
"""Names of the kinds of preferences in messages (plural)."""


@dataclass(frozen=True)
class StepResult:
    """Result of one training step."""

    update: Update
    trained: Sequence[Tokens]
    """Sequences on which this data-parallel rank trained."""
    measured: Metrics = field(default_factory=dict)
    """Metrics that this process measured in addition to those of the update."""


def train_offline(run: Run, learn: Callable[[], StepResult], evaluate: Callable[[], dict[str, float]]) -> None:
    """Run config.steps updates by calling `learn`, with evaluations and checkpoints. Writes a Hugging Face folder `hf/`.

    learn: makes one update. evaluate: returns scores on held-out data, including eval/loss, or an empty dict without held-out
    data. All calls are collective.
    """

    def look() -> None:
        if scores := evaluate():
            run.record_score(-scores["eval/loss"])  # the best checkpoint has the lowest loss
            run.logger.log_eval(run.step, scores)

    if run.step == 0:
        look()
    clock = run.clock()
    while run.step < run.config.steps and not run.stop_requested():
        with clock("train"):
            learned = learn()
        run.end_step()
        with clock("eval"):
            if run.due(run.config.eval.every):
                look()
        log_line(run, learned.measured, [learned.update], learned.trained, clock.times())
        clock = run.clock()  # log a step before its checkpoint, whose time counts to the next step
        with clock("checkpoint"):
            run.checkpoint()
    run.save_hf()


def check_kind(run: Run, takes: Mapping[str, tuple[str, ...]], key: str, loss: str) -> str:
    """Return the kind of the data's preferences, and check that the loss can learn from it.

    takes: {loss: kinds that it can learn from}. key: config key that names the loss. Errors: UserError if the loss cannot learn
    from the kind.
    """
    kind = run.task.comparison(run.stream.prompts[0], random.Random(0)).kind
    if kind not in takes[loss]:
        others = [other for other, kinds in takes.items() if kind in kinds]
        *first, last = (SEVERAL[wanted] for wanted in takes[loss])
        wanted = f"{', '.join(first)} or {last}" if first else last
        remedy = f"set {key}: {others[0]}" if others else f"give {wanted}"
        raise UserError(f"config: {key} = {loss} learns from {wanted}, but the data has {SEVERAL[kind]}: {remedy}")
    return kind
