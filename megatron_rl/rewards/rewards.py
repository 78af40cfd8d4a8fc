"""All of a reward behind one verb: verifiers, reward models (`rewards.models`), judges (`rewards.judges`), length, shaping."""

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
"""From the scores of a response's steps, of which there are some, to one number, by config.step_aggregation."""


def names_of(config: RewardsConfig) -> list[str]:
    """Names of the parts that look at finished responses: of reward models, judges, and the length."""
    return [*config.models, *config.judges, *([OVERLONG] if config.overlong_buffer else [])]


class Rewards:
    """All of a reward: what verifiers, reward models, judges and the length say, and what advantages see of it.

    Every process has one and calls it.
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
        """tokenizer: the policy's; None: samples bring what verifiers said of them (rollout.load).

        zero_truncated: what a limit has ended has a reward of 0 (agent.on_truncation). shape: sets what advantages see
        (`set_outcome_rewards`). folder: keeps what judges say.
        """
        self._config, self._ranks, self._task, self._longest = config, ranks, task, max_new_tokens
        self._tokenizer, self._zero_truncated, self._shape = tokenizer, zero_truncated, shape
        self.models: dict[str, Trainer] = {}
        """Reward models of the trainer's processes; `build` loads them."""
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
        """Moments of all scores of the run so far."""

    def check(self, prompts: Sequence[Prompt]) -> None:
        """Ask each judge for a word. prompts: some that it will see.

        Errors: UserError on all processes, for a judge that does not answer, or is to see an answer that a prompt lacks.
        """

        def ask() -> None:
            for judge in self._judges.values():
                judge.check(prompts)

        if self._config.judges:
            self._ranks.main_does(ask, patient=True)

    def build(self, make: Callable[[str], Trainer]) -> None:
        """Load the models of the trainer's own processes. make: a folder's, with its value head."""
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
        """Set parts and rewards of this leader's trajectories. prompts: those that their group ids count. Collective.

        task: which verifies and weighs them, where it is not the run's.

        learns: the scores are normalized, count for the mean and deviation by which they are, and are clipped; those of an
        evaluation are neither, so that all evaluations of a run have one scale. What is masked is not scored. `outcome_reward`
        is set too.
        Errors: UserError on all processes, for a server that does not answer.
        """
        task = task or self._task
        self.verify(trajectories, prompts, task)
        if names_of(self._config):
            self._score_finished(trajectories, prompts, task, learns=learns)
        if learns:
            self._shape(trajectories)

    def verify(self, trajectories: list[Trajectory], prompts: Sequence[Prompt], task: Task | None = None) -> None:
        """Have this leader's trajectories judged by the task's verifiers, unless they have been. `score` does so too.

        Errors: UserError for a reward part that the task does not have.
        """
        if self._tokenizer is not None:
            options = {"zero_truncated": self._zero_truncated}
            give_rewards(task or self._task, self._tokenizer, prompts, trajectories, **options)

    def _score_finished(
        self, trajectories: list[Trajectory], prompts: Sequence[Prompt], task: Task, *, learns: bool
    ) -> None:
        """Add the parts of reward models, judges and the length, and weigh all parts anew."""
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
        """Set the parts of judges, and mask samples without a verdict."""
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
        """Scores of the leader's trajectories, by all processes of its copy of the model; none elsewhere."""
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
        """Set the part of a process reward model, and where its scores are rewards of tokens the field step_scores."""
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
        """Values [L] of the leader's sequences, with a state more behind each, on all processes of its copy of the model."""
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
        """Metrics of this process from the last scoring of responses to learn from."""
        return self._measured

    def state_dict(self) -> dict[str, list[float]]:
        """For a checkpoint: what scores are normalized by."""
        return {name: seen.tolist() for name, seen in self._seen.items()}

    def load_state_dict(self, state: dict[str, list[float]]) -> None:
        """Go on where it was saved."""
        self._seen |= {
            name: torch.tensor(seen, dtype=torch.float64) for name, seen in state.items() if name in self._seen
        }


def pooled(values: Tensor, labels: Labels, sequences: Sequence[Tokens], pooling: str) -> list[float]:
    """Score of each sequence from the values [L] of its states, as a reward model learns it (`reward.places`)."""
    rows = labels.rows(values.double())
    # Behind each token that the policy chose: one place further than it is predicted from.
    own = labels.rows(labels.of("loss_mask")).roll(1, 1)
    if pooling != "mean":
        last = (own * torch.arange(own.shape[1])).argmax(1)
        return rows[torch.arange(len(sequences)), last].tolist()
    return ((rows * own).sum(1) / own.sum(1).clamp(min=1)).tolist()


@dataclass(frozen=True)
class Server:
    """A reward model behind SGLang's /classify."""

    name: str
    config: ScorerConfig
    timeout_s: float

    def score(self, judged: list[Trajectory], prompts: Sequence[Prompt]) -> list[float]:
        """One number for each trajectory. Errors: UserError where the server does not give one."""
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
    """The only number of an answer. Errors: ValueError where there are several, or it is not finite."""
    (number,) = answer["embedding"]
    if not math.isfinite(number):
        raise ValueError("a score is finite")
    return float(number)


def _encoded(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, trajectory: Trajectory) -> list[int]:
    """Prompt and response as the reward model's own tokenizer has them: by its chat template, where it has one."""
    if not tokenizer.chat_template:
        tokens, _ = encode_text(tokenizer, trajectory.text)  # as it has learned: the end of sequence is scored too
        cut = trajectory.truncated and tokenizer.eos_token_id is not None
        return [*prompt.encode(tokenizer).tokens, *(tokens[:-1] if cut else tokens)]
    asked = prompt.messages or [{"role": "user", "content": prompt.text}]
    messages = [*asked, {"role": "assistant", "content": trajectory.text}]
    text = render(tokenizer, messages, f"rewards.models: {prompt.prompt_id}", tools=prompt.tools)
    return list(tokenizer.encode(text, add_special_tokens=False))
