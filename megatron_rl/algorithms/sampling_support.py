"""Sampling support: the set of tokens that the engine samples from. The sampler and the loss share one description of it."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Any

from megatron_rl_plugin.processors import PRUNE_TAIL

from megatron_rl.config import PruningConfig, SamplingConfig
from megatron_rl.errors import UserError

MOST_KEPT = 4096
"""Largest top_k for which SGLang can return the tokens that its sampler kept (option return_sampling_mask)."""
ROOM_FOR_TIES = 8192
"""Largest number of kept tokens that SGLang returns. With ties at the threshold, more may be kept; the request then fails."""
_WHOLE = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "tail_floor": 0.0}
_UNTOUCHED = {"min_p": 0.0, "frequency_penalty": 0.0, "presence_penalty": 0.0, "repetition_penalty": 1.0}
"""Options sent in every request. A server may have other defaults (--preferred-sampling-params), and log-probs would not show
their effect."""


@dataclass(frozen=True)
class SamplingSupport:
    """Temperature and truncation of sampling, used for the log-probs of both the engine and the trainer.

    Engine and trainer always compute log-probs over the same kind of renormalized support:

    no truncation: the whole vocabulary.
    min_p (pruning.rho): the tokens whose probability is at least min_p times the largest one (Li et al., def. 5.1). Engine and
    trainer each use their own probabilities and renormalize over their own set (def. 5.2). The engine's set may be smaller
    (engine_min_p: pruning.engine_rho). The ratio then has the factor Z_engine / Z_trainer = 1 - m, with m the share of the
    tokens between the two thresholds.
    top_p, top_k: the tokens that the engine kept and returned with each response token.

    If the engine truncated and the trainer did not, log(kept mass) would enter every importance ratio.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    engine_min_p: float | None = None
    """min_p of the engine; None: the same as min_p."""
    tail_floor: float = 0.0
    """Deliberate error for experiments, in the engine only: each token that is not pruned gets at least this fraction of the
    largest probability. The trainer does not take it into account."""

    @classmethod
    def from_config(cls, config: SamplingConfig, pruning: PruningConfig) -> SamplingSupport:
        """Build the support from the config.

        Errors: UserError that names the key, if the engine cannot sample this support or cannot return its kept tokens.
        """
        support = cls(config.temperature, config.top_p, config.top_k, tail_floor=config.tail_floor or 0.0)
        if pruning.enabled:
            support = replace(support, min_p=pruning.rho, engine_min_p=pruning.engine_rho)
        key = "config: rollout.sampling"
        if support.engine_rho < support.min_p:
            raise UserError(
                f"config: pruning.engine_rho = {support.engine_rho:g} is below rho = {support.min_p:g}: the engine would sample"
                " tokens outside the trainer's set, which have ratio 0 and no gradient; set engine_rho: null, or above rho"
            )
        if support.top_k < -1 or support.top_k == 0:
            raise UserError(
                f"{key}.top_k = {support.top_k}: set -1 to keep all tokens, or 2 to {MOST_KEPT} to keep the likeliest ones"
            )
        if not support.keeps_sets:
            return support
        if support.min_p:
            raise UserError(
                f"{key}.top_p or top_k with pruning.enabled: the engine can return log-probs for only one kind of truncation;"
                " set top_p: 1.0 and top_k: -1, or pruning.enabled: false"
            )
        if not 2 <= support.top_k <= MOST_KEPT:
            valid = 1024 if support.top_k != 1 else 2
            raise UserError(
                f"{key}: top_p = {support.top_p:g} with top_k = {support.top_k}: the engine returns the kept tokens only"
                f" for a top_k of 2 to {MOST_KEPT}; without them the trainer's log-probs would be over another"
                f" support; set top_k: {valid}, or truncate with pruning.enabled instead"
            )
        return support

    @property
    def keeps_sets(self) -> bool:
        """True if the engine returns, with every token, the set of tokens that its sampler kept."""
        return (self.top_p < 1.0 or self.top_k > 0) and self.temperature > 0

    @property
    def has_processor(self) -> bool:
        """True if the engine needs this package's logit processor (PRUNE_TAIL)."""
        return bool(self._bounds)

    @property
    def log_rho(self) -> float | None:
        """Logarithm of the trainer's pruning threshold, for `ops.masked_log_softmax`; None without vocabulary pruning."""
        return math.log(self.min_p) if self.min_p else None

    @property
    def engine_rho(self) -> float:
        """Pruning threshold of the engine; 0 without vocabulary pruning."""
        return self.min_p if self.engine_min_p is None else self.engine_min_p

    @property
    def unpruned(self) -> SamplingSupport:
        """The same support without vocabulary pruning in engine and trainer."""
        return replace(self, min_p=0.0, engine_min_p=None)

    def sampled(self) -> dict[str, float]:
        """Return the support under which the engine sampled, as trajectories record it. min_p is the engine's value."""
        found = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k, "min_p": self.engine_rho}
        return found | {"tail_floor": self.tail_floor}

    def check_recorded(self, recorded: dict[str, float]) -> None:
        """Check that a recorded trajectory was sampled under this support. Errors: ValueError if not."""
        recorded = _WHOLE | recorded  # records of the first releases lack these keys: those releases did not truncate
        pairs = [(name, recorded[name], mine) for name, mine in self.sampled().items() if name in recorded]
        apart = [f"{name} {value:g} and not {mine:g}" for name, value, mine in pairs if value != mine]
        if apart:
            raise ValueError(
                f"sampled under {', '.join(apart)} (min_p is pruning.engine_rho or rho, 0 without pruning): the"
                " log-probs of both sides would be over different supports; set rollout.sampling and pruning to the values of"
                " the recording"
            )

    def request(self) -> dict[str, Any]:
        """Return the entries of SGLang's sampling_params that this support determines."""
        sampling: dict[str, Any] = {"temperature": self.temperature, "top_p": self.top_p, "top_k": self.top_k}
        sampling |= _UNTOUCHED
        if bounds := self._bounds:
            sampling["custom_params"] = bounds | {"temperature": self.temperature}
        return sampling

    def options(self) -> dict[str, Any]:
        """Return the fields that this support needs in SGLang's request, in addition to the sampling_params of `request`."""
        options: dict[str, Any] = {"custom_logit_processor": PRUNE_TAIL} if self._bounds else {}
        if self.keeps_sets:
            options["return_sampling_mask"] = True
        return options

    @property
    def _bounds(self) -> dict[str, float]:
        shares = {"log_rho": self.engine_rho, "log_floor": self.tail_floor}
        # Greedy sampling needs no bounds: the likeliest token is in every support.
        return {name: math.log(share) for name, share in shares.items() if share and self.temperature}


def request_seed(key: str, number: int) -> int:
    """Return the seed, in [0, 2**63), of one request.

    key: text made of config seed and step. number: index of the request within the step, counted prompt by prompt.
    """
    digest = hashlib.blake2b(f"{key}/{number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
