"""The sampling contract: one object says from which support a token was drawn, for the sampler and for the loss."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_rl.config import SamplingConfig
from megatron_rl.errors import UserError


@dataclass(frozen=True)
class SamplingSupport:
    """Temperature and truncation under which tokens are drawn and under which both sides' log-probs are taken.

    The trainer's log-probs are over the whole vocabulary of temperature-scaled logits; the engine's are that too as
    long as nothing is truncated. A truncated engine against an untruncated trainer would put log(kept mass) into every
    importance ratio, so `from_config` refuses it.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0

    @classmethod
    def from_config(cls, config: SamplingConfig) -> SamplingSupport:
        support = cls(config.temperature, config.top_p, config.top_k, config.min_p)
        if support.truncated:
            raise UserError(
                "config: rollout.sampling truncates the vocabulary (top_p, top_k or min_p), but the trainer's log-probs"
                " are over all of it; set top_p: 1.0, top_k: -1, min_p: 0.0"
            )
        return support

    @property
    def truncated(self) -> bool:
        return self.top_p < 1.0 or self.top_k > 0 or self.min_p > 0.0

    def request(self) -> dict[str, float | int]:
        """The part of SGLang's sampling_params that this support fixes."""
        return {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "min_p": self.min_p}
