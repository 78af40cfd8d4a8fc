"""Checks of `megatron-rl rollout` where it writes demonstrations: keys that do nothing, and what cannot be recorded."""

from __future__ import annotations

from megatron_rl.config import Config, DemonstrationsConfig
from megatron_rl.errors import UserError
from megatron_rl.rollout.sampling import SamplingSupport


def check_demonstrations(config: Config, vocabulary: int | None = None) -> None:
    """Errors: UserError naming a key of rollout.demonstrations that does nothing, or cannot be.

    vocabulary: tokens that the model has, where that is known.
    """
    settings, default = config.rollout.demonstrations, DemonstrationsConfig()
    key = "config: rollout.demonstrations"
    if settings.min_reward is None:
        for name in vars(default):
            if getattr(settings, name) != getattr(default, name):
                raise UserError(f"{key}.{name} does nothing without min_reward; set min_reward, or leave {name} out")
        return
    if settings.max_tokens is not None and settings.max_tokens < settings.min_tokens:
        raise UserError(
            f"{key}.max_tokens = {settings.max_tokens} is below min_tokens = {settings.min_tokens}; swap them"
        )
    if not settings.top_log_probs:
        return
    wanted = f"{key}.top_log_probs = {settings.top_log_probs}"
    if config.rollout.load:
        raise UserError(f"{wanted}: rollout.load asks no engine; leave one of them out")
    support = SamplingSupport.from_config(config.rollout.sampling, config.pruning)
    if support != SamplingSupport():
        changed = [n for n, value in vars(support).items() if value != getattr(SamplingSupport(), n)]
        raise UserError(
            f"{wanted} records the plain policy, and sampling changes it ({', '.join(changed)}); set"
            " rollout.sampling.temperature: 1.0, top_p: 1.0, top_k: -1, and leave tail_floor and pruning out"
        )
    if vocabulary is not None and settings.top_log_probs > vocabulary:
        raise UserError(f"{wanted}: the model has {vocabulary} tokens; lower it")
