"""Creates the hooks of a trainer's updates from the config."""

from __future__ import annotations

from megatron_rl.config import PREDICTING, Config, ModelConfig
from megatron_rl.config.registry import resolve
from megatron_rl.errors import UserError
from megatron_rl.hooks.guards import AgreementFloor, OnPolicy, TargetKL
from megatron_rl.hooks.keep_zeros import KeepZeros
from megatron_rl.hooks.predictors import Predictors
from megatron_rl.hooks.router_balance import ExpertBias, Utilization
from megatron_rl.hooks.routing_replay import RoutingReplay
from megatron_rl.trainer.hooks import UpdateHook
from megatron_rl.vp2o.transform import Stein
from megatron_rl.vp2o.trust_region import TrustRegion


def update_hooks(config: Config, *, scores_alone: bool = False) -> list[UpdateHook]:
    """Return the hooks of a policy, in the order in which they are called. scores_alone: the policy is never updated.

    Errors: UserError for a name in config.hooks that creates no hook.
    """
    routing = config.routing
    hooks: list[UpdateHook] = [
        RoutingReplay(routing.source, gates=routing.replay_gates, give_up_below=routing.give_up_below)
    ]
    if config.routing.source in PREDICTING:
        hooks.append(Predictors(config.routing, config.optimizer, config.batch.updates_per_step))
    if scores_alone:
        return hooks
    if config.vp2o.enabled:
        hooks.append(stein := Stein(config.vp2o))
        if config.vp2o.trust_region is not None:
            hooks.append(TrustRegion(config.vp2o, stein, config.routing.source))
    if config.rollout.agreement_floor is not None:
        hooks.append(AgreementFloor(config.rollout.agreement_floor))
    if config.algorithm.on_policy:
        hooks.append(OnPolicy())
    if config.algorithm.target_kl is not None:
        hooks.append(TargetKL(config.algorithm.target_kl, config.batch.updates))
    # Last, so that gradients that other hooks give to zero weights are removed too.
    return [*hooks, *(_outside(name, config) for name in config.hooks), *_kept_zeros(config.model.keep_zeros)]


def data_hooks(model: ModelConfig) -> list[UpdateHook]:
    """Return the hooks of a run that learns from data alone, without rollouts."""
    rate = model.moe_bias_update_rate
    return [Utilization(), *([ExpertBias(rate)] if rate else []), *_kept_zeros(model.keep_zeros)]


def _kept_zeros(keep: bool | list[str]) -> list[UpdateHook]:
    return [KeepZeros(keep)] if keep else []


def _outside(name: str, config: Config) -> UpdateHook:
    hook = resolve("hook", name, {}, "hooks")(config)
    if not isinstance(hook, UpdateHook):
        raise UserError(f"config: hooks: {name} returned {hook!r:.60}; it must return an UpdateHook")
    return hook
