"""Preferences over responses to one prompt: which is better, how good each is, which of its steps are right."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, combinations
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np

from megatron_rl.config.registry import nearest
from megatron_rl.errors import UserError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatron_rl.data.sequence import Sequence as Tokens

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
    """The judged responses; in a pair the chosen one comes first."""
    margin: float | None = None
    """Margin by which the chosen one of a pair is better, where that is known."""

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


# -- comparisons ---------------------------------------------------------------------------------------------------------
# Preferences as tokens: what a step of learning from them is made of.


@dataclass(frozen=True)
class Comparison:
    """Responses to one prompt as sequences, with what was said of them."""

    prompt_id: str
    kind: Kind
    sequences: list[Tokens]
    """One for each response; of a pair the chosen one first."""
    scores: list[float]
    """Score of each response, as in `Judged`."""
    margin: float | None = None
    """Margin by which the chosen one of a pair is better, where that is known."""
    step_ends: list[list[int]] = field(default_factory=list)
    """For each response, the positions of its steps' last tokens, counted from its first token; empty without steps."""
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


# -- steps ---------------------------------------------------------------------------------------------------------------
# Steps of a response: how its text is parted into them, and which of its tokens each of them ends with.


def steps_of(text: str, separator: str, *, ended: bool = True) -> list[str]:
    """The steps of a response, each with the separator behind it, as they are learned from (`data.steps_key`).

    A step is what stands before a separator; blank lines and the like belong to the step before them, or to the first. ended:
    the policy has ended the response itself: what follows the last separator is a step too, with the separator that it lacks,
    and a response without any other is one. Else what follows was cut off, and is none.
    """
    *pieces, rest = text.split(separator)
    if ended and (rest.strip() or not pieces):
        pieces.append(rest)
    steps: list[str] = []
    first = ""
    for piece in pieces:
        if piece.strip():
            steps.append(first + piece + separator)
            first = ""
        elif steps:
            steps[-1] += piece + separator
        else:
            first += piece + separator
    return steps or ([first] if ended else [])


def encode_steps(tokenizer: PreTrainedTokenizerBase, steps: Iterable[str]) -> tuple[list[int], list[int]]:
    """Tokens of a response in steps, and the places of the last token of each.

    Each step is encoded by itself, since a token of the whole text may reach over a border.
    """
    tokens: list[int] = []
    ends = []
    for step in steps:
        tokens += tokenizer.encode(step, add_special_tokens=False)
        ends.append(len(tokens) - 1)
    return tokens, ends


def last_tokens(
    tokenizer: PreTrainedTokenizerBase,
    tokens: Sequence[int],
    steps: Sequence[str],
    *,
    ended: bool = True,
) -> list[int]:
    """Places of the tokens of a response, as the policy sampled them, in which its steps (`steps_of`) end.

    Of a response that has ended by itself the last step ends with its last token, that which says so.
    """
    open_end = steps[:-1] if ended else steps
    if open_end:
        found = _places(tokenizer, tokens, [*accumulate(map(len, open_end))], "".join(steps)[-1])
    else:
        found = []
    return [*found, len(tokens) - 1] if ended else found


def _places(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], ends: Sequence[int], sign: str) -> list[int]:
    """Places of the tokens with which so many characters of their text are there. sign: the last one of each part."""

    def text(some: Sequence[int]) -> str:
        return str(tokenizer.decode(list(some), skip_special_tokens=True))

    whole = text(tokens)
    signs = {token: text([token]).count(sign) for token in set(tokens)}
    seen = np.cumsum([signs[token] for token in tokens])
    if seen[-1] == whole.count(sign):
        return np.searchsorted(seen, [whole[:end].count(sign) for end in ends]).tolist()
    # A sign of several tokens, or one that a token by itself does not show.
    return [
        min(len(tokens) - 1, bisect_left(range(len(tokens)), end, key=lambda i: len(text(tokens[: i + 1]))))
        for end in ends
    ]
