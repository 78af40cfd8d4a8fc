"""The checkers of the package if-verifiable: IFEval's (arXiv:2311.07911) and IFBench's (arXiv:2507.02833).

Importing this module imports them, which takes seconds: where a worker imports it first, no call has to wait.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any
from unittest import mock

import langdetect
import nltk
from if_verifiable.common import get_loose_transformations
from if_verifiable.ifeval.instructions_registry import INSTRUCTION_CONFLICTS, conflict_make
from if_verifiable.ifeval.instructions_registry import INSTRUCTION_DICT as IFEVAL

from megatron_rl.config.registry import nearest
from megatron_rl.verifiers.stated_answer import behind_thinking

# The package downloads data of NLTK when it is imported, from each process, and waits minutes for a network that is not there.
with mock.patch.object(nltk, "download", return_value=False):
    from if_verifiable.ifbench.instructions_registry import INSTRUCTION_DICT as IFBENCH

langdetect.DetectorFactory.seed = 0  # or else a short text is now of one language, now of another

CHECKERS: dict[str, type[Any]] = {**IFEVAL, **IFBENCH}
"""Instruction -> its checker. No name is in both."""
CONFLICTS: Mapping[str, set[str]] = conflict_make(INSTRUCTION_CONFLICTS)
"""Instruction of IFEval -> those that cannot be followed beside it."""
READ: dict[str, Callable[[], Any]] = {
    "punkt_tab": lambda: nltk.word_tokenize("It is. So it is."),
    "averaged_perceptron_tagger_eng": lambda: nltk.pos_tag(["So"]),
    "stopwords": lambda: nltk.corpus.stopwords.words("english"),
}
"""Data of NLTK, which no package brings along -> what reads it."""
NLTK_DATA = {
    "length_constraints:number_sentences": ("punkt_tab",),
    "change_case:capital_word_frequency": ("punkt_tab",),
    "format:title_case": ("punkt_tab",),
    "words:keywords_specific_position": ("punkt_tab",),
    "words:words_position": ("punkt_tab",),
    "words:start_verb": ("punkt_tab", "averaged_perceptron_tagger_eng"),
    "ratio:stop_words": ("stopwords",),
}
"""Instruction -> the data without which its checker follows nothing, whatever a response says."""


@cache
def lacking(instruction: str) -> str:
    """Why an instruction cannot be checked on this machine, or ''."""
    if instruction not in CHECKERS:
        return f"the package if-verifiable has no instruction '{instruction}'{nearest(instruction, CHECKERS)}"
    for name in NLTK_DATA.get(instruction, ()):
        try:
            READ[name]()
        except Exception as error:  # LookupError where it is not there; NLTK also refuses files that are links
            reason = "" if isinstance(error, LookupError) else f" ({' '.join(str(error).split())[:200]})"
            return (
                f"{instruction} needs NLTK's {name}{reason}: python -m nltk.downloader -d FOLDER {name}, and"
                " NLTK_DATA=FOLDER in the environment of the run"
            )
    return ""


def build(instruction: str, arguments: Mapping[str, Any]) -> tuple[Any, str]:
    """The checker, and the instruction in words.

    Errors: ValueError where an argument is missing, or one that the checker replaces by a random one.
    """
    checker = CHECKERS[instruction](instruction)
    try:
        text = str(checker.build_description(**arguments))
    except Exception as error:  # of the package, about arguments
        raise ValueError(f"{instruction}: {' '.join(str(error).split())}") from None
    for name, value in (checker.get_instruction_args() or {}).items():
        given = arguments.get(name)
        if given is None or (isinstance(given, int) and value != given):
            raise ValueError(f"{instruction}: if-verifiable would draw another '{name}' than {given} at random")
    return checker, text


_OF_A_LANGUAGE = ("language:", "change_case:english_")
"""Beginnings of instructions whose checkers take a text for theirs where langdetect finds no language: 12345, say."""


def follow(response: str, instruction: str, arguments: Mapping[str, Any]) -> tuple[bool, bool]:
    """True if a response follows an instruction: strictly, and loosely as IFEval and IFBench have it.

    Loosely is without its first or last line, or its asterisks. A text at which the checker fails follows nothing, nor does one
    that shows nothing, or, where a language is asked for, has none. What must not be there is found in any width of its signs.
    """
    checker, _ = build(instruction, arguments)

    def holds(text: str) -> bool:
        try:
            if instruction.startswith(_OF_A_LANGUAGE):
                langdetect.detect(text)
            return bool(_is_visible(text) and checker.check_following(text))
        except Exception:  # of checkers that take texts to be well-formed, and of langdetect
            return False

    text = behind_thinking(response)
    if instruction in ("punctuation:no_comma", "keywords:forbidden_words"):
        text = "".join(map(_usual, unicodedata.normalize("NFKC", text)))
    strict = holds(text)
    return strict, strict or any(map(holds, get_loose_transformations(text)))


def _usual(sign: str) -> str:
    """A comma of any script as ASCII's, nothing for a sign that does not show (a soft hyphen), others as they are."""
    kind = unicodedata.category(sign)
    if kind == "Po" and "COMMA" in unicodedata.name(sign, ""):
        return ","
    return "" if kind == "Cf" else sign


def _is_visible(text: str) -> bool:
    return any(unicodedata.category(sign)[0] not in "ZC" for sign in text)
