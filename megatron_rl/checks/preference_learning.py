"""Checks of what learns from preferences, and of reward models: keys that do nothing, folders that do not fit."""

from __future__ import annotations

import logging
import re
from urllib.parse import urlsplit

from megatron_rl.checks.keys import check_preference_keys
from megatron_rl.config import Config, JudgeConfig, ScorerConfig
from megatron_rl.config.credentials import hide, key_of
from megatron_rl.config.plan import Kind
from megatron_rl.data.hub import check_folder
from megatron_rl.distributed.processes import is_loopback
from megatron_rl.errors import UserError
from megatron_rl.models.families import is_classifier
from megatron_rl.models.hf_folder import check_same_tokenizer
from megatron_rl.models.parallel_check import check_parallel, read_hf_config
from megatron_rl.rewards.judge import FIELD
from megatron_rl.trainer.compute_advantages import OF_STEPS

log = logging.getLogger(__name__)


def check_preferences(config: Config, kind: Kind, world_size: int) -> None:
    """Errors: UserError naming a key that does nothing here, or a folder that cannot be used."""
    check_preference_keys(config, kind)
    if kind == "reward":
        _check_pooling(config)
    if kind == "dpo":
        _check_reference(config.model.path, config.dpo.reference, "dpo.reference")
    if kind == "train":
        _check_reference(config.model.path, config.policy_reference, "algorithm.kl.reference")
    if kind in ("train", "sample"):
        _check_scorers(config, kind, world_size)


def _check_pooling(config: Config) -> None:
    hf_config, pooling = read_hf_config(config.model.path), config.reward_model.pooling
    known = getattr(hf_config, "reward_pooling", "last")
    if is_classifier(hf_config) and known != pooling:
        raise UserError(
            f"config: reward_model.pooling = {pooling}, and the reward model {config.model.path} has learned with"
            f" {known}; set pooling: {known}"
        )


def _check_reference(policy: str, reference: str | None, key: str) -> None:
    if reference is not None:
        check_folder(reference, f"config: {key}")
        check_same_tokenizer(policy, reference, key)


def _check_scorers(config: Config, kind: Kind, world_size: int) -> None:
    for name, model in config.rewards.models.items():
        key = f"rewards.models.{name}"
        if model.path is None or model.address is not None:
            continue
        check_folder(model.path, f"config: {key}.path")
        hf_config = read_hf_config(model.path)
        if not is_classifier(hf_config):
            raise UserError(
                f"config: {key}.path: {model.path} has no head of one number; give the folder of a reward model, such as"
                " megatron-rl reward writes"
            )
        check_parallel(hf_config, config.parallel, world_size)
        check_same_tokenizer(config.model.path, model.path, f"{key}.path")
        if model.steps:
            _check_separator(model, getattr(hf_config, "reward_step_separator", None), key)
    _check_steps(config, kind)
    for name, judge in config.rewards.judges.items():
        if name in config.rewards.models:
            raise UserError(f"config: rewards.judges.{name}: rewards.models has a part of that name; choose another")
        _check_judge(judge, f"rewards.judges.{name}")


def _check_separator(model: ScorerConfig, learned: str | None, key: str) -> None:
    """Steps are parted as those that the model has learned from."""
    if not (learned or model.step_separator):
        raise UserError(
            f"config: {key}.steps: {model.path} does not say what ends a step (reward_step_separator in config.json, where"
            f" megatron-rl reward has learned from data.steps_key); set {key}.step_separator"
        )
    if learned and model.step_separator and learned != model.step_separator:
        raise UserError(
            f"config: {key}.step_separator = {model.step_separator!r}, and {model.path} has learned from steps that end with"
            f" {learned!r}; leave it out"
        )


def _check_steps(config: Config, kind: Kind) -> None:
    """Refuse process rewards that cannot be given, or that the advantage knows nothing of."""
    placed = []
    for name, model in config.rewards.models.items():
        key = f"rewards.models.{name}"
        if not model.steps:
            continue
        for refused, problem in (
            (
                model.address is not None,
                "the trainer's processes score steps, and a server none; leave address out, and give the folder as path",
            ),
            (
                model.step_aggregation == "product" and not model.sigmoid,
                "step_aggregation: product multiplies probabilities; set sigmoid: true, or step_aggregation: min",
            ),
            (
                config.rollout.program != "single_turn",
                f"a response of rollout.program = {config.rollout.program} is no text in steps; set steps: false",
            ),
        ):
            if refused:
                raise UserError(f"config: {key}.steps: {problem}")
        placed += [key] if model.step_placement == "tokens" else []
    if kind != "train" or not placed:
        return
    if config.algorithm.advantage not in OF_STEPS:
        raise UserError(
            f"config: {placed[0]}.step_placement = tokens: algorithm.advantage = {config.algorithm.advantage} knows no rewards"
            f" of steps; set one of {', '.join(OF_STEPS)}, or step_placement: response"
        )
    if len(placed) > 1:
        raise UserError(
            f"config: {placed[0]} and {placed[1]} both have rewards at the ends of steps; set step_placement: response for one"
        )


def _check_judge(judge: JudgeConfig, key: str) -> None:
    """Refuse a judge that cannot be asked, or whose verdicts would be none."""
    url, (low, high) = urlsplit(judge.address), judge.scale
    groups = None
    try:
        groups = re.compile(judge.pattern).groups if judge.pattern is not None else 1
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(f"config: {key}.pattern = {judge.pattern!r}: is no regular expression ({error})") from None
    for refused, problem in (
        (
            url.scheme not in ("http", "https") or not url.hostname,
            f".address = {hide(judge.address)!r}: give that of an OpenAI-compatible server, such as http://host:30000/v1",
        ),
        (not judge.model, ".model is empty; name the model that the server has"),
        (
            "response" not in FIELD.findall(judge.prompt),
            ".prompt has no {response}: the judge would not see what it judges; put it in",
        ),
        (
            not low < high,
            f".scale = [{low:g}, {high:g}]: give the worst verdict and a larger best one, such as [0, 10]",
        ),
        (
            groups != 1,
            f".pattern = {judge.pattern!r}: has {groups} groups; one has to be the number, others are (?:...)",
        ),
        (
            judge.pattern is not None and judge.json_key is not None,
            ".pattern and .json_key are both given; leave one of them out",
        ),
    ):
        if refused:
            raise UserError(f"config: {key}{problem}")
    if key_of(judge.api_key, f"{key}.api_key") and url.scheme == "http" and not is_loopback(str(url.hostname)):
        log.warning(
            f"{key}: its key goes to {url.hostname} unencrypted; give an https address, unless the network is yours"
        )
