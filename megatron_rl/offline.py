"""The loop of what learns from data alone: update, evaluate, log, save. The algorithm is what an update does."""

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
"""Kinds of preferences, in words."""


@dataclass(frozen=True)
class StepResult:
    """Result of a step."""

    update: Update
    trained: Sequence[Tokens]
    """This data-parallel rank's sequences."""
    measured: Metrics = field(default_factory=dict)
    """Metrics that this process measured beside the update."""


def train_offline(run: Run, learn: Callable[[], StepResult], evaluate: Callable[[], dict[str, float]]) -> None:
    """config.steps calls of `learn`, each an update, with evaluations and checkpoints; ends with a Hugging Face folder `hf/`.

    evaluate: scores on held-out data, eval/loss among them, or nothing where there is none. All are collective.
    """

    def look() -> None:
        if scores := evaluate():
            run.record_score(-scores["eval/loss"])  # the best checkpoint is the one with the lowest
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
        clock = run.clock()  # a step that is logged is not lost in its save, whose time is the next one's
        with clock("checkpoint"):
            run.checkpoint()
    run.save_hf()


def check_kind(run: Run, takes: Mapping[str, tuple[str, ...]], key: str, loss: str) -> str:
    """The kind of the data's preferences. takes: kinds by the value of `key`.

    Errors: UserError where the loss does not learn from them.
    """
    kind = run.task.comparison(run.stream.prompts[0], random.Random(0)).kind
    if kind not in takes[loss]:
        others = [other for other, kinds in takes.items() if kind in kinds]
        *first, last = (SEVERAL[wanted] for wanted in takes[loss])
        wanted = f"{', '.join(first)} or {last}" if first else last
        remedy = f"set {key}: {others[0]}" if others else f"give {wanted}"
        raise UserError(f"config: {key} = {loss} learns from {wanted}, and the data has {SEVERAL[kind]}: {remedy}")
    return kind
