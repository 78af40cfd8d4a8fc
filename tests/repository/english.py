"""The part of CONTRIBUTING's rules of English that a machine can hold.

`python -m tests.repository.english FILE ...` prints what it finds in pages, Python files and scripts.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

RIDDLES = ("Of", "What", "Those", "That", "Whether", "By", "Where", "Which", "Such")
"""First words of docstrings that leave the reader to find the thing that they speak of."""
BANNED = (
    "of course",
    "simply",
    "obviously",
    "respectively",
    "in vain",
    "the former",
    "the latter",
    "that which",
    "those which",
    "thereof",
    "therein",
    "whereof",
    "hereby",
    "heed",
    "heeds",
    "anew",
    "for ever",
    "in the place of",
    "is that of",
    "are those of",
)
"""Words and turns that a reader has to decipher, or that say nothing."""
LONGEST = 35
"""Words of a sentence: a longer one is two."""
_BANNED = re.compile(rf"\b({'|'.join(BANNED)})\b", re.IGNORECASE)
_CODE = re.compile(r"`+[^`]+`+|\$[^$]+\$|https?://\S+")
_LINK = re.compile(r"!?\[([^]]*)\]\([^)]*\)")


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each text that stands as a statement of its own."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def paragraphs(page: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each paragraph, list item and table cell of a Markdown page, code left out."""
    start, words, fenced = 0, [], False
    for number, line in enumerate([*page.splitlines(), ""], 1):
        text = line.strip()
        if text.startswith("```"):
            fenced = not fenced
            text = ""
        item = re.match(r"([-*+]|\d+\.) ", text)
        special = fenced or not text or text.startswith(("#", "|", "<")) or bool(item)
        code = line.startswith("    ") and not words
        if special and words:
            yield start, " ".join(words)
            words = []
        if fenced or code or not text or text.startswith(("#", "<")):
            continue
        if text.startswith("|"):
            yield from ((number, cell.strip()) for cell in text.strip("|").split(" | "))
            continue
        start = start if words else number
        words.append(text[item.end() :] if item else text)


def sentences(text: str) -> list[str]:
    """Sentences and parts of sentences that a colon or a semicolon divides; code and links as one word each."""
    plain = _LINK.sub(lambda link: link[1], _CODE.sub("CODE", text))
    return [
        part for part in re.split(r"(?<=[.!?:;])[)\"*]*\s+|\n\s*\n|\n\s*[-*] |\n {4,}python ", plain) if part.strip()
    ]


def faults(text: str) -> Iterator[str]:
    """Say what is wrong with a text, whatever it is a part of."""
    for sentence in sentences(text):
        count = len(sentence.split())
        if count > LONGEST:
            yield f"{count} words: {' '.join(sentence.split()[:8])} ..."
        for banned in _BANNED.findall(sentence):
            yield f"'{banned}': {' '.join(sentence.split()[:12])} ..."


def findings(path: Path) -> list[str]:
    """Lines "file:line: fault" for one page or Python file."""
    source = path.read_text()
    if path.suffix == ".md":
        found = [(line, fault) for line, text in paragraphs(source) for fault in faults(text)]
    else:
        found = []
        for line, text in docstrings(source):
            first = text.split()[0].rstrip(",.:;") if text.split() else ""
            if first in RIDDLES:
                found.append((line, f"begins with {first}"))
            found += [(line, fault) for fault in faults(text)]
    return [f"{path}:{line}: {fault}" for line, fault in sorted(found)]


if __name__ == "__main__":
    everything = [line for name in sys.argv[1:] for line in findings(Path(name))]
    print("\n".join(everything) or "nothing found")
    sys.exit(bool(everything))
