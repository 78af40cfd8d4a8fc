"""Buffer of batches for coming steps: the servers sample them while the trainer updates the model."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_rl.data.trajectory import Trajectory
from megatron_rl.metrics.lengths import quantiles
from megatron_rl.metrics.reduce import Metrics, maximum, mean
from megatron_rl.rollout.dynamic_sampling import Groups, prompts_to_ask
from megatron_rl.rollout.engine import Engine, PendingRollout
from megatron_rl.rollout.run_context import RunContext
from megatron_rl.tasks import Prompt


@dataclass
class _Batch:
    step: int
    count: int
    position: dict[str, Any]
    """State of the data stream before the batch's prompts were drawn; saved in checkpoints."""
    prompts: Sequence[Prompt]
    asked: PendingRollout | None = None


class RolloutBuffer:
    """Batches in the order of their training steps. A batch is requested at most rollout.max_staleness steps ahead.

    Every process has a buffer and calls its methods. A checkpoint stores the data-stream positions of the batches that were
    requested but not trained on, and the position after these batches. A resumed run therefore requests the same prompts again.
    """

    def __init__(
        self, run: RunContext, engine: Engine, verify: Callable[[list[Trajectory], Sequence[Prompt]], None]
    ) -> None:
        """verify: runs the verifiers before `next` returns, if dynamic sampling or rollout.record needs rewards."""
        self._run, self._engine, self._verify = run, engine, verify
        self._settings = run.config.rollout.dynamic_sampling
        self._batches: deque[_Batch] = deque()
        self._groups: Groups | None = None
        """Groups of the last step, if dynamic sampling filters them."""
        self._before_rounds: tuple[int, dict[str, Any]] | None = None
        """Step, and the state of the data stream before further rounds of this step drew replacement prompts."""

    def next(self) -> tuple[Sequence[Prompt], list[Trajectory]]:
        """Send the requests for later steps, then wait for the current step and return its prompts and trajectories.

        Errors: the same as `Engine.finish`.
        """
        run, config = self._run, self._run.config
        run.begin_step()
        while self._batches and self._batches[0].step < run.step:
            self._batches.popleft()
        last = min(run.step + config.rollout.max_staleness, config.steps - 1)
        for step in range(self._batches[-1].step + 1 if self._batches else run.step, last + 1):
            self._batches.append(self._draw(step, self._count))
        for batch in self._batches:
            if batch.asked is None and batch.step <= last:
                batch.asked = self._engine.begin(batch.prompts, batch.step, wanted=self._wanted)
        self._before_rounds = run.step, run.stream.state_dict()
        batch = self._batches[0]
        assert batch.asked is not None
        asked, batch.asked = batch.asked, None  # only the trainer uses its answers from now on
        prompts, trajectories = self._finish(asked)
        if self._settings.max_rounds and not config.rollout.load:
            prompts, trajectories = self._with_spread(prompts, trajectories, run.step)
        self._engine.record(trajectories, run.step)
        return prompts, trajectories

    def _with_spread(
        self, prompts: Sequence[Prompt], trajectories: list[Trajectory], step: int
    ) -> tuple[Sequence[Prompt], list[Trajectory]]:
        """Replace groups whose rewards are all equal by groups of further prompts, round by round (DAPO)."""
        run, settings = self._run, self._settings
        self._groups = groups = Groups(run.config.batch.prompts_per_step)
        while True:
            judged = [(t.group_id, t.reward) for t in trajectories if not t.masked and not t.part]
            groups.add(prompts, trajectories, run.gather_from_leaders(judged))
            if not groups.missing or groups.rounds == settings.max_rounds:
                return groups.chosen()
            wanted = prompts_to_ask(groups.missing, settings.over_sampling)
            asked = self._engine.begin(run.stream.next(self._asked(wanted)), step, round=groups.rounds, wanted=wanted)
            prompts, trajectories = self._finish(asked)

    def _finish(self, asked: PendingRollout) -> tuple[Sequence[Prompt], list[Trajectory]]:
        trajectories = self._engine.finish(asked)
        if self._settings.max_rounds or self._run.config.rollout.record:
            self._verify(trajectories, asked.prompts)
        return asked.prompts, trajectories

    def _asked(self, wanted: int) -> int:
        return prompts_to_ask(wanted, 1.0 + self._run.config.rollout.over_sample_rate)

    @property
    def _wanted(self) -> int:
        wanted, settings = self._run.config.batch.prompts_per_step, self._settings
        return prompts_to_ask(wanted, settings.over_sampling) if settings.max_rounds else wanted

    @property
    def _count(self) -> int:
        return self._asked(self._wanted)

    def _draw(self, step: int, count: int) -> _Batch:
        return _Batch(step, count, self._run.stream.state_dict(), self._run.stream.next(count))

    def state_dict(self) -> dict[str, Any]:
        """Return data-stream positions of the batches requested but not trained on, and the position after them."""
        run, stream = self._run, self._run.stream.state_dict()
        waiting = [batch for batch in self._batches if batch.step >= run.step]
        if self._before_rounds is not None and self._before_rounds[0] == run.step:  # the step starts again
            stream = self._before_rounds[1]
        return {
            "stream": stream,
            "ahead": [{"step": b.step, "count": b.count, "position": b.position} for b in waiting],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Draw again the batches that an earlier process had requested. The run's data stream must be restored first."""
        run, places = self._run, state.get("ahead", [])
        if not places:
            return
        latest = run.stream.state_dict()
        run.stream.load_state_dict(places[0]["position"])
        if any(place["count"] != self._count for place in places):
            return  # the config has changed: the same prompts come in batches of the new size
        for place in places:
            run.stream.load_state_dict(place["position"])
            self._batches.append(self._draw(place["step"], place["count"]))
        run.stream.load_state_dict(latest)

    def metrics(self) -> Metrics:
        """Return dynamic-sampling metrics of the last step: rounds, groups without spread, missing groups, response lengths."""
        if self._groups is None:
            return {}
        generated = self._groups.generated
        return {
            "rollout/rounds": maximum(self._groups.rounds),
            "rollout/without_spread": maximum(self._groups.share_without_spread),
            "rollout/missing": maximum(self._groups.missing),
            "generated/length": mean(sum(t.response_length for t in generated), len(generated)),
            "generated/length_quantile": quantiles([t.response_length for t in generated]),
        }
