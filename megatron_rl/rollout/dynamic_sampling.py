"""Groups of responses that teach something: further prompts are asked for in the place of those without spread.

Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (2025), section 3.2, "Dynamic Sampling": a group
whose responses all have the same reward has advantages of 0, and takes the place of one that teaches.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from megatron_rl.data.trajectory import Trajectory
from megatron_rl.metrics.reduce import Metrics, mean

if TYPE_CHECKING:
    from megatron_rl.data.trajectory import Trajectory
    from megatron_rl.tasks import Prompt


def with_spread(rewards: Iterable[tuple[int, float]]) -> set[int]:
    """Groups in which not all rewards are equal. rewards: (group, reward) of each response."""
    seen: dict[int, float] = {}
    return {group for group, reward in rewards if seen.setdefault(group, reward) != reward}


def prompts_to_ask(missing: int, over_sampling: float) -> int:
    """How many prompts a round asks for, where so many groups are missing. over_sampling: at least 1."""
    return math.ceil(missing * over_sampling - 1e-9)  # 1.1 * 10 is above 11


@dataclass
class Groups:
    """The groups of a step, round by round. Every process has the same, and the trajectories of its own."""

    wanted: int
    """Groups that the step learns from."""
    rounds: int = 0
    _prompts: list[Prompt] = field(default_factory=list)
    _trajectories: list[Trajectory] = field(default_factory=list)
    _useful: list[int] = field(default_factory=list)

    @property
    def missing(self) -> int:
        """Groups with spread that are still wanted."""
        return max(0, self.wanted - len(self._useful))

    @property
    def generated(self) -> list[Trajectory]:
        """This process's trajectories of all rounds."""
        return self._trajectories

    @property
    def share_without_spread(self) -> float:
        """Of all groups that were asked for."""
        return 1 - len(self._useful) / len(self._prompts)

    def add(
        self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], rewards: Iterable[tuple[int, float]]
    ) -> None:
        """Take the answers of a round. trajectories: this process's; rewards: (group, reward) of all processes' responses."""
        first = len(self._prompts)
        for trajectory in trajectories:
            trajectory.group_id += first
        self._prompts += prompts
        self._trajectories += trajectories
        self._useful += sorted(first + group for group in with_spread(rewards))
        self.rounds += 1

    def chosen(self) -> tuple[list[Prompt], list[Trajectory]]:
        """The first `wanted` groups with spread; where there are fewer, the first ones without take the places that are left.

        A step so has its size whatever was found; the latter have advantages of 0.
        """
        useful = set(self._useful)
        others = [group for group in range(len(self._prompts)) if group not in useful]
        groups = sorted([*self._useful, *others][: self.wanted])
        place = {group: number for number, group in enumerate(groups)}
        trajectories = [t for t in self._trajectories if t.group_id in place]
        for trajectory in trajectories:
            trajectory.group_id = place[trajectory.group_id]
        return [self._prompts[group] for group in groups], trajectories


# -- over sampling -------------------------------------------------------------------------------------------------------
# The first groups of a step whose responses have all come; what is still being sampled then is aborted.
# Over-sampling as verl (over_sample_rate), SkyRL and slime do it, and as the runs of "Pr2: Predictive Routing Replay" (appendix
# E.1) have it: a step asks for (1 + rate) times its prompts, and does not wait for the last ones. What is learned from is
# shorter
# by that than what the policy says.


@dataclass
class FirstGroups:
    """Which groups of a round are taken. Every process has the same."""

    wanted: int
    samples: int
    """Responses of a group."""
    _complete: list[int] = field(default_factory=list)
    """In the order in which they were seen to be, those seen at once by their place."""

    def add(self, finished: Iterable[int]) -> bool:
        """Look at all requests that have been answered, of all processes. Returns whether enough groups are complete."""
        answered = Counter(request // self.samples for request in finished)
        complete = {group for group, count in answered.items() if count == self.samples}
        self._complete += sorted(complete - {*self._complete})
        return self.enough

    @property
    def enough(self) -> bool:
        """True once as many groups as are wanted are complete."""
        return len(self._complete) >= self.wanted

    @property
    def taken(self) -> list[int]:
        """The first of them, by their place."""
        return sorted(self._complete[: self.wanted])


@dataclass
class LeftOut:
    """Responses of a step that were asked for and are not learned from; of this process."""

    asked: int = 0
    dropped: int = 0
    """Whole ones whose group was not among the first."""
    lengths: list[int] = field(default_factory=list)
    """Tokens that the aborted ones had."""

    def add(self, asked: int, taken: Sequence[Trajectory], aborted: Mapping[int, int]) -> None:
        """Count a round of so many requests. aborted: tokens by request."""
        learned = sum(not t.part for t in taken)
        self.asked += asked
        self.dropped += asked - learned - len(aborted)
        self.lengths += aborted.values()

    def metrics(self) -> Metrics:
        """Shares of the responses that were asked for, and how long the aborted ones were by then."""
        return {
            "rollout/aborted": mean(len(self.lengths), self.asked),
            "rollout/dropped": mean(self.dropped, self.asked),
            "rollout/aborted_length": mean(sum(self.lengths), len(self.lengths)),
        }
