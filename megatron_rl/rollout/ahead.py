"""The batches of the steps to come, which the servers sample while the trainer learns."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.data.trajectory import Trajectory
from megatron_rl.environments import Prompt
from megatron_rl.launch.run import Run
from megatron_rl.rollout.engine import Asked, Engine


@dataclass
class _Batch:
    step: int
    position: dict[str, Any]
    """Of the data stream before its prompts."""
    asked: Asked | None


class Rollouts:
    """Batches in the order of their steps, asked for at most rollout.max_staleness steps before they are learned.

    Every process has one and calls it. A checkpoint has the data stream as it was before the first batch that has not been
    learned, so that a run that goes on asks for the same prompts again.
    """

    def __init__(self, run: Run, engine: Engine) -> None:
        self._run, self._engine = run, engine
        self._batches: deque[_Batch] = deque()
        run.position = self._position

    def next(self) -> tuple[Sequence[Prompt], list[Trajectory]]:
        """Prompts and trajectories of the run's step; those of steps behind it begin before they are waited for.

        Errors: as of `Engine.finish`.
        """
        run, config = self._run, self._run.config
        run.begin_step()
        while self._batches and self._batches[0].step < run.step:
            self._batches.popleft()
        first = self._batches[-1].step + 1 if self._batches else run.step
        for step in range(first, min(run.step + config.rollout.max_staleness + 1, config.steps)):
            position = run.stream.state_dict()
            prompts = run.stream.next(config.batch.prompts_per_step)
            self._batches.append(_Batch(step, position, self._engine.begin(prompts, step)))
        batch = self._batches[0]
        assert batch.asked is not None
        asked, batch.asked = batch.asked, None  # its answers are the trainer's alone
        return asked.prompts, self._engine.finish(asked)

    def _position(self) -> dict[str, Any]:
        waiting = [batch.position for batch in self._batches if batch.step >= self._run.step]
        return waiting[0] if waiting else self._run.stream.state_dict()
