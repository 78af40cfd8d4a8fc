"""Has verl's own tests look at our functions: a plugin of pytest that puts ours in the place of verl's, by verl's definitions.

`test_against_verl.py` runs it. What has no counterpart here stays verl's. ASKED has those that a test has asked for.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from verl.trainer.ppo import core_algos, rollout_corr_helper

from megatron_rl.algorithms import advantages as ours
from megatron_rl.algorithms import correction, kl, losses
from megatron_rl.algorithms.segments import Segments

ASKED: set[str] = set()


def replaces(module, name: str):
    """Put a function in the place of `module.name`; it is given that one as its first argument."""

    def put(function):
        original = getattr(module, name)

        @functools.wraps(original)
        def asked(*args, **kwargs):
            ASKED.add(name)
            return function(original, *args, **kwargs)

        setattr(module, name, asked)
        return function

    return put


def _groups(index) -> torch.Tensor:
    return torch.from_numpy(np.unique(np.asarray(index), return_inverse=True)[1])


def _sample(whitened: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Ours divides by the population's deviation, verl by the sample's."""
    return whitened * torch.sqrt((mask.sum() - 1) / mask.sum())


def _segments(mask: torch.Tensor) -> Segments:
    rows = torch.arange(len(mask), device=mask.device)[:, None].expand(mask.shape)
    return Segments(rows.flatten(), len(mask))


@replaces(core_algos, "compute_gae_advantage_return")
def _gae(_, token_level_rewards, values, response_mask, gamma, lam):
    found, returns = ours.generalized(token_level_rewards, values, response_mask, gamma=gamma, lam=lam)
    return _sample(ours.batch_normalized(found, response_mask), response_mask), returns


@replaces(core_algos, "compute_grpo_outcome_advantage")
def _grpo(_, token_level_rewards, response_mask, index, epsilon=1e-6, norm_adv_by_std_in_grpo=True, config=None):
    rewards, groups = token_level_rewards.sum(-1), _groups(index)
    found = centered = ours.group_relative(rewards, groups, normalize=False)
    if norm_adv_by_std_in_grpo:
        sizes = groups.bincount()[groups]
        deviation = centered / ours.group_relative(rewards, groups)
        found = centered / (deviation * torch.sqrt(sizes / (sizes - 1)) + epsilon)
    return (found[:, None] * response_mask,) * 2


@replaces(core_algos, "compute_rloo_outcome_advantage")
def _rloo(_, token_level_rewards, response_mask, index, **_kwargs):
    found = ours.leave_one_out(token_level_rewards.sum(-1), _groups(index))
    return (found[:, None] * response_mask,) * 2


@replaces(core_algos, "compute_reinforce_plus_plus_outcome_advantage")
def _reinforce_plus_plus(_, token_level_rewards, response_mask, config=None, **_kwargs):
    nothing = torch.zeros_like(token_level_rewards)
    _, returns = ours.generalized(token_level_rewards, nothing, response_mask, gamma=config.gamma, lam=1.0)
    return _sample(ours.batch_normalized(returns, response_mask), response_mask), returns


ESTIMATORS = {"k1+": "k1", "kl+": "k1", "k2": "k2", "mse": "k2", "k3": "k3", "low_var_kl": "k3"}


@replaces(core_algos, "kl_penalty")
def _kl(original, logprob, ref_logprob, kl_penalty):
    if kl_penalty not in ESTIMATORS:
        return original(logprob, ref_logprob, kl_penalty)
    found = kl.estimate(logprob, ref_logprob, ESTIMATORS[kl_penalty])
    return found.clamp(max=10) if ESTIMATORS[kl_penalty] == "k3" else found


@replaces(core_algos, "agg_loss")
def _aggregate(
    original, loss_mat, loss_mask, loss_agg_mode, dp_size=1, batch_num_tokens=None, global_batch_size=None, **more
):
    kinds = {"token-mean": "token_mean", "token-sum": "token_mean", "seq-mean-token-mean": "sequence_mean"}
    if loss_agg_mode not in kinds:
        return original(loss_mat, loss_mask, loss_agg_mode, dp_size, batch_num_tokens, global_batch_size, **more)
    weights = losses.loss_weights(loss_mask.bool().flatten(), _segments(loss_mask), kinds[loss_agg_mode])
    totals = {
        "token-mean": batch_num_tokens or loss_mask.sum(),
        "token-sum": 1,
        "seq-mean-token-mean": global_batch_size or loss_mask.any(-1).sum(),
    }
    return (loss_mat.flatten() * weights).sum() / totals[loss_agg_mode] * dp_size


@replaces(core_algos, "compute_value_loss")
def _value_loss(_, vpreds, returns, values, response_mask, cliprange_value, loss_agg_mode="token-mean", **more):
    terms, clipped = losses.value_terms(vpreds, values, returns, clip=cliprange_value)
    share = (clipped & response_mask.bool()).sum() / response_mask.sum()
    return core_algos.agg_loss(terms, response_mask, loss_agg_mode, **more), share


@replaces(core_algos, "compute_policy_loss_vanilla")
def _vanilla(
    original,
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode="token-mean",
    config=None,
    rollout_is_weights=None,
):
    """Our terms, but for those of verl's dual clip. Metrics are verl's."""
    whole = old_log_prob, log_prob, advantages, response_mask
    _, metrics = original(*whole, loss_agg_mode, config, rollout_is_weights)
    low, high = (getattr(config, f"clip_ratio_{end}") or config.clip_ratio for end in ("low", "high"))
    packed = [x.flatten() for x in (log_prob, old_log_prob, advantages, response_mask.bool())]
    inputs = losses.LossInputs(*packed, _segments(response_mask), low, high)
    terms = losses.policy_terms(losses.POLICY_LOSSES["ppo"], inputs)[0].view_as(log_prob)
    dual = (advantages < 0) & (torch.exp(log_prob - old_log_prob) > config.clip_ratio_c)
    terms = torch.where(dual, -advantages * config.clip_ratio_c, terms)
    if rollout_is_weights is not None:
        terms = terms * rollout_is_weights
    return core_algos.agg_loss(terms, response_mask, loss_agg_mode, **config.global_batch_info), metrics


def _weights(log_ratio, mask, **settings) -> torch.Tensor:
    flat = log_ratio.flatten(), mask.bool().flatten(), _segments(mask)
    found = correction.token_weights(*flat, correction.Correction(**settings)).weights
    return found.view_as(log_ratio).to(log_ratio.dtype)


@replaces(rollout_corr_helper, "compute_rollout_correction_weights")
def _correction(original, log_ratio, response_mask, rollout_is="token", rollout_is_threshold=2.0, **more):
    """Metrics, and the mean that a batch is divided by, are verl's."""
    found, metrics = original(log_ratio, response_mask, rollout_is, rollout_is_threshold, **more)
    if more.get("rollout_is_batch_normalize"):
        return found, metrics
    high, low = rollout_corr_helper._parse_rollout_is_threshold(rollout_is_threshold)
    mode = "truncate" if low is None else "mask"
    return _weights(log_ratio, response_mask, mode=mode, level=rollout_is, low=low, high=high), metrics


@replaces(rollout_corr_helper, "compute_rollout_rejection_mask")
def _rejection(original, log_ratio, response_mask, rollout_rs="token_k1", rollout_rs_threshold=None):
    mask, metrics = original(log_ratio, response_mask, rollout_rs, rollout_rs_threshold)
    options = [option.strip() for option in rollout_rs.split(",")]
    bounds = rollout_corr_helper._parse_rollout_rs_thresholds(options, rollout_rs_threshold)
    levels = {"token": "token", "seq_sum": "sequence", "seq_mean": "geometric"}
    kept = response_mask.bool()
    for option in options:
        level, _, statistic = option.rpartition("_")
        low, high = bounds[option]["lower"], bounds[option]["upper"]
        if level not in levels:  # the largest of a sequence's tokens
            return mask, metrics
        if statistic == "k1":
            settings = {"mode": "mask", "level": levels[level], "low": 1 / high, "high": 1 / low}
        else:
            settings = {"reject": statistic, "reject_level": levels[level], "reject_above": high}
        kept = kept & (_weights(log_ratio, response_mask, **settings) != 0)
    return kept.to(response_mask.dtype), metrics


def pytest_sessionfinish() -> None:
    print(f"\nours were asked of {', '.join(sorted(ASKED))}")
