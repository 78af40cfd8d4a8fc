"""The sampling contract: one object says from which support a token was drawn, for the sampler and for the loss."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl_plugin.processors import PRUNE_TAIL

from megatron_rl.config import PruningConfig, SamplingConfig
from megatron_rl.errors import UserError

MOST_KEPT = 4096
"""Largest top_k under which SGLang names the kept tokens (its return_sampling_mask)."""
ROOM_FOR_TIES = 8192
"""Tokens that it may name: ties at the border are all kept, and a set that is too large ends the request."""
_WHOLE = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "tail_floor": 0.0}
_UNTOUCHED = {"min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
"""Said in every request, as a server may have been given other defaults (--preferred-sampling-params), and log-probs do not
tell."""


@dataclass(frozen=True)
class SamplingSupport:
    """Temperature and truncation under which tokens are drawn and under which both sides' log-probs are taken.

    Log-probs of engine and trainer are always over the same kind of renormalized support. Nothing truncated: the whole
    vocabulary. min_p (pruning.rho): each side's own tokens within min_p of its likeliest one (Li et al., def. 5.1); the
    engine's may be fewer (engine_min_p: pruning.engine_rho). Log-probs of each side are over its own set (def. 5.2), so that
    a ratio then has the factor Z_engine / Z_trainer = 1 - m, with m the share of the tokens between the two borders.
    top_p, top_k: the tokens that the engine kept, which it sends along. Log-probs of a truncated engine against those
    of the whole vocabulary would put log(kept mass) into every importance ratio.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    engine_min_p: float | None = None
    """None: min_p."""
    tail_floor: float = 0.0
    """A fault of the engine, of which the trainer knows nothing: no token that is not pruned has a smaller share of the
    likeliest one's probability than this."""

    @classmethod
    def from_config(cls, config: SamplingConfig, pruning: PruningConfig) -> SamplingSupport:
        """Errors: UserError naming the key, for what the engine cannot sample or cannot tell."""
        support = cls(config.temperature, config.top_p, config.top_k, tail_floor=config.tail_floor or 0.0)
        if pruning.enabled:
            support = replace(support, min_p=pruning.rho, engine_min_p=pruning.engine_rho)
        key = "config: rollout.sampling"
        if support.engine_rho < support.min_p:
            raise UserError(
                f"config: pruning.engine_rho = {support.engine_rho:g} is below rho = {support.min_p:g}: the engine would sample"
                " tokens outside the trainer's set, which have ratio 0 and teach nothing; set engine_rho: null, or above rho"
            )
        if support.top_k < -1 or support.top_k == 0:
            raise UserError(f"{key}.top_k = {support.top_k}: -1 keeps all tokens, 2 to {MOST_KEPT} the likeliest ones")
        if not support.keeps_sets:
            return support
        if support.min_p:
            raise UserError(
                f"{key}.top_p or top_k with pruning.enabled: two truncations, and the engine can return log-probs of one"
                " alone; set top_p: 1.0 and top_k: -1, or pruning.enabled: false"
            )
        if not 2 <= support.top_k <= MOST_KEPT:
            valid = 1024 if support.top_k != 1 else 2
            raise UserError(
                f"{key}: top_p = {support.top_p:g} with top_k = {support.top_k}: the engine names the tokens that it kept"
                f" for a top_k of 2 to {MOST_KEPT}, and without their names the trainer's log-probs would be over another"
                f" support; set top_k: {valid}, or truncate with pruning.enabled instead"
            )
        return support

    @property
    def keeps_sets(self) -> bool:
        """True if the engine's kept set goes with every token."""
        return (self.top_p < 1.0 or self.top_k > 0) and self.temperature > 0

    @property
    def has_processor(self) -> bool:
        """True if the engine bounds the tail by a logit processor of ours."""
        return bool(self._bounds)

    @property
    def log_rho(self) -> float | None:
        """The trainer's, for `ops.masked_log_softmax`; None: nothing is pruned."""
        return math.log(self.min_p) if self.min_p else None

    @property
    def engine_rho(self) -> float:
        """The engine's pruning threshold; 0: it does not prune."""
        return self.min_p if self.engine_min_p is None else self.engine_min_p

    @property
    def unpruned(self) -> SamplingSupport:
        """The same with the whole vocabulary on both sides."""
        return replace(self, min_p=0.0, engine_min_p=None)

    def sampled(self) -> dict[str, float]:
        """The support that tokens and log-probs come from, as records hold it: min_p is the engine's."""
        found = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "min_p": self.engine_rho}
        return found | {"tail_floor": self.tail_floor}

    def check_recorded(self, recorded: dict[str, float]) -> None:
        """Errors: ValueError where a recorded trajectory was sampled under another support."""
        recorded = _WHOLE | recorded  # the first releases neither truncated nor said so
        pairs = [(name, recorded[name], mine) for name, mine in self.sampled().items() if name in recorded]
        apart = [f"{name} {value:g} and not {mine:g}" for name, value, mine in pairs if value != mine]
        if apart:
            raise ValueError(
                f"sampled under {', '.join(apart)} (min_p is pruning.engine_rho or rho, 0 without pruning): the"
                " log-probs of both sides would be over different supports; set rollout.sampling and pruning as they were"
            )

    def request(self) -> dict[str, Any]:
        """The part of SGLang's sampling_params that this support fixes."""
        sampling: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        sampling |= _UNTOUCHED
        if bounds := self._bounds:
            sampling["custom_params"] = bounds | {"temperature": self.temperature}
        return sampling

    def options(self) -> dict[str, Any]:
        """The other fields of SGLang's request that it needs."""
        options: dict[str, Any] = {"custom_logit_processor": PRUNE_TAIL} if self._bounds else {}
        if self.keeps_sets:
            options["return_sampling_mask"] = True
        return options

    @property
    def _bounds(self) -> dict[str, float]:
        shares = {"log_rho": self.engine_rho, "log_floor": self.tail_floor}
        # Greedy: the likeliest token is in every support.
        return {name: math.log(share) for name, share in shares.items() if share and self.temperature}


def request_seed(key: str, number: int) -> int:
    """Seed in [0, 2**63) of request `number` (prompt by prompt) among those that `key` names (config seed and step)."""
    digest = hashlib.blake2b(f"{key}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
