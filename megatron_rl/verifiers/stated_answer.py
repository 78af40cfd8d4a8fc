"""Extracts a response's answer: the last box, <answer> or ####, else the last 'answer is ...', else the last line."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from typing import Literal, NamedTuple

MOST_STATEMENTS = 8
"""Largest number of statements that are tried, from the end. The limit keeps the time short for texts with thousands of
statements."""
_HASH = re.compile(r"####[ \t]*(\S[^\n]*)")
_TAG = re.compile(r"<answer>", re.IGNORECASE)
_END_TAG = re.compile(r"</answer>", re.IGNORECASE)
_PHRASE = re.compile(
    r"\b(final\s)?answer\b(?:\s+to\s[^.\n:=]{0,60})?\**+\s*+(?:is|:|=)(?:is\b|[:=])*+\**+\s*+:?\**+\s*+(?=\S)",
    re.IGNORECASE,
)
_BRACE = re.compile(r"\\[{}]|\\(?:boxed|fbox)\s*+\{|[{}]")
_NO_WORDS = re.compile(r"\\(?:text|mbox|textbf)\s*\{([^{}]*)\}|\\q?quad\b|\\[()\[\]]|\$")
_LINK = re.compile(r"|(?:[^.\n]{0,60}\s)?(?:[,;]|,?\s*(?:and|or))(?:\s+\S{1,12}\s*=)?")
"""Text between two boxes that belong to one list: nothing, a comma, or `and`, possibly with words as in `papers and`."""


class Statement(NamedTuple):
    """A part of a response that may state the answer."""

    kind: Literal["boxed", "tag", "hash", "phrase", "line"]
    text: str


def behind_thinking(text: str) -> str:
    """Return a response without its thinking: the text after the last </think>, or before a <think> that is not closed."""
    return text.rpartition("</think>")[2].partition("<think>")[0]


def statements(text: str) -> list[Statement]:
    """Return the statements of a response, last first: boxes, tags, hashes, 'final answer'; else 'answer'; else the last line.

    The time is linear in the length of the text.
    """
    text = behind_thinking(text)
    phrases = [
        (m.start(), bool(m[1]), Statement("phrase", _line(text, m.end()))) for m in _last(_PHRASE.finditer(text))
    ]
    marked = [*_boxes(text), *_tags(text), *((start, phrase) for start, final, phrase in phrases if final)]
    marked += [(match.start(), Statement("hash", match[1])) for match in _last(_HASH.finditer(text))]
    marked = marked or [(start, phrase) for start, _, phrase in phrases]
    if not marked:
        last = _last_line(text.strip())
        return [Statement("line", last)] if last else []
    return [statement for _, statement in sorted(marked, reverse=True)[:MOST_STATEMENTS]]


def extract_answer(text: str, *, multiline: bool = False) -> str:
    """Return the answer that a response states last, or ''.

    multiline: True if answers may be grids. A text without a box, tag or hash is then the answer as a whole.
    """
    found = statements(text)
    if not found:
        return ""
    if multiline and found[0].kind == "line":
        return behind_thinking(text).strip()
    answer = found[0].text.strip()
    return answer.removesuffix(".").strip("*` ") if found[0].kind == "phrase" else answer


def _last(matches: Iterator[re.Match]) -> deque[re.Match]:
    return deque(matches, MOST_STATEMENTS)


_DISPLAYED = (("\\[", "\\]"), ("$$", "$$"))
"""Delimiters of a formula that may span several lines."""


def _line(text: str, start: int) -> str:
    """Return the text from `start` to the end of its line.

    If a displayed formula (`_DISPLAYED`) starts there, return only the formula, because text after it is explanation.
    """
    for begin, end in _DISPLAYED:
        if text.startswith(begin, start) and (found := text.find(end, start + len(begin))) > 0:
            return text[start : found + len(end)]
    return text[start:].partition("\n")[0]


def _last_line(text: str) -> str:
    for begin, end in _DISPLAYED:
        if text.rstrip(".").endswith(end) and (found := text.rfind(begin, 0, text.rindex(end))) >= 0:
            return text[text.rfind("\n", 0, found) + 1 :].strip()
    return text.rpartition("\n")[2].strip()


def _tags(text: str) -> list[tuple[int, Statement]]:
    found, position = [], 0
    for opened in _TAG.finditer(text):
        if opened.start() < position:
            continue
        if not (closed := _END_TAG.search(text, opened.end())):
            break
        position = closed.end()
        found.append((opened.start(), Statement("tag", text[opened.end() : closed.start()])))
    return found


def _boxes(text: str) -> list[tuple[int, Statement]]:
    r"""Return (start, content) of each complete outermost `\boxed{...}`. Boxes linked by commas, 'and' or 'or' are one list."""
    opened: list[tuple[int, int] | None] = []  # (start, start of the content) for a box, None for another brace
    found: list[tuple[int, int, str]] = []
    for match in _BRACE.finditer(text):
        if match[0] == "}":
            if opened and (box := opened.pop()):
                while found and found[-1][0] > box[0]:
                    found.pop()  # this box lies within the current one
                found.append((box[0], match.end(), text[box[1] : match.start()]))
        elif match[0][-1] == "{" and match[0] != "\\{":
            opened.append((match.start(), match.end()) if len(match[0]) > 1 else None)
    lists: list[tuple[int, list[str]]] = []
    before = None
    for start, end, content in found:
        if before is None or not _are_linked(text[before:start]):
            lists.append((start, []))
        lists[-1][1].append(content)
        before = end
    return [(start, Statement("boxed", ", ".join(dict.fromkeys(contents)))) for start, contents in lists]


def _are_linked(between: str) -> bool:
    return len(between) < 100 and bool(_LINK.fullmatch(_NO_WORDS.sub(r" \1 ", between).strip()))
