"""Dialects: a model's own formats for describing tools, calling them and showing results, as tokens and as messages."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_rl.config.registry import resolve
from megatron_rl.dialects.base import Call, Dialect, Parsed, without_end
from megatron_rl.dialects.harmony import Harmony
from megatron_rl.dialects.text import Qwen, ReAct
from megatron_rl.errors import UserError

DIALECTS: dict[str, type[Dialect]] = {"qwen": Qwen, "react": ReAct, "harmony": Harmony}

__all__ = ["DIALECTS", "Call", "Dialect", "Harmony", "Parsed", "dialect", "without_end"]


def dialect(name: str, tokenizer: PreTrainedTokenizerBase, **options: Any) -> Dialect:
    """Return the built-in dialect with this name, or the user's own from `module:name`. options: agent.dialect_options.

    Errors: UserError for an unknown name or option, or a tokenizer that does not fit the dialect.
    """
    made = resolve("dialect", name, DIALECTS, "agent.dialect")
    try:
        return made(tokenizer, **options)
    except TypeError as error:
        raise UserError(f"config: agent.dialect_options: {error}") from None
