"""Over-sampling: a step trains on its first complete groups and aborts the requests of the others.

verl (over_sample_rate), SkyRL and slime do the same, and so do the runs of "Pr2: Predictive Routing Replay" (appendix E.1). A
step requests (1 + rate) times as many prompts as it needs, and does not wait for the last responses. The responses that the
step trains on are therefore shorter on average than the responses of the policy.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from megatron_rl.data.trajectory import Trajectory
from megatron_rl.metrics.reduce import Metrics, mean


@dataclass
class FirstGroups:
    """Choice of the groups of a round. Every process makes the same choice."""

    wanted: int
    samples: int
    """Number of responses of a group."""
    _complete: list[int] = field(default_factory=list)
    """Complete groups in the order of completion; groups that complete between two calls are in the order of their index."""

    def add(self, finished: Iterable[int]) -> bool:
        """Store which groups are complete; return `enough`. finished: answered requests of all processes."""
        answered = Counter(request // self.samples for request in finished)
        complete = {group for group, count in answered.items() if count == self.samples}
        self._complete += sorted(complete - {*self._complete})
        return self.enough

    @property
    def enough(self) -> bool:
        """True if at least `wanted` groups are complete."""
        return len(self._complete) >= self.wanted

    @property
    def taken(self) -> list[int]:
        """The first `wanted` complete groups, sorted by index."""
        return sorted(self._complete[: self.wanted])


@dataclass
class LeftOut:
    """Counts of this process's responses that a step requested but does not train on."""

    asked: int = 0
    dropped: int = 0
    """Number of complete responses whose group was not among the first `wanted` groups."""
    lengths: list[int] = field(default_factory=list)
    """Tokens of each aborted response at the time of the abort."""

    def add(self, asked: int, taken: Sequence[Trajectory], aborted: Mapping[int, int]) -> None:
        """Add a round's counts. asked: number of requests; taken: trajectories to train on; aborted: tokens by request."""
        learned = sum(not t.part for t in taken)
        self.asked += asked
        self.dropped += asked - learned - len(aborted)
        self.lengths += aborted.values()

    def metrics(self) -> Metrics:
        """Return aborted and dropped shares of the requested responses, and the mean length of the aborted ones."""
        return {
            "rollout/aborted": mean(len(self.lengths), self.asked),
            "rollout/dropped": mean(self.dropped, self.asked),
            "rollout/aborted_length": mean(sum(self.lengths), len(self.lengths)),
        }
