"""What comes back from the engine: one sampled response with everything that the trainer needs to know about it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from megatron_rl.data.sequence import Sequence

TRUNCATED = ("length", "turns", "tokens", "time")
"""Endings that a limit brought about, before the policy ended."""
OVERLONG = "overlong"
"""The part of a reward that is about the response's length alone."""


@dataclass
class WeightSpan:
    """Response tokens [start, end) were sampled from the weights `version`."""

    version: str
    start: int
    end: int


@dataclass
class Turn:
    """A stretch of a conversation's response tokens: what the policy said, or what it was answered."""

    role: str
    """assistant: sampled; tool or user: an observation."""
    start: int
    end: int
    calls: list[str] = field(default_factory=list)
    """Tools that a reply calls."""
    malformed: str = ""
    """What is wrong with a reply's call."""
    seconds: float = 0.0
    """The tools' time, of an observation."""
    messages: list[dict[str, Any]] = field(default_factory=list)
    """The same in OpenAI's form, for readers with another tokenizer."""


@dataclass(kw_only=True)
class Trajectory(Sequence):
    """A prompt with a sampled response. Of its fields the engine gives loss_mask and rollout_log_probs."""

    prompt_id: str
    """Identifies the prompt in its data set."""
    group_id: int
    """Samples of one prompt in one step share it."""
    finish_reason: str = "stop"
    """stop | length | abort; of a conversation stop | turns | tokens | time | failure."""
    support: dict[str, float] = field(default_factory=dict)
    """Fields of the `SamplingSupport` that it was sampled under; empty where a record does not say."""
    weight_spans: list[WeightSpan] = field(default_factory=list)
    weights: str = ""
    """Digest of the weights that its last token, and so its routes, came from; of a recorded trajectory with routes."""
    text: str = ""
    """The response, decoded; of a conversation its final answer."""
    reward: float = 0.0
    reward_parts: dict[str, float] = field(default_factory=dict)
    masked: bool = False
    """Nothing of it trains, and its group's baseline leaves it out: what went wrong was not the policy's fault."""
    turns: list[Turn] = field(default_factory=list)
    """Of a conversation."""
    part: int = 0
    """Which sequence of its sample it is: an agent may lead several conversations for one prompt. Those behind the first, 0,
    have its reward and its advantage."""

    @property
    def truncated(self) -> bool:
        """Whether a limit ended it before the policy did."""
        return self.finish_reason in TRUNCATED
