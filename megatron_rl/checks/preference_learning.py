"""Checks of reward models, references and judges: refuses folders that do not fit, and reward parts that cannot work."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from megatron_rl.checks.refusals import Refusal
from megatron_rl.config import (
    AlgorithmConfig,
    DPOConfig,
    JudgeConfig,
    ModelConfig,
    ParallelConfig,
    RewardModelConfig,
    RewardsConfig,
    RolloutConfig,
    ScorerConfig,
)
from megatron_rl.config.plan import Kind
from megatron_rl.credentials import hide, key_of
from megatron_rl.data.hub import check_folder
from megatron_rl.distributed.processes import is_loopback
from megatron_rl.errors import UserError
from megatron_rl.models.families import is_classifier
from megatron_rl.models.hf_folder import check_same_tokenizer
from megatron_rl.models.parallel_check import check_parallel, read_hf_config
from megatron_rl.rewards.judge import FIELD
from megatron_rl.trainer.compute_advantages import OF_STEPS

log = logging.getLogger(__name__)


def pooling(model: ModelConfig, reward_model: RewardModelConfig) -> Iterator[Refusal]:
    """Refuse to continue training a reward model with a pooling other than its own."""
    hf_config = read_hf_config(model.path)
    known = getattr(hf_config, "reward_pooling", "last")
    yield Refusal(
        is_classifier(hf_config) and known != reward_model.pooling,
        f"reward_model.pooling = {reward_model.pooling}, but the reward model {model.path} was trained with {known};"
        f" set pooling: {known}",
    )


def reference(kind: Kind, model: ModelConfig, dpo: DPOConfig, policy_reference: str | None) -> None:
    """Check the folder of the reference model. Errors: UserError if it is missing, or has another tokenizer."""
    key, folder = ("dpo.reference", dpo.reference) if kind == "dpo" else ("algorithm.kl.reference", policy_reference)
    if folder is not None:
        check_folder(folder, f"config: {key}")
        check_same_tokenizer(model.path, folder, key)


def scorers(rewards: RewardsConfig, model: ModelConfig, parallel: ParallelConfig, world_size: int) -> Iterator[Refusal]:
    """Refuse reward models whose head, tokenizer, step separator or sizes do not fit the run."""
    for name, scorer in rewards.models.items():
        key = f"rewards.models.{name}"
        if scorer.path is None or scorer.address is not None:
            continue
        check_folder(scorer.path, f"config: {key}.path")
        hf_config = read_hf_config(scorer.path)
        yield Refusal(
            not is_classifier(hf_config),
            f"{key}.path: {scorer.path} has no head with a single output; give the folder of a reward model, such as"
            " megatron-rl reward writes",
        )
        check_parallel(hf_config, parallel, world_size)
        check_same_tokenizer(model.path, scorer.path, f"{key}.path")
        if scorer.steps:
            yield from _separator(scorer, getattr(hf_config, "reward_step_separator", None), key)


def _separator(scorer: ScorerConfig, learned: str | None, key: str) -> Iterator[Refusal]:
    """Refuse a step separator that is unknown, or that differs from the one in the reward model's training."""
    given = scorer.step_separator
    yield Refusal(
        not (learned or given),
        f"{key}.steps: {scorer.path} does not name the text that ends a step (reward_step_separator in config.json,"
        f" which megatron-rl reward writes if it learns from data.steps_key); set {key}.step_separator",
    )
    yield Refusal(
        learned and given and learned != given,
        f"{key}.step_separator = {given!r}, but {scorer.path} was trained with steps that end with {learned!r}; leave"
        " it out",
    )


def process_rewards(
    kind: Kind, rewards: RewardsConfig, rollout: RolloutConfig, algorithm: AlgorithmConfig
) -> Iterator[Refusal]:
    """Refuse process rewards that cannot be computed, or that the advantage cannot use."""
    models = {f"rewards.models.{name}": scorer for name, scorer in rewards.models.items() if scorer.steps}
    for key, scorer in models.items():
        yield Refusal(
            scorer.address is not None,
            f"{key}.steps: only the trainer's processes can score steps, not a server; remove address, and set path to"
            " the model's folder",
        )
        yield Refusal(
            scorer.step_aggregation == "product" and not scorer.sigmoid,
            f"{key}.steps: step_aggregation: product needs probabilities; set sigmoid: true, or step_aggregation: min",
        )
        yield Refusal(
            rollout.program != "single_turn",
            f"{key}.steps: a response of rollout.program = {rollout.program} cannot be split into steps; set steps:"
            " false",
        )
    placed = [key for key, scorer in models.items() if scorer.step_placement == "tokens"]
    if kind != "train" or not placed:
        return
    yield Refusal(
        algorithm.advantage not in OF_STEPS,
        f"{placed[0]}.step_placement = tokens: algorithm.advantage = {algorithm.advantage} cannot use rewards of"
        f" steps; set one of {', '.join(OF_STEPS)}, or step_placement: response",
    )
    yield Refusal(
        len(placed) > 1,
        f"{' and '.join(placed[:2])} both place rewards at the ends of steps; set step_placement: response for one of"
        " them",
    )


def judges(rewards: RewardsConfig) -> Iterator[Refusal]:
    """Refuse judges that cannot be reached, or that could give no valid verdict."""
    for name, judge in rewards.judges.items():
        key = f"rewards.judges.{name}"
        yield Refusal(name in rewards.models, f"{key}: rewards.models has a part with this name; choose another name")
        yield from _judge(judge, key)


def _judge(judge: JudgeConfig, key: str) -> Iterator[Refusal]:
    url, (low, high) = urlsplit(judge.address), judge.scale
    groups = None
    try:
        groups = re.compile(judge.pattern).groups if judge.pattern is not None else 1
    except (re.error, RecursionError, OverflowError) as error:
        raise UserError(
            f"config: {key}.pattern = {judge.pattern!r}: it is not a regular expression ({error})"
        ) from None
    yield Refusal(
        url.scheme not in ("http", "https") or not url.hostname,
        f"{key}.address = {hide(judge.address)!r}: give the address of an OpenAI-compatible server, such as"
        " http://host:30000/v1",
    )
    yield Refusal(not judge.model, f"{key}.model is empty; set it to the name of the server's model")
    yield Refusal(
        "response" not in FIELD.findall(judge.prompt),
        f"{key}.prompt has no {{response}}, so the judge would not see the response; add {{response}}",
    )
    yield Refusal(
        not low < high,
        f"{key}.scale = [{low:g}, {high:g}]: the best verdict must be larger than the worst, as in [0, 10]",
    )
    yield Refusal(
        groups != 1,
        f"{key}.pattern = {judge.pattern!r}: it has {groups} groups; keep one group for the number, and write (?:...)"
        " for others",
    )
    yield Refusal(
        judge.pattern is not None and judge.json_key is not None,
        f"{key}.pattern and .json_key are both given; leave one of them out",
    )
    if key_of(judge.api_key, f"{key}.api_key") and url.scheme == "http" and not is_loopback(str(url.hostname)):
        log.warning(
            f"{key}: its key is sent to {url.hostname} unencrypted; use an https address, unless the network is private"
        )
