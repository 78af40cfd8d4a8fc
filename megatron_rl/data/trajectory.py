"""What comes back from the engine: one sampled response with everything that the trainer needs to know about it."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from torch import Tensor


@dataclass
class WeightSpan:
    """Response tokens [start, end) were sampled from the weights `version`."""

    version: str
    start: int
    end: int


@dataclass
class RouterFeatures:
    """What the engine's routers saw when they predicted c of the response's tokens; predictors learn from it."""

    positions: Tensor
    """[c] int32, ascending: response token i was predicted from the features of the input token before it."""
    hidden: Tensor
    """[c, moe_layers, hidden] in the engine's dtype: router inputs h; hidden is 0 where no predictor learns from them."""
    logits: Tensor
    """[c, moe_layers, experts] fp32: router logits z without the prediction."""

    def since(self, start: int) -> RouterFeatures:
        """Those of response tokens from `start` on."""
        keep = self.positions >= start
        return RouterFeatures(self.positions[keep], self.hidden[keep], self.logits[keep])


@dataclass
class Trajectory:
    """One prompt with one response.

    n = prompt_length + response_length tokens. Positions in `log_probs` and `loss_mask` are those of the response
    tokens in order: `log_probs[i]` belongs to `tokens[prompt_length + i]`.
    """

    prompt_id: str
    """Identifies the prompt in its data set."""
    group_id: int
    """Samples of one prompt in one step share it."""
    tokens: np.ndarray
    """[n] int32: prompt, then response."""
    prompt_length: int
    log_probs: np.ndarray
    """[response_length] float32, under the sampling support, as the engine returned them."""
    loss_mask: np.ndarray
    """[response_length] bool: tokens that the policy chose (False for tool output)."""
    finish_reason: str = "stop"
    """stop | length | abort."""
    support: dict[str, float] = field(default_factory=dict)
    """Fields of the `SamplingSupport` that it was sampled under; empty where a record does not say."""
    kept: list[np.ndarray] | None = None
    """Per response token the ids that the sampling support kept, or None where it kept the whole vocabulary."""
    routes: np.ndarray | None = None
    """[n - 1, moe_layers, topk] uint8 (int16 where experts > 255): experts of each input token; `routing.table` has the
    sentinel for those without."""
    features: RouterFeatures | None = None
    """Where the engine exports them."""
    weight_spans: list[WeightSpan] = field(default_factory=list)
    weights: str = ""
    """Digest of the weights that its last token, and so its routes, came from; of a recorded trajectory with routes."""
    text: str = ""
    """The response, decoded."""
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)

    @property
    def response_length(self) -> int:
        return len(self.tokens) - self.prompt_length
