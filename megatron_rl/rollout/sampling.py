"""The sampling contract: one object says from which support a token was drawn, for the sampler and for the loss."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass
from typing import Any

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
PRUNING = "megatron_rl_plugin.pruning", "PruneTail"
"""Module and class of the logit processor that prunes in the engine."""


@dataclass(frozen=True)
class SamplingSupport:
    """Temperature and truncation under which tokens are drawn and under which both sides' log-probs are taken.

    Log-probs of engine and trainer are always over the same kind of renormalized support. Nothing truncated: the whole
    vocabulary. min_p (pruning.rho): each side's own tokens within min_p of its likeliest one (papers/000, def. 5.1).
    top_p, top_k: the tokens that the engine kept, which it sends along. Log-probs of a truncated engine against those
    of the whole vocabulary would put log(kept mass) into every importance ratio.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    tail_floor: float = 0.0
    """A fault of the engine, of which the trainer knows nothing: no token that is not pruned has a smaller share of the likeliest
    one's probability than this."""

    @classmethod
    def from_config(cls, config: SamplingConfig, pruning: PruningConfig) -> SamplingSupport:
        """Errors: UserError naming the key, for what the engine cannot sample or cannot tell."""
        min_p, floor = pruning.rho if pruning.enabled else 0.0, config.tail_floor or 0.0
        support = cls(config.temperature, config.top_p, config.top_k, min_p, floor)
        key = "config: rollout.sampling"
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
        """Whether the engine's kept set goes with every token."""
        return (self.top_p < 1.0 or self.top_k > 0) and self.temperature > 0

    @property
    def has_processor(self) -> bool:
        """Whether the engine bounds the tail by a logit processor of ours."""
        return bool(self._bounds)

    @property
    def log_rho(self) -> float | None:
        """For `ops.masked_log_softmax`; None: nothing is pruned."""
        return math.log(self.min_p) if self.min_p else None

    def check_recorded(self, recorded: dict[str, float]) -> None:
        """Errors: ValueError where a recorded trajectory was sampled under another support."""
        recorded = _WHOLE | recorded  # the first releases neither truncated nor said so
        pairs = [(name, recorded[name], mine) for name, mine in asdict(self).items() if name in recorded]
        apart = [f"{name} {value:g} and not {mine:g}" for name, value, mine in pairs if value != mine]
        if apart:
            raise ValueError(
                f"sampled under {', '.join(apart)} (min_p is pruning.rho, 0 without pruning): the log-probs of both sides"
                " would be over different supports; set rollout.sampling and pruning as they were"
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
        options: dict[str, Any] = {"custom_logit_processor": _by_name(*PRUNING)} if self._bounds else {}
        if self.keeps_sets:
            options["return_sampling_mask"] = True
        return options

    @property
    def _bounds(self) -> dict[str, float]:
        """Logarithms of the shares by which the engine's processor bounds the tail."""
        shares = {"log_rho": self.min_p, "log_floor": self.tail_floor}
        # Greedy: the likeliest token is in every support.
        return {name: math.log(share) for name, share in shares.items() if share and self.temperature}


def request_seed(key: str, number: int) -> int:
    """Seed in [0, 2**63) of request `number` (prompt by prompt) among those that `key` names (config seed and step)."""
    digest = hashlib.blake2b(f"{key}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _by_name(module: str, name: str) -> str:
    """SGLang's form of a logit processor: a pickle (protocol 0) that names a class which the server imports."""
    return json.dumps({"callable": f"c{module}\n{name}\n.".encode().hex()})
