"""Options of the mismatch correction, and their checks. Does not import torch, because config checks need it first."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, Self

Level = Literal["token", "sequence", "geometric"]
LEVELS = ("token", "sequence", "geometric")
Denominator = Literal["sampled", "kept_sequences", "kept_tokens", "weights"]
DENOMINATORS = ("sampled", "kept_sequences", "kept_tokens", "weights")


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Treatment of a token's importance ratio r = exp(train log-prob - rollout log-prob).

    Errors: ValueError for an unknown choice, a missing bound, or low above high.
    """

    mode: Literal["none", "truncate", "mask", "clip"] = "none"
    """Importance weight from a ratio. none: weight 1; truncate: min(r, high); mask: r if low <= r <= high, else 0; clip: r
    clamped to [low, high]. The modes mask and clip need only one of the two bounds."""
    level: Level = "token"
    """Ratio r that is bounded. token: ratio of the token; sequence: product of the ratios over the mask of the sequence;
    geometric: geometric mean of these ratios."""
    low: float | None = None
    high: float | None = None
    veto: float | None = None
    """Threshold of token ratios: if any token of a sequence is below it, the sequence is dropped from the update. The
    sequence's weights are then 0, and it has no KL or entropy term."""
    reject: Literal["none", "abs_log_ratio", "k2", "k3"] = "none"
    """Statistic by which tokens or sequences are dropped: |log r|, (log r)^2 / 2 (k2) or r - 1 - log r (k3)."""
    reject_level: Level = "geometric"
    """Level at which the statistic is compared. token: the token's own statistic; sequence: its sum over the mask; geometric:
    its mean over the mask."""
    reject_above: float | None = None
    """Largest value of the statistic at which a token or sequence is kept."""
    denominator: Denominator = "kept_tokens"
    """Denominator of the loss; `correction.counts` gives the contribution of each token."""

    def __post_init__(self) -> None:
        choices = {"mode": ("none", "truncate", "mask", "clip"), "level": LEVELS, "reject_level": LEVELS}
        choices["reject"] = ("none", "abs_log_ratio", "k2", "k3")
        choices["denominator"] = DENOMINATORS
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} '{getattr(self, name)}': choose {', '.join(allowed[:-1])} or {allowed[-1]}")
        if self.mode == "truncate" and self.high is None:
            raise ValueError("mode 'truncate' needs high")
        if self.mode in ("mask", "clip") and self.low is None and self.high is None:
            raise ValueError(f"mode '{self.mode}' needs low, high or both")
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"low = {self.low:g} is above high = {self.high:g}: no ratio lies between them")
        if self.reject != "none" and self.reject_above is None:
            raise ValueError(f"reject '{self.reject}' needs reject_above")

    @classmethod
    def of(cls, settings: object) -> Self:
        """Build the correction from a config section that has all of these fields. Errors: ValueError as in the constructor."""
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})

    @property
    def per_token(self) -> bool:
        """True if the weight of a token depends only on the token's own ratio."""
        of_tokens = self.level == "token" and (self.reject == "none" or self.reject_level == "token")
        return of_tokens and not self.veto
