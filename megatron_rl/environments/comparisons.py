"""Preferences as tokens: what a step of learning from them is made of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations
from typing import TYPE_CHECKING

from megatron_rl.environments.preferences import Kind, Preference, Response, Step

if TYPE_CHECKING:
    from megatron_rl.data.sequence import Sequence as Tokens


@dataclass(frozen=True)
class Comparison:
    """Responses to one prompt as sequences, with what was said of them."""

    prompt_id: str
    kind: Kind
    sequences: list[Tokens]
    """One for each response; of a pair the chosen one first."""
    scores: list[float]
    """Of each response, as `Judged` has them."""
    margin: float | None = None
    """By how much the chosen one of a pair is better, where that is known."""
    step_ends: list[list[int]] = field(default_factory=list)
    """Of each response the places of its steps' last tokens, counted from its first token; none where it has no steps."""
    step_labels: list[list[float]] = field(default_factory=list)
    """The score of each of these steps."""

    @classmethod
    def of(
        cls,
        prompt_id: str,
        preference: Preference,
        whole: Callable[[Response], Tokens],
        stepwise: Callable[[tuple[Step, ...]], tuple[Tokens, list[int]]],
    ) -> Comparison:
        """The preference with its tokens. whole: of a response; stepwise: of its steps, with their ends."""
        found = [stepwise(j.steps) if j.steps else (whole(j.response), []) for j in preference.judged]
        return cls(
            prompt_id,
            preference.kind,
            sequences=[tokens for tokens, _ in found],
            scores=[j.score for j in preference.judged],
            margin=preference.margin,
            step_ends=[ends for _, ends in found],
            step_labels=[[step.score for step in j.steps or ()] for j in preference.judged],
        )

    def problem(self, context_length: int) -> str:
        """Why it cannot be learned from, or ''."""
        longest = max(self.sequences, key=lambda one: len(one.tokens))
        if len(longest.tokens) > context_length:
            return (
                f"its longest sequence has {len(longest.tokens)} tokens, the prompt's {longest.prompt_length} included, which"
                f" exceed rollout.context_length {context_length}"
            )
        if not all(one.response_length for one in self.sequences):
            return "the tokenizer has no token for a response"
        for ends in self.step_ends:
            if any(end <= before for before, end in zip([-1, *ends], ends, strict=False)):
                return "the tokenizer has no token for a step"
        # Different texts may have the same tokens: a tokenizer normalizes, and lacks signs.
        texts = [one.tokens.tobytes() for one in self.sequences]
        for (i, one), (j, other) in combinations(enumerate(texts), 2):
            if one == other and self.scores[i] != self.scores[j]:
                return f"its responses {i + 1} and {j + 1} have the same tokens, but one is better than the other"
        return ""
