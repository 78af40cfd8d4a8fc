"""Dynamic sampling: groups without reward spread (all rewards are equal) are replaced by groups of further prompts.

Yu et al., "DAPO: An Open-Source LLM Reinforcement Learning System at Scale" (2025), section 3.2, "Dynamic Sampling": if all
responses of a group have the same reward, their advantages are 0. Such a group is replaced by a group with spread.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_rl.data.trajectory import Trajectory
    from megatron_rl.tasks import Prompt


def with_spread(rewards: Iterable[tuple[int, float]]) -> set[int]:
    """Return the groups whose rewards are not all equal. rewards: (group, reward) of each response."""
    seen: dict[int, float] = {}
    return {group for group, reward in rewards if seen.setdefault(group, reward) != reward}


def prompts_to_ask(missing: int, over_sampling: float) -> int:
    """Return the number of prompts that a round requests if `missing` groups are missing. over_sampling: at least 1."""
    return math.ceil(missing * over_sampling - 1e-9)  # 1.1 * 10 is above 11 in floating point


@dataclass
class Groups:
    """Groups of a step, collected round by round. Every process stores all prompts, but only its own trajectories."""

    wanted: int
    """Number of groups that the step trains on."""
    rounds: int = 0
    _prompts: list[Prompt] = field(default_factory=list)
    _trajectories: list[Trajectory] = field(default_factory=list)
    _useful: list[int] = field(default_factory=list)

    @property
    def missing(self) -> int:
        """Number of groups with reward spread (unequal rewards) that the step still needs."""
        return max(0, self.wanted - len(self._useful))

    @property
    def generated(self) -> list[Trajectory]:
        """This process's trajectories of all rounds."""
        return self._trajectories

    @property
    def share_without_spread(self) -> float:
        """Share of the requested groups that have no reward spread."""
        return 1 - len(self._useful) / len(self._prompts)

    def add(
        self, prompts: Sequence[Prompt], trajectories: Sequence[Trajectory], rewards: Iterable[tuple[int, float]]
    ) -> None:
        """Add the answers of a round. trajectories: this process's. rewards: (group, reward) of all processes' responses."""
        first = len(self._prompts)
        for trajectory in trajectories:
            trajectory.group_id += first
        self._prompts += prompts
        self._trajectories += trajectories
        self._useful += sorted(first + group for group in with_spread(rewards))
        self.rounds += 1

    def chosen(self) -> tuple[list[Prompt], list[Trajectory]]:
        """Return the first `wanted` groups with spread. If there are too few, the first groups without spread fill the step.

        The step therefore always has its full size. The groups without spread have advantages of 0.
        """
        useful = set(self._useful)
        others = [group for group in range(len(self._prompts)) if group not in useful]
        groups = sorted([*self._useful, *others][: self.wanted])
        place = {group: number for number, group in enumerate(groups)}
        trajectories = [t for t in self._trajectories if t.group_id in place]
        for trajectory in trajectories:
            trajectory.group_id = place[trajectory.group_id]
        return [self._prompts[group] for group in groups], trajectories
