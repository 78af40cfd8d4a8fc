"""The evaluation sets of a run: held-out prompts of the config section `data`, and the sets of eval.sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from megatron_rl.config import DataConfig, EvalConfig, EvalSetConfig, RewardsConfig, RolloutConfig
from megatron_rl.config.plan import OFFLINE, Kind
from megatron_rl.errors import UserError
from megatron_rl.rewards.rewards import names_of
from megatron_rl.rollout.program import SingleTurn
from megatron_rl.tasks import Prompt, Task, build_task, fitting

EVALUATED: tuple[Kind, ...] = ("train", "sft", "score", "sample")
"""Kinds of runs that evaluate several sets. Other kinds use only the held-out prompts of the config section `data`."""
OVERRIDES = ("verifier", "prompt_key", "answer_key", "response_key", "template", "chat", "rewards")
"""Keys of an evaluation set that override the same keys of the config section `data`."""


@dataclass(frozen=True)
class EvalSet:
    """Held-out prompts that are evaluated together."""

    name: str
    """Name of the set; empty for the held-out prompts of the config section `data`."""
    program: SingleTurn
    """Rollout program with the set's own task."""
    held_out: Sequence[Prompt]
    """All held-out prompts, not tokenized."""
    prompts: Sequence[Prompt]
    """Tokenized prompts that leave room for a response; empty if nothing is sampled."""
    samples: int
    greedy: bool
    template: str
    """Text into which each prompt is inserted (data.template)."""

    def named(self, scores: Mapping[str, float]) -> dict[str, float]:
        """Rename scores from eval/KEY to eval/NAME/KEY, where NAME is the name of the set."""
        room = f"eval/{self.name}/" if self.name else "eval/"
        return {room + name.removeprefix("eval/"): value for name, value in scores.items()}


def eval_sets(
    data: DataConfig,
    settings: EvalConfig,
    rollout: RolloutConfig,
    rewards: RewardsConfig,
    kind: Kind,
    program: SingleTurn,
) -> list[EvalSet]:
    """Return the evaluation sets for this kind of run. The set of the config section `data` comes first.

    program: rollout program of the run. Errors: UserError that names the set.
    """
    sets = settings.sets if kind in EVALUATED else {}
    later = [] if kind in OFFLINE else names_of(rewards)
    make = partial(_made, data=data, settings=settings, rollout=rollout, later=later, kind=kind, program=program)
    found = [make("", EvalSetConfig())] if not sets or data.eval_path else []
    for name, own in sets.items():
        try:
            found.append(make(name, own))
        except UserError as error:
            raise UserError(f"config: eval.sets.{name}: {str(error).removeprefix('config: ')}") from None
    return found


def overall(scores: Mapping[str, float], metric: str, sets: Sequence[EvalSet]) -> dict[str, float]:
    """Return {metric: its mean over the named sets that have it}; empty if the scores contain the metric, or no set has it."""
    names = [next(iter(one.named({metric: 0.0}))) for one in sets if one.name]
    found = [value for name in names if (value := scores.get(name)) is not None]
    return {} if metric in scores or not found else {metric: float(np.mean(found))}


def held_out_questions(sets: Sequence[EvalSet]) -> frozenset[str]:
    """Return the questions of the named sets' prompts, without their templates.

    All rows of a set are held out, even rows that are not evaluated. For a task that generates its prompts, only the
    evaluated prompts are held out.
    """
    found = set[str]()
    for one in sets:
        if one.name:
            prompts = one.program.task.prompts("eval")
            found |= {question(p, one.template) for p in (prompts if isinstance(prompts, list) else one.held_out)}
    return frozenset(found)


def question(prompt: Prompt, template: str) -> str:
    """Return the question of a prompt: its text without data.template, or the conversation.

    Equal prompts have equal questions.
    """
    text = prompt.identity
    if text != prompt.text:
        return text
    before, _, after = template.partition("{prompt}")
    if len(text) >= len(before) + len(after) and text.startswith(before) and text.endswith(after):
        text = text[len(before) : len(text) - len(after)]
    return text.strip()


def _made(
    name: str,
    own: EvalSetConfig,
    *,
    data: DataConfig,
    settings: EvalConfig,
    rollout: RolloutConfig,
    later: list[str],
    kind: Kind,
    program: SingleTurn,
) -> EvalSet:
    """Build one evaluation set. later: names of reward parts that are scored after the rollout."""
    mine = data_of(own, data)
    form = program if mine == data else program.with_task(_task(own, mine, later, kind, program))
    held_out = form.task.prompts("eval")[: own.prompts or settings.prompts]
    if name and not held_out:
        raise UserError("the set has no held-out prompt; set its path, or raise eval.prompts or its own prompts")
    lengths = (rollout.context_length, rollout.max_new_tokens)
    prompts = [] if kind in OFFLINE else fitting(held_out, form, *lengths)
    samples = own.samples or settings.samples
    greedy = settings.greedy if own.greedy is None else own.greedy
    return EvalSet(name, form, held_out, prompts, samples, greedy, mine.template)


def _task(own: EvalSetConfig, data: DataConfig, later: list[str], kind: Kind, program: SingleTurn) -> Task:
    return build_task(
        data,
        demonstrations=kind in OFFLINE,
        held_out=own.path is not None,
        more_parts=program.parts,
        later_parts=later,
    )


def data_of(settings: EvalSetConfig, data: DataConfig) -> DataConfig:
    """Return the config section `data` with the overrides of an evaluation set."""
    same = settings.task in (None, data.task)
    base = data if same else DataConfig(task=settings.task or "", seed=data.seed)
    given = {key: value for key in OVERRIDES if (value := getattr(settings, key)) is not None}
    options = {**base.options, **settings.options}
    return replace(base, eval_path=settings.path or base.eval_path, options=options, **given)
