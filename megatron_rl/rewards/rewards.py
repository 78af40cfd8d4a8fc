"""Computation of all rewards: verifiers, reward models (`rewards.models`), judges (`rewards.judges`), length and shaping."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from megatron_rl.algorithms.advantages import mean_and_variance, moments
from megatron_rl.config import RewardsConfig, ScorerConfig
from megatron_rl.credentials import key_of
from megatron_rl.data.packing import Labels
from megatron_rl.data.sequence import Sequence as Tokens
from megatron_rl.data.trajectory import OVERLONG, Trajectory
from megatron_rl.distributed.parallel import Ranks
from megatron_rl.metrics.reduce import Metrics, mean
from megatron_rl.models.hf_folder import read_tokenizer
from megatron_rl.rewards.judge import Judge, Judgments
from megatron_rl.rewards.shaping import overlong
from megatron_rl.rewards.verify import give_rewards
from megatron_rl.servers.scores import ask_all
from megatron_rl.tasks import Prompt, Task, combine, encode_text
from megatron_rl.tasks.chat import render
from megatron_rl.tasks.preferences import encode_steps, last_tokens, steps_of
from megatron_rl.trainer.critic import everywhere
from megatron_rl.trainer.scored_spans import with_last_state
from megatron_rl.trainer.trainer import Trainer

AGGREGATIONS: dict[str, Callable[[list[float]], float]] = {
    "min": min,
    "mean": fmean,
    "last": itemgetter(-1),
    "product": math.prod,
}
"""Functions that reduce the scores (at least one) of a response's steps to one number, by config.step_aggregation."""


def names_of(config: RewardsConfig) -> list[str]:
    """Return the names of the reward parts for finished responses: reward models, judges, and the length penalty."""
    return [*config.models, *config.judges, *([OVERLONG] if config.overlong_buffer else [])]


class Rewards:
    """Rewards of a run from verifiers, reward models, judges and length, and the shaped rewards that advantages use.

    Every process has this object and calls it.
    """

    def __init__(
        self,
        config: RewardsConfig,
        ranks: Ranks,
        task: Task,
        *,
        max_new_tokens: int,
        tokenizer: PreTrainedTokenizerBase | None = None,
        zero_truncated: bool = False,
        shape: Callable[[list[Trajectory]], None] = lambda trajectories: None,
        folder: Path | None = None,
    ) -> None:
        """tokenizer: the policy's tokenizer; None: trajectories already contain their verifiers' results (rollout.load).

        zero_truncated: a response that a limit ended has reward 0 (agent.on_truncation). shape: sets the rewards that
        advantages use (`set_outcome_rewards`). folder: folder for the scores of judges.
        """
        self._config, self._ranks, self._task, self._longest = config, ranks, task, max_new_tokens
        self._tokenizer, self._zero_truncated, self._shape = tokenizer, zero_truncated, shape
        self.models: dict[str, Trainer] = {}
        """Reward models in the trainer's processes, loaded by `build`."""
        self._servers = {n: Server(n, m, config.timeout_s) for n, m in config.models.items() if m.address}
        self._judges = {
            name: Judge(name, judge, Judgments(judge.cache, folder, name, ranks.data_rank if folder else 0))
            for name, judge in config.judges.items()
            if ranks.is_leader
        }
        self._tokenizers: dict[str, PreTrainedTokenizerBase] = {}
        """Tokenizers of process reward models."""
        self._measured: Metrics = {}
        self._seen = {name: torch.zeros(3, dtype=torch.float64) for name, m in config.models.items() if m.normalize}
        """Moments (count, sum, sum of squares) of all scores of the run so far, by reward model with `normalize`."""

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Check that each judge answers. prompts: examples of prompts for the judges.

        Errors: UserError on all processes if a judge does not answer, or needs an answer that a prompt lacks.
        """

        def ask() -> None:
            for judge in self._judges.values():
                judge.check(prompts)

        if self._config.judges:
            self._ranks.main_does(ask, patient=True)

    def build(self, make: Callable[[str], Trainer]) -> None:
        """Load the reward models of the trainer's processes.

        make: function that loads the model in a folder, with its value head.
        """
        own = {name: model.path for name, model in self._config.models.items() if not model.address}
        self.models = {name: make(path or "") for name, path in own.items()}
        self._tokenizers = {
            name: read_tokenizer(path or "") for name, path in own.items() if self._config.models[name].steps
        }

    def score(
        self,
        trajectories: list[Trajectory],
        prompts: Sequence[Prompt],
        *,
        learns: bool = False,
        task: Task | None = None,
    ) -> None:
        """Set reward parts and rewards of this leader's trajectories. Collective.

        prompts: the prompts that group ids refer to. task: task that verifies and weighs the trajectories, if it is not the
        run's. learns: True for training. Scores are then normalized and clipped, and enter the mean and standard deviation of
        the normalization; `outcome_reward` is set too. Scores of an evaluation are not normalized, so that all evaluations of a
        run have the same scale. Masked trajectories are not scored. Errors: UserError on all processes, for a server that does
        not answer.
        """
        task = task or self._task
        self.verify(trajectories, prompts, task)
        if names_of(self._config):
            self._score_finished(trajectories, prompts, task, learns=learns)
        if learns:
            self._shape(trajectories)

    def verify(self, trajectories: list[Trajectory], prompts: Sequence[Prompt], task: Task | None = None) -> None:
        """Run the task's verifiers on this leader's trajectories, unless this has been done. `score` calls this method too.

        Errors: UserError for a reward part that the task does not have.
        """
        if self._tokenizer is not None:
            options = {"zero_truncated": self._zero_truncated}
            give_rewards(task or self._task, self._tokenizer, prompts, trajectories, **options)

    def _score_finished(
        self, trajectories: list[Trajectory], prompts: Sequence[Prompt], task: Task, *, learns: bool
    ) -> None:
        """Add the reward parts of reward models, judges and length, and compute the weighted rewards again."""
        self._measured = {} if learns else self._measured
        self._ask_judges(trajectories, prompts, learns=learns)
        judged = [t for t in trajectories if self._counts(t)]
        for name, settings in self._config.models.items():
            if settings.steps:
                self._score_steps(name, settings, judged, learns=learns)
                continue
            if server := self._servers.get(name):
                ask = partial(server.score, judged, prompts)
                scores = self._ranks.leaders_do(ask, patient=True) or []
            else:
                scores = self._by_model(self.models[name], judged)
            for trajectory, score in zip(judged, self._shaped(name, settings, scores, learns=learns), strict=True):
                trajectory.reward_parts[name] = score
        first = None
        for t in trajectories:
            if self._config.overlong_buffer and self._counts(t):
                t.reward_parts[OVERLONG] = overlong(t.response_length, self._longest, self._config.overlong_buffer)
            if t.part and first is not None:
                t.reward_parts = first.reward_parts
            else:
                first = t
            t.reward = combine(t.reward_parts, task.weights)

    def _counts(self, t: Trajectory) -> bool:
        return not t.part and not t.masked and not (self._zero_truncated and t.truncated)

    def _ask_judges(self, trajectories: list[Trajectory], prompts: Sequence[Prompt], *, learns: bool) -> None:
        """Set the reward parts of judges, and mask samples without a verdict."""
        for name in self._config.judges:
            judged = [t for t in trajectories if self._counts(t)]
            scores = self._ranks.leaders_do(partial(self._verdicts, name, judged, prompts), patient=True) or []
            missing = {id(t) for t, score in zip(judged, scores, strict=True) if score is None}
            for t, score in zip(judged, scores, strict=True):
                t.reward_parts[name] = score or 0.0
            first = None
            for t in trajectories:
                first = t if not t.part else first
                if id(first) in missing:
                    t.masked, t["loss_mask"], t.reward_parts = True, False, dict.fromkeys(t.reward_parts, 0.0)
            if learns:
                asked = self._judges[name].asked if name in self._judges else 0
                self._measured |= {
                    f"judge/{name}/masked": mean(len(missing), len(judged)),
                    f"judge/{name}/known": mean(len(judged) - asked, len(judged)),
                }

    def _verdicts(self, name: str, judged: list[Trajectory], prompts: Sequence[Prompt]) -> list[float | None]:
        return self._judges[name].score(judged, prompts)

    def _by_model(self, model: Trainer, judged: list[Trajectory]) -> list[float]:
        """Return scores of the leader's trajectories, computed by all processes of its model copy; [] on other processes."""
        values, labels, sequences = self._values(
            model,
            [
                Tokens(tokens=t.tokens, prompt_length=t.prompt_length, fields={"loss_mask": t["loss_mask"]})
                for t in judged
            ],
        )
        found = pooled(values, labels, sequences, getattr(model.model.hf_config, "reward_pooling", "last"))
        return found if self._ranks.is_leader else []

    def _score_steps(self, name: str, settings: ScorerConfig, judged: list[Trajectory], *, learns: bool) -> None:
        """Set the reward part of a process reward model. If step_placement is `tokens`, also set the field step_scores."""
        tokenizer, model = self._tokenizers[name], self.models[name]
        separator = settings.step_separator or str(model.model.step_separator)
        steps = [steps_of(t.text, separator, ended=not t.truncated) for t in judged]
        coded = [encode_steps(tokenizer, of_response) for of_response in steps]
        values, labels, _ = self._values(
            model,
            [
                Tokens.demonstration(t.tokens[: t.prompt_length].tolist(), tokens)
                for t, (tokens, _) in zip(judged, coded, strict=True)
            ],
        )
        rows = labels.rows(values.double())
        behind = [float(rows[row, end + 1]) for row, (_, ends) in enumerate(coded) for end in ends]
        scores = iter(self._shaped(name, settings, behind, learns=learns))
        for t, of_response in zip(judged, steps, strict=True):
            own = [next(scores) for _ in of_response]
            t.reward_parts[name] = AGGREGATIONS[settings.step_aggregation](own) if own else 0.0
            if settings.step_placement == "tokens" and t.response_length:
                field = np.full(t.response_length, np.nan)
                tokens = t.tokens[t.prompt_length :].tolist()
                field[last_tokens(tokenizer, tokens, of_response, ended=not t.truncated)] = own
                t["step_scores"] = field
        if learns:
            self._measured |= {
                f"process/{name}/steps": mean(sum(map(len, steps)), len(steps)),
                f"process/{name}/score": mean(sum(behind), len(behind)),
            }

    def _values(self, model: Trainer, plain: list[Tokens]) -> tuple[Tensor, Labels, list[Tokens]]:
        """Return values [L], labels and sequences on all processes of the leader's model copy.

        plain: the leader's sequences. Each gets one more state at its end, so that its last token has a value.
        """
        sequences = [with_last_state(sequence) for sequence in self._ranks.from_leader(plain)]
        labels, batches = Labels(sequences), model.pack(sequences)
        model.compute_fields(batches, frozenset({"values"}))
        return everywhere(model, labels, batches, "values"), labels, sequences

    def _shaped(self, name: str, settings: ScorerConfig, scores: list[float], *, learns: bool) -> list[float]:
        values = torch.tensor(scores, dtype=torch.float64)
        values = values.sigmoid() if settings.sigmoid else values
        if learns and name in self._seen:
            mine = self._ranks.gather_from_leaders(moments(values, torch.ones_like(values)))
            self._seen[name] += torch.stack(mine).sum(0)
            mean, variance = mean_and_variance(self._seen[name])
            values = (values - mean) / (variance.sqrt() if variance > 0 else 1.0)
        values = (values - settings.shift) / settings.scale
        limit = settings.clip if learns and settings.clip is not None else math.inf
        return values.clamp(-limit, limit).tolist()

    def metrics(self) -> Metrics:
        """Return this process's metrics of the last scoring for training."""
        return self._measured

    def state_dict(self) -> dict[str, list[float]]:
        """Return the moments for the normalization of scores, for a checkpoint."""
        return {name: seen.tolist() for name, seen in self._seen.items()}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Restore the moments of a checkpoint."""
        self._seen |= {
            name: torch.tensor(seen, dtype=torch.float64) for name, seen in state.items() if name in self._seen
        }


def pooled(values: Tensor, labels: Labels, sequences: Sequence[Tokens], pooling: str) -> list[float]:
    """Return the score of each sequence, pooled from the values [L] of its states as in the reward model's training."""
    rows = labels.rows(values.double())
    # The state at a token that the policy chose is one position after the state that predicts this token.
    own = labels.rows(labels.of("loss_mask")).roll(1, 1)
    if pooling != "mean":
        last = (own * torch.arange(own.shape[1])).argmax(1)
        return rows[torch.arange(len(sequences)), last].tolist()
    return ((rows * own).sum(1) / own.sum(1).clamp(min=1)).tolist()


@dataclass(frozen=True)
class Server:
    """A reward model on an SGLang server, called through /classify."""

    name: str
    config: ScorerConfig
    timeout_s: float

    def score(self, judged: list[Trajectory], prompts: Sequence[Prompt]) -> list[float]:
        """Return one number for each trajectory. Errors: UserError if the server does not return one."""
        tokenizer = read_tokenizer(self.config.path) if self.config.path else None
        wanted = [
            t.tokens.tolist() if tokenizer is None else _encoded(tokenizer, prompts[t.group_id], t) for t in judged
        ]
        what = (
            f"rewards.models.{self.name}: no score from {{url}}: {{problem}}; it has to be SGLang's server of a classifier"
            " with one label (--is-embedding)"
        )
        bodies = [{"input_ids": tokens} for tokens in wanted]
        key = key_of(self.config.api_key, f"rewards.models.{self.name}.api_key")
        return ask_all(str(self.config.address), "classify", bodies, _one, timeout_s=self.timeout_s, what=what, key=key)


def _one(answer: Any) -> float:
    """Return the only number of an answer. Errors: ValueError if there are several, or the number is not finite."""
    (number,) = answer["embedding"]
    if not math.isfinite(number):
        raise ValueError("a score is finite")
    return float(number)


def _encoded(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, trajectory: Trajectory) -> list[int]:
    """Return tokens of prompt and response by the reward model's tokenizer, with its chat template if it has one."""
    if not tokenizer.chat_template:
        tokens, _ = encode_text(tokenizer, trajectory.text)  # as in its training, the end of sequence is scored too
        cut = trajectory.truncated and tokenizer.eos_token_id is not None
        return [*prompt.encode(tokenizer).tokens, *(tokens[:-1] if cut else tokens)]
    asked = prompt.messages or [{"role": "user", "content": prompt.text}]
    messages = [*asked, {"role": "assistant", "content": trajectory.text}]
    text = render(tokenizer, messages, f"rewards.models: {prompt.prompt_id}", tools=prompt.tools)
    return list(tokenizer.encode(text, add_special_tokens=False))
