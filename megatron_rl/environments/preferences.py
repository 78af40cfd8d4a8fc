"""What is said of responses to one prompt: which is better, how good each is, which of its steps are right."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal, get_args

from megatron_rl.errors import UserError
from megatron_rl.registry import nearest

Kind = Literal["pair", "list", "steps", "point", "label"]
"""pair: chosen and rejected; list: several responses, with scores or in an order; steps: one response whose steps have a score
each; point: one with a score; label: one that is right or wrong."""
Response = str | list[dict[str, Any]]
"""Text, or the messages of a conversation (assistant, tool)."""


@dataclass(frozen=True)
class Step:
    """A part of a response, with what was said of it."""

    text: str
    """As the model writes it, with what separates it from the next."""
    score: float


@dataclass(frozen=True)
class Judged:
    """A response to a prompt, with what was said of it."""

    response: Response
    score: float
    """Higher is better. Of a pair 1 (chosen) and 0 (rejected); of an order minus the place, from -1 on; of a label 1 or 0; of
    steps the lowest of theirs."""
    steps: tuple[Step, ...] | None = None
    """The whole response in steps, where they are judged one by one."""


@dataclass(frozen=True)
class Preference:
    """Responses to one prompt that are compared, or one that is judged by itself."""

    kind: Kind
    judged: tuple[Judged, ...]
    """Of a pair the chosen one first."""
    margin: float | None = None
    """By how much the chosen one of a pair is better, where that is known."""

    def __post_init__(self) -> None:
        """Errors: UserError for what is no preference of its kind, for tasks that make their own."""
        if self.kind not in get_args(Kind):
            raise UserError(
                f"data.task: there is no kind of preference '{self.kind}'{nearest(self.kind, get_args(Kind))}"
            )
        scores = [one.score for one in self.judged]
        fewest, most = {"pair": (2, 2), "list": (2, math.inf)}.get(self.kind, (1, 1))
        problem = ""
        if not fewest <= len(scores) <= most:
            problem = f"has {len(scores)} responses"
        elif not all(map(math.isfinite, [*scores, self.margin or 0.0])):
            problem = "has a score or a margin that is no finite number"
        elif (self.margin or 0.0) < 0:
            problem = "has a margin below 0"
        elif self.kind == "pair" and scores[0] <= scores[1]:
            problem = "has a chosen response (the first) whose score is not the higher one"
        elif self.kind == "list" and len(set(scores)) == 1:
            problem = "has nothing but equal scores"
        elif self.kind == "steps" and not self.judged[0].steps:
            problem = "has no steps"
        if problem:
            raise UserError(f"data.task: a preference of kind '{self.kind}' {problem}")
