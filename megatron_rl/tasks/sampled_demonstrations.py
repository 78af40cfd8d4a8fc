"""Demonstrations recorded as sampled tokens. This module writes, reads and checks the columns of their rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

TOKENS = "response_tokens"
PROMPT, MASK, TOKENIZER = "prompt_tokens", "loss_mask", "tokenizer"
TEACHER_IDS, TEACHER_LOG_PROBS = "teacher_token_ids", "teacher_log_probs"
DIGITS = 6
"""Number of decimals of a recorded log-prob. An fp32 softmax is not more precise."""


@dataclass(frozen=True, eq=False)
class Recorded:
    """A demonstration of p prompt tokens and m response tokens."""

    prompt: np.ndarray
    """Prompt tokens, [p] int32."""
    response: np.ndarray
    """Response tokens, [m] int32."""
    loss_mask: np.ndarray
    """[m] bool: True for tokens of the policy, False for tokens of observations."""
    tokenizer: str
    """Digest of the vocabulary of these tokens (`models.hf_folder.vocabulary_digest`); empty if the row does not have it."""
    teacher_token_ids: np.ndarray | None = None
    """[m, k] int32: ids of the teacher's most likely tokens at each response token; -1 fills unused positions."""
    teacher_log_probs: np.ndarray | None = None
    """[m, k] float32: log-probs of `teacher_token_ids` at temperature 1."""

    def columns(self) -> dict[str, Any]:
        """Return the columns of the demonstration's row, ready for JSON."""
        found = {
            PROMPT: self.prompt.tolist(),
            TOKENS: self.response.tolist(),
            MASK: self.loss_mask.astype(int).tolist(),
            TOKENIZER: self.tokenizer,
        }
        if self.teacher_token_ids is not None and self.teacher_log_probs is not None:
            found[TEACHER_IDS] = self.teacher_token_ids.tolist()
            found[TEACHER_LOG_PROBS] = self.teacher_log_probs.astype(np.float64).round(DIGITS).tolist()
        return found


def has_tokens(row: Mapping[str, Any], key: str | None) -> bool:
    """Return True if the column `key` of a row holds a list of tokens. A number, for example a length, does not count."""
    return key is not None and isinstance(row.get(key), list)


def read_recorded(row: Mapping[str, Any], key: str) -> Recorded:
    """Read the demonstration from a row with tokens. Errors: ValueError with the problem."""
    response, prompt = _array(row, key, np.int32, 1), _array(row, PROMPT, np.int32, 1)
    if not len(response) or not len(prompt):
        raise ValueError(f"'{PROMPT if len(response) else key}' is empty")
    loss_mask = np.ones(len(response), bool) if row.get(MASK) is None else _array(row, MASK, np.bool_, 1)
    if len(loss_mask) != len(response):
        raise ValueError(f"'{MASK}' has {len(loss_mask)} values for {len(response)} tokens of '{key}'")
    if not loss_mask.any():
        raise ValueError(f"'{MASK}' leaves nothing to learn")
    ids = log_probs = None
    if row.get(TEACHER_IDS) is not None:
        ids, log_probs = _array(row, TEACHER_IDS, np.int32, 2), _array(row, TEACHER_LOG_PROBS, np.float32, 2)
        if ids.shape != log_probs.shape or len(ids) != len(response):
            shapes = f"{list(ids.shape)} and {list(log_probs.shape)}"
            raise ValueError(f"'{TEACHER_IDS}' and '{TEACHER_LOG_PROBS}' are {shapes} for {len(response)} tokens")
    return Recorded(prompt, response, loss_mask, str(row.get(TOKENIZER) or ""), ids, log_probs)


def _array(row: Mapping[str, Any], name: str, dtype: type[np.generic], dimensions: int) -> np.ndarray:
    try:
        found = np.asarray(row[name], dtype)
    except KeyError:
        raise ValueError(f"it has tokens and no '{name}'") from None
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"'{name}' is not a table of numbers") from None
    if not np.isfinite(found).all():  # numpy converts null to NaN
        raise ValueError(f"'{name}' is not a table of numbers")
    if found.ndim != dimensions and found.size:
        raise ValueError(f"'{name}' has {found.ndim} dimensions, not {dimensions}")
    return found
