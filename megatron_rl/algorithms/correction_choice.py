"""Which correction of the mismatch is wanted, and what cannot be. No torch: a config's is looked at before it is imported."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, Self

Level = Literal["token", "sequence", "geometric"]
LEVELS = ("token", "sequence", "geometric")
Denominator = Literal["sampled", "kept_sequences", "kept_tokens", "weights"]
DENOMINATORS = ("sampled", "kept_sequences", "kept_tokens", "weights")


@dataclass(frozen=True, kw_only=True)
class Correction:
    """The treatment of a token's ratio r. Errors: ValueError for an unknown choice, a missing bound or bounds that cross."""

    mode: Literal["none", "truncate", "mask", "clip"] = "none"
    """none: weight 1; truncate: min(r, high); mask: r where low <= r <= high, else 0; clip: r clamped to [low, high]. In
    mask and clip one of the bounds may be absent."""
    level: Level = "token"
    """The ratio r: the token's; its sequence's product (over the mask); that product's geometric mean."""
    low: float | None = None
    high: float | None = None
    veto: float | None = None
    """A sequence with any token ratio below it leaves the update: weights of 0, and no KL or entropy term."""
    reject: Literal["none", "abs_log_ratio", "k2", "k3"] = "none"
    """Statistic of log r by which tokens or sequences leave the update: |log r|, (log r)^2 / 2, r - 1 - log r."""
    reject_level: Level = "geometric"
    """token: each by its own; sequence: by the sum over the mask; geometric: by the mean over the mask."""
    reject_above: float | None = None
    denominator: Denominator = "kept_tokens"
    """Over what the loss is a mean: `counts` says it token by token."""

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
        """The correction of a config's section that has all of these fields. Errors: ValueError, as above."""
        return cls(**{field.name: getattr(settings, field.name) for field in fields(cls)})

    @property
    def per_token(self) -> bool:
        """True where a token's weight depends on its own ratio alone."""
        of_tokens = self.level == "token" and (self.reject == "none" or self.reject_level == "token")
        return of_tokens and not self.veto
