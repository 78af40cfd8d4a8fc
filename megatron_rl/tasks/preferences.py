"""Preferences over responses to one prompt: which response is better, how good each one is, or which of its steps are right."""

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
"""pair: a chosen and a rejected response. list: several responses with scores, or in an order. steps: one response whose steps
have scores. point: one response with a score. label: one response that is right or wrong."""
Response = str | list[dict[str, Any]]
"""A text, or the messages of a conversation (roles assistant and tool)."""


@dataclass(frozen=True)
class Step:
    """One step of a response and its score."""

    text: str
    """Text of the step as the model writes it, including the separator at its end."""
    score: float


@dataclass(frozen=True)
class Judged:
    """A response to a prompt and its score."""

    response: Response
    score: float
    """Score; higher is better. pair: 1 (chosen) and 0 (rejected). list in an order: -1 for the first response, -2 for the
    second, and so on. label: 1 or 0. steps: the lowest score of a step."""
    steps: tuple[Step, ...] | None = None
    """The steps that make up the response, if each step has a score."""


@dataclass(frozen=True)
class Preference:
    """Responses to one prompt with scores to compare, or a single response with a score."""

    kind: Kind
    judged: tuple[Judged, ...]
    """The responses with their scores; the chosen response of a pair comes first."""
    margin: float | None = None
    """Margin by which the chosen response of a pair is better, if the data has it."""

    def __post_init__(self) -> None:
        """Validate the preference, because a task may build its own. Errors: UserError if it does not fit its kind."""
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
            problem = "has a score or a margin that is not a finite number"
        elif (self.margin or 0.0) < 0:
            problem = "has a margin below 0"
        elif self.kind == "pair" and scores[0] <= scores[1]:
            problem = "has a chosen response (the first) whose score is not higher"
        elif self.kind == "list" and len(set(scores)) == 1:
            problem = "has only equal scores"
        elif self.kind == "steps" and not self.judged[0].steps:
            problem = "has no steps"
        if problem:
            raise UserError(f"data.task: a preference of kind '{self.kind}' {problem}")


# -- comparisons ---------------------------------------------------------------------------------------------------------
# Preferences as token sequences, of which a training step takes a batch.


@dataclass(frozen=True)
class Comparison:
    """Responses to one prompt as token sequences, with their scores: a `Preference` after tokenization."""

    prompt_id: str
    kind: Kind
    sequences: list[Tokens]
    """One sequence for each response; the chosen response of a pair comes first."""
    scores: list[float]
    """Score of each response, as in `Judged`."""
    margin: float | None = None
    """Margin by which the chosen response of a pair is better, if the data has it."""
    step_ends: list[list[int]] = field(default_factory=list)
    """For each response, the positions of the last token of each step, counted from the response's first token; empty without
    steps."""
    step_labels: list[list[float]] = field(default_factory=list)
    """For each response, the scores of its steps."""

    @classmethod
    def of(
        cls,
        prompt_id: str,
        preference: Preference,
        whole: Callable[[Response], Tokens],
        stepwise: Callable[[tuple[Step, ...]], tuple[Tokens, list[int]]],
    ) -> Comparison:
        """Tokenize a preference. whole: encodes a response.

        stepwise: encodes steps and returns the positions where they end.
        """
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
        """Return the reason why the trainer cannot use the comparison, or ''."""
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
        # Different texts can have equal tokens, because a tokenizer normalizes text and lacks characters.
        texts = [one.tokens.tobytes() for one in self.sequences]
        for (i, one), (j, other) in combinations(enumerate(texts), 2):
            if one == other and self.scores[i] != self.scores[j]:
                return f"its responses {i + 1} and {j + 1} have the same tokens, but one is better than the other"
        return ""


# -- steps ---------------------------------------------------------------------------------------------------------------
# Steps of a response: how its text is split into steps, and the last token of each step.


def steps_of(text: str, separator: str, *, ended: bool = True) -> list[str]:
    """Split a response into steps, each including the separator at its end, as in training data (`data.steps_key`).

    A step is the text up to a separator. Blank text belongs to the step before it, or to the first step.

    ended: True if the policy ended the response itself. In this case, the text after the last separator is a step too, and gets
    a separator. A response without a separator is one step. If `ended` is False, the text after the last separator is an
    incomplete step and is dropped.
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
    """Return the tokens of a response that consists of steps, and the position of the last token of each step.

    Each step is encoded separately, because a token of the whole text might span two steps.
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
    """Return the positions, among the sampled tokens of a response, at which its steps (`steps_of`) end.

    If the policy ended the response itself, the last step ends with the response's last token, the end token.
    """
    open_end = steps[:-1] if ended else steps
    if open_end:
        found = _places(tokenizer, tokens, [*accumulate(map(len, open_end))], "".join(steps)[-1])
    else:
        found = []
    return [*found, len(tokens) - 1] if ended else found


def _places(tokenizer: PreTrainedTokenizerBase, tokens: Sequence[int], ends: Sequence[int], sign: str) -> list[int]:
    """Return, for each n in `ends`, the position of the token that completes the first n characters of the text.

    sign: last character of each step.
    """

    def text(some: Sequence[int]) -> str:
        return str(tokenizer.decode(list(some), skip_special_tokens=True))

    whole = text(tokens)
    signs = {token: text([token]).count(sign) for token in set(tokens)}
    seen = np.cumsum([signs[token] for token in tokens])
    if seen[-1] == whole.count(sign):
        return np.searchsorted(seen, [whole[:end].count(sign) for end in ends]).tolist()
    # The sign consists of several tokens, or a token does not show it when decoded alone.
    return [
        min(len(tokens) - 1, bisect_left(range(len(tokens)), end, key=lambda i: len(text(tokens[: i + 1]))))
        for end in ends
    ]
