"""Checkers for the instructions of IFEval (arXiv:2311.07911) and IFBench (arXiv:2507.02833), from the package if-verifiable.

Importing this module imports the checkers, which takes seconds. A worker imports this module when it starts, so that no call
has to wait.
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

# At its import, the package downloads data of NLTK in each process, and waits minutes if there is no network.
with mock.patch.object(nltk, "download", return_value=False):
    from if_verifiable.ifbench.instructions_registry import INSTRUCTION_DICT as IFBENCH

langdetect.DetectorFactory.seed = 0  # without a seed, the language of a short text would vary

CHECKERS: dict[str, type[Any]] = {**IFEVAL, **IFBENCH}
"""{instruction: checker}. No name occurs in both sets."""
CONFLICTS: Mapping[str, set[str]] = conflict_make(INSTRUCTION_CONFLICTS)
"""{instruction of IFEval: instructions that cannot be followed together with it}."""
READ: dict[str, Callable[[], Any]] = {
    "punkt_tab": lambda: nltk.word_tokenize("It is. So it is."),
    "averaged_perceptron_tagger_eng": lambda: nltk.pos_tag(["So"]),
    "stopwords": lambda: nltk.corpus.stopwords.words("english"),
}
"""{name of NLTK data: function that reads the data}. No Python package contains these data."""
NLTK_DATA = {
    "length_constraints:number_sentences": ("punkt_tab",),
    "change_case:capital_word_frequency": ("punkt_tab",),
    "format:title_case": ("punkt_tab",),
    "words:keywords_specific_position": ("punkt_tab",),
    "words:words_position": ("punkt_tab",),
    "words:start_verb": ("punkt_tab", "averaged_perceptron_tagger_eng"),
    "ratio:stop_words": ("stopwords",),
}
"""{instruction: names of the NLTK data that its checker needs}. Without the data, the checker rejects every response."""


@cache
def lacking(instruction: str) -> str:
    """Return the reason why an instruction cannot be checked on this machine, or ''."""
    if instruction not in CHECKERS:
        return f"the package if-verifiable has no instruction '{instruction}'{nearest(instruction, CHECKERS)}"
    for name in NLTK_DATA.get(instruction, ()):
        try:
            READ[name]()
        except Exception as error:  # LookupError if the data are missing; NLTK also refuses files that are links
            reason = "" if isinstance(error, LookupError) else f" ({' '.join(str(error).split())[:200]})"
            return (
                f"{instruction} needs NLTK's {name}{reason}: python -m nltk.downloader -d FOLDER {name}, and"
                " NLTK_DATA=FOLDER in the environment of the run"
            )
    return ""


def build(instruction: str, arguments: Mapping[str, Any]) -> tuple[Any, str]:
    """Return the checker of an instruction, and the instruction's text.

    Errors: ValueError if an argument is missing, or if the checker replaces an argument by a random one.
    """
    checker = CHECKERS[instruction](instruction)
    try:
        text = str(checker.build_description(**arguments))
    except Exception as error:  # from the package, about arguments
        raise ValueError(f"{instruction}: {' '.join(str(error).split())}") from None
    for name, value in (checker.get_instruction_args() or {}).items():
        given = arguments.get(name)
        if given is None or (isinstance(given, int) and value != given):
            raise ValueError(f"{instruction}: if-verifiable would draw '{name}' at random, not use {given}")
    return checker, text


_OF_A_LANGUAGE = ("language:", "change_case:english_")
"""Prefixes of instructions that require a language. Their checkers accept texts without any language, for example 12345."""


def follow(response: str, instruction: str, arguments: Mapping[str, Any]) -> tuple[bool, bool]:
    """Return (strict, loose): whether a response follows an instruction under these two criteria of IFEval and IFBench.

    The loose check also tries the response without its first line, last line or asterisks. A text follows no instruction if the
    checker fails on it, if nothing in it is visible, or if a language is required and none is detected. Forbidden characters
    are also found in full-width or half-width form.
    """
    checker, _ = build(instruction, arguments)

    def holds(text: str) -> bool:
        try:
            if instruction.startswith(_OF_A_LANGUAGE):
                langdetect.detect(text)
            return bool(_is_visible(text) and checker.check_following(text))
        except Exception:  # from checkers that expect well-formed texts, and from langdetect
            return False

    text = behind_thinking(response)
    if instruction in ("punctuation:no_comma", "keywords:forbidden_words"):
        text = "".join(map(_usual, unicodedata.normalize("NFKC", text)))
    strict = holds(text)
    return strict, strict or any(map(holds, get_loose_transformations(text)))


def _usual(sign: str) -> str:
    """Convert a comma of any script to ASCII, and drop an invisible character (a soft hyphen).

    Other characters stay unchanged.
    """
    kind = unicodedata.category(sign)
    if kind == "Po" and "COMMA" in unicodedata.name(sign, ""):
        return ","
    return "" if kind == "Cf" else sign


def _is_visible(text: str) -> bool:
    return any(unicodedata.category(sign)[0] not in "ZC" for sign in text)
