"""The first groups of a step whose responses have all come; what is still being sampled then is aborted.

Over-sampling as verl (over_sample_rate), SkyRL and slime do it, and as the runs of "Pr2: Predictive Routing Replay" (appendix
E.1) have it: a step asks for (1 + rate) times its prompts, and does not wait for the last ones. What is learned from is
shorter by that than what the policy says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_rl.data.trajectory import Trajectory
from megatron_rl.metrics.reduce import Metrics, mean


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
