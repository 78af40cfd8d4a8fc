"""A sequence of tokens with named values of its labels, which carries all data from the rollout to the loss.

A label is a token that the model predicts: a token of the response. Values of single labels (loss mask, log-probs, advantages
...) are called fields. Several parts of the code treat all fields of a sequence in a loop: packing, context-parallel cuts,
`take`, moves to a device, and records. A new field therefore needs only one line in `FIELDS`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Field:
    """Declaration of a field: a value that each label has."""

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
    "unit": Field(np.int32, -1),  # index of the scored unit that contains the label (trainer.scored_spans); -1: none
    "loss_gradients": Field(np.float32),  # of a loss, at the label's log-prob or value
    "text_bytes": Field(np.int32, -1),  # number of UTF-8 bytes of the label's text; -1: no text, or not known
}
"""All fields that a sequence may have, by name."""


@dataclass
class RouterFeatures:
    """Inputs and logits of the engine's routers for c response tokens, from which route predictors learn."""

    positions: Tensor
    """Indices of response tokens, [c] int32, ascending. Entry i of the other tensors belongs to the input token that predicts
    response token positions[i]."""
    hidden: Tensor
    """Router inputs h, [c, moe_layers, hidden] in the engine's dtype; the width is 0 if no predictor is trained."""
    logits: Tensor
    """Router logits z without a prediction added, [c, moe_layers, experts] fp32."""

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
    """A teacher's k most likely tokens for each of m labels. Their log-probs are normalized over its whole vocabulary."""

    token_ids: np.ndarray
    """Token ids, [m, k] int32; -1 for a missing token."""
    log_probs: np.ndarray
    """Log-probs at temperature 1, [m, k] float32; 0 for a missing token."""

    @classmethod
    def none(cls, labels: int, k: int) -> Self:
        """Return an object for `labels` labels whose tokens are all missing."""
        return cls(np.full((labels, k), -1, np.int32), np.zeros((labels, k), np.float32))


@dataclass(kw_only=True)
class Sequence:
    """A sequence of n tokens, of which the last n - prompt_length are labels."""

    tokens: np.ndarray
    """Token ids, [n] int32: prompt, then response."""
    prompt_length: int
    fields: dict[str, np.ndarray] = field(default_factory=dict)
    """Values by a name in FIELDS, [n - prompt_length] each: entry i belongs to `tokens[prompt_length + i]`."""
    kept: list[np.ndarray] | None = None
    """Token ids (int32) that a truncating sampler kept for each label; None: the whole vocabulary."""
    routes: np.ndarray | None = None
    """The engine's experts of each input token, [n - 1, moe_layers, topk]; sentinels if the experts are not known."""
    gates: np.ndarray | None = None
    """Weights of these experts in the engine, [n - 1, moe_layers, topk] float32, 0 to 1, before routed_scaling_factor. All
    gates of a token are 0 if they are not known."""
    features: RouterFeatures | None = None
    """Features of the engine's routers, if the engine exports them."""
    top: TopLogProbs | None = None
    """The teacher's recorded predictions for the labels."""

    @classmethod
    def demonstration(cls, prompt: list[int], response: list[int]) -> Self:
        """Build a sequence from a prompt and a response to imitate. The loss uses every label."""
        tokens = np.asarray([*prompt, *response], np.int32)
        return cls(tokens=tokens, prompt_length=len(prompt), fields={"loss_mask": np.ones(len(response), bool)})

    def cut(self, longest: int) -> list[Self]:
        """Cut the sequence into pieces of at most `longest` tokens. `longest` must exceed 1 and the length of the prompt.

        Each piece begins with the last token of the previous piece, so that every label belongs to exactly one piece. The
        pieces have only tokens and fields.
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
        """Return the values [n - prompt_length] of a field, or the field's default if the sequence does not have it."""
        found = self.fields.get(name)
        declared = FIELDS[name]
        return np.full(self.response_length, declared.default, declared.dtype) if found is None else found

    def __setitem__(self, name: str, values: np.ndarray | float) -> None:
        """Set the values of a field, or one value for all labels. Errors: KeyError if FIELDS does not contain the name."""
        self.fields[name] = np.broadcast_to(np.asarray(values, FIELDS[name].dtype), (self.response_length,)).copy()

    @property
    def response_length(self) -> int:
        """Number of labels."""
        return len(self.tokens) - self.prompt_length

    @property
    def inputs(self) -> int:
        """Number of tokens that the model reads. The last token is only predicted."""
        return len(self.tokens) - 1
