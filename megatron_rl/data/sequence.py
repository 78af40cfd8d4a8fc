"""The carrier: one sequence of tokens with named values of its labels, from the rollout to the loss.

A label is a token that the model predicts: those of the response. Whatever is said of labels one by one (the mask of the
loss, log-probs, advantages ...) is a field; packing, context-parallel cuts, `take`, device moves and records loop over the
fields that a sequence has. A new field is one line of `FIELDS`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Self

import numpy as np
from torch import Tensor


@dataclass(frozen=True)
class Field:
    """A value of each label."""

    dtype: type[np.generic]
    default: float = 0
    """Value where a sequence does not have the field, and for packed tokens that are no labels."""


FIELDS = {
    "loss_mask": Field(np.bool_),  # whether the label counts in the loss: False for what the policy did not choose
    "rollout_log_probs": Field(np.float32),  # as the engine returned them, under the sampling support
    "advantages": Field(np.float32),
    "old_log_probs": Field(np.float32),  # of the policy before the updates of its rollout batch
    "reference_log_probs": Field(np.float32),  # of the frozen reference
    "teacher_log_probs": Field(np.float32),  # of the teacher that is distilled
    "values": Field(np.float32),  # of the state before the label, by the critic or reward model
    "returns": Field(np.float32),  # what the critic's values are to be
    "step_scores": Field(np.float32, np.nan),  # of a process reward model, where a step ends; NaN: none does
    "unit": Field(np.int32, -1),  # what the label is a part of the score of (trainer.units); -1: of nothing
    "loss_gradients": Field(np.float32),  # of a loss, at the label's log-prob or value
    "text_bytes": Field(np.int32, -1),  # UTF-8 bytes of text that it stands for; -1: of none, or it is not known
}
"""The fields of a label."""


@dataclass
class RouterFeatures:
    """Data of the engine's routers for c tokens of the response that they predicted; predictors learn from it."""

    positions: Tensor
    """[c] int32, ascending: response token i was predicted from the features of the input token before it."""
    hidden: Tensor
    """[c, moe_layers, hidden] in the engine's dtype: router inputs h; hidden is 0 where no predictor learns from them."""
    logits: Tensor
    """[c, moe_layers, experts] fp32: router logits z without the prediction."""

    def since(self, start: int) -> RouterFeatures:
        """Features of response tokens from `start` on."""
        return self._take(self.positions >= start)

    def before(self, end: int) -> RouterFeatures:
        """Features of response tokens before `end`."""
        return self._take(self.positions < end)

    def _take(self, keep: Tensor) -> RouterFeatures:
        return RouterFeatures(self.positions[keep], self.hidden[keep], self.logits[keep])


@dataclass
class TopLogProbs:
    """A teacher's k likeliest tokens for each of m labels, with log-probs over its whole vocabulary."""

    token_ids: np.ndarray
    """[m, k] int32; -1: none."""
    log_probs: np.ndarray
    """[m, k] float32, at temperature 1; 0 where there is no token."""

    @classmethod
    def none(cls, labels: int, k: int) -> Self:
        """Empty predictions for `labels` labels without recorded ones."""
        return cls(np.full((labels, k), -1, np.int32), np.zeros((labels, k), np.float32))


@dataclass(kw_only=True)
class Sequence:
    """n tokens of which the last n - prompt_length are labels."""

    tokens: np.ndarray
    """[n] int32: prompt, then response."""
    prompt_length: int
    fields: dict[str, np.ndarray] = field(default_factory=dict)
    """[n - prompt_length] values by name of FIELDS: entry i belongs to `tokens[prompt_length + i]`."""
    kept: list[np.ndarray] | None = None
    """Per label the ids that a truncating sampler kept, int32; None: the whole vocabulary."""
    routes: np.ndarray | None = None
    """[n - 1, moe_layers, topk]: the engine's experts of each input token, sentinels where they are not known."""
    gates: np.ndarray | None = None
    """[n - 1, moe_layers, topk] float32: the weights, 0 to 1, that the engine gave these experts before
    routed_scaling_factor; 0 in all slots of a token without."""
    features: RouterFeatures | None = None
    """Features of the engine's routers, where it exports them."""
    top: TopLogProbs | None = None
    """The teacher's recorded predictions for the labels."""

    @classmethod
    def demonstration(cls, prompt: list[int], response: list[int]) -> Self:
        """A prompt with a response to imitate: every label counts."""
        tokens = np.asarray([*prompt, *response], np.int32)
        return cls(tokens=tokens, prompt_length=len(prompt), fields={"loss_mask": np.ones(len(response), bool)})

    def cut(self, longest: int) -> list[Self]:
        """The sequence in pieces of at most `longest` tokens, which are more than its prompt's and more than one.

        A piece begins with the last token of the one before, so that every label is the label of one piece. Tokens and fields
        alone are cut.
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
        """Values [n - prompt_length] of a field; its default where the sequence does not have it."""
        found = self.fields.get(name)
        declared = FIELDS[name]
        return np.full(self.response_length, declared.default, declared.dtype) if found is None else found

    def __setitem__(self, name: str, values: np.ndarray | float) -> None:
        """Set values of a field, or one for all labels. Errors: KeyError for a name that is not declared."""
        self.fields[name] = np.broadcast_to(np.asarray(values, FIELDS[name].dtype), (self.response_length,)).copy()

    @property
    def response_length(self) -> int:
        """Number of labels."""
        return len(self.tokens) - self.prompt_length

    @property
    def inputs(self) -> int:
        """Tokens that enter the model: the last one is only predicted."""
        return len(self.tokens) - 1
