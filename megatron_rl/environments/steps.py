"""Steps of a response: how its text is parted into them, and which of its tokens each of them ends with."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
