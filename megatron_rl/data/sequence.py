"""A sequence of tokens with named values of its labels, which carries all data from the rollout to the loss.

A label is a token of the response, which the model predicts. Values of single labels (loss mask, log-probs, advantages ...)
are fields. Packing, context-parallel cuts, `take`, device moves and records loop over the fields of a sequence, so a new
field is one line in `FIELDS`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Field:
    """Declaration of a value that each label has."""

    dtype: type[np.generic]
    default: float = 0
    """Value for sequences without the field, and for packed tokens that are not labels."""


FIELDS = {
    "loss_mask": Field(np.bool_),  # True if the label counts in the loss; False if the policy did not choose it
    "rollout_log_probs": Field(np.float32),  # from the engine, under the sampling support
    "advantages": Field(np.float32),
    "old_log_probs": Field(np.float32),  # of the policy before the updates of its rollout batch
    "reference_log_probs": Field(np.float32),  # of the frozen reference
    "teacher_log_probs": Field(np.float32),  # of the teacher that is distilled
    "values": Field(np.float32),  # of the state before the label, by the critic or reward model
    "returns": Field(np.float32),  # target of the critic's values
    "step_scores": Field(np.float32, np.nan),  # of a process reward model, at the last label of a step; NaN elsewhere
    "unit": Field(np.int32, -1),  # index of the scored unit that contains the label (trainer.units); -1: none
    "loss_gradients": Field(np.float32),  # of a loss, at the label's log-prob or value
    "text_bytes": Field(np.int32, -1),  # number of UTF-8 bytes of the label's text; -1: no text, or not known
}
"""The fields of a label."""


@dataclass
class RouterFeatures:
    """Data of the engine's routers for c response tokens, as input for predictors."""

    positions: Tensor
    """[c] int32, ascending. Entry i belongs to the input token before response token positions[i], which it predicts."""
    hidden: Tensor
    """[c, moe_layers, hidden] in the engine's dtype: router inputs h; the width is 0 if no predictor learns from them."""
    logits: Tensor
    """[c, moe_layers, experts] fp32: router logits z, without a prediction added."""

    def since(self, start: int) -> RouterFeatures:
        """Return the features of response tokens from `start` on."""
        return self._take(self.positions >= start)

    def before(self, end: int) -> RouterFeatures:
        """Return the features of response tokens before `end`."""
        return self._take(self.positions < end)

    def _take(self, keep: Tensor) -> RouterFeatures:
        return RouterFeatures(self.positions[keep], self.hidden[keep], self.logits[keep])


@dataclass
class TopLogProbs:
    """A teacher's k most likely tokens for each of m labels, with log-probs over its whole vocabulary."""

    token_ids: np.ndarray
    """[m, k] int32; -1 for a missing token."""
    log_probs: np.ndarray
    """[m, k] float32, at temperature 1; 0 for a missing token."""

    @classmethod
    def none(cls, labels: int, k: int) -> Self:
        """Return empty predictions for `labels` labels."""
        return cls(np.full((labels, k), -1, np.int32), np.zeros((labels, k), np.float32))


@dataclass(kw_only=True)
class Sequence:
    """A sequence of n tokens, of which the last n - prompt_length are labels."""

    tokens: np.ndarray
    """[n] int32: prompt, then response."""
    prompt_length: int
    fields: dict[str, np.ndarray] = field(default_factory=dict)
    """[n - prompt_length] values by name of FIELDS: entry i belongs to `tokens[prompt_length + i]`."""
    kept: list[np.ndarray] | None = None
    """Token ids, int32, that a truncating sampler kept for each label; None: the whole vocabulary."""
    routes: np.ndarray | None = None
    """[n - 1, moe_layers, topk]: the engine's experts of each input token; sentinels if the experts are not known."""
    gates: np.ndarray | None = None
    """[n - 1, moe_layers, topk] float32: weights of these experts in the engine, 0 to 1, before routed_scaling_factor. All
    gates of a token are 0 if they are not known."""
    features: RouterFeatures | None = None
    """Features of the engine's routers, if the engine exports them."""
    top: TopLogProbs | None = None
    """The teacher's recorded predictions for the labels."""

    @classmethod
    def demonstration(cls, prompt: list[int], response: list[int]) -> Self:
        """Build a sequence from a prompt and a response to imitate: every label counts."""
        tokens = np.asarray([*prompt, *response], np.int32)
        return cls(tokens=tokens, prompt_length=len(prompt), fields={"loss_mask": np.ones(len(response), bool)})

    def cut(self, longest: int) -> list[Self]:
        """Cut the sequence into pieces of at most `longest` tokens. `longest` must exceed 1 and the length of the prompt.

        A piece begins with the last token of the piece before, so that every label belongs to exactly one piece. Only tokens
        and fields are cut.
        """
        pieces, start, prompt = [], 0, self.prompt_length
        while start + prompt < len(self.tokens):
            end = min(start + longest, len(self.tokens))
            labels = slice(start + prompt - self.prompt_length, end - self.prompt_length)
            fields = {name: values[labels] for name, values in self.fields.items()}
            pieces.append(type(self)(tokens=self.tokens[start:end], prompt_length=prompt, fields=fields))
            start, prompt = end - 1, 1
        return pieces

    def __getitem__(self, name: str) -> np.ndarray:
        """Return the values [n - prompt_length] of a field, or its default if the sequence does not have the field."""
        found = self.fields.get(name)
        declared = FIELDS[name]
        return np.full(self.response_length, declared.default, declared.dtype) if found is None else found

    def __setitem__(self, name: str, values: np.ndarray | float) -> None:
        """Set the values of a field, or one value for all labels. Errors: KeyError for a name that is not declared."""
        self.fields[name] = np.broadcast_to(np.asarray(values, FIELDS[name].dtype), (self.response_length,)).copy()

    @property
    def response_length(self) -> int:
        """Number of labels."""
        return len(self.tokens) - self.prompt_length

    @property
    def inputs(self) -> int:
        """Number of tokens that enter the model: the last token is only predicted."""
        return len(self.tokens) - 1
