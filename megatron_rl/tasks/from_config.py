"""Builds a task from the config section `data`."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

from megatron_rl.config import DataConfig
from megatron_rl.config.registry import check_name, resolve
from megatron_rl.errors import UserError
from megatron_rl.tasks.builtin import NumberSorting, NumberZigzag, Sums
from megatron_rl.tasks.openenv import OpenEnv
from megatron_rl.tasks.preference_rows import FilePreferences, HubPreferences
from megatron_rl.tasks.public_sets import Gsm8k, ReTool
from megatron_rl.tasks.reasoning_gym import ReasoningGym
from megatron_rl.tasks.rows import FileTask, HubTask, RowTask, check_file
from megatron_rl.tasks.task import Task, resolve_weights
from megatron_rl.tasks.verifiers import VERIFIERS
from megatron_rl.tasks.verifiers_package import VerifiersPackage
from megatron_rl.tasks.verify_if import VerifyIF

TASKS: dict[str, type[Task]] = {
    "file": FileTask,
    "gsm8k": Gsm8k,
    "hub": HubTask,
    "number_sorting": NumberSorting,
    "number_zigzag": NumberZigzag,
    "openenv": OpenEnv,
    "reasoning_gym": ReasoningGym,
    "retool": ReTool,
    "sums": Sums,
    "verifiers": VerifiersPackage,
    "verify_if": VerifyIF,
}
PREFERENCES: dict[type[Task], type[Task]] = {FileTask: FilePreferences, HubTask: HubPreferences}
"""{task class: class that reads its rows as preferences}."""


def check_data(data: DataConfig) -> None:
    """Check the config section `data` as far as possible before the task's code is imported or data is read.

    Errors: UserError for a template without {prompt}, and for a missing file, task, verifier or `prepare` function.
    """
    if "{prompt}" not in data.template:
        raise UserError(f"config: data.template = {data.template!r} does not contain {{prompt}}")
    check_name("task", _kind(data), TASKS, "data.task")
    made = TASKS.get(_kind(data))
    if made in (FileTask, HubTask) and not data.path:
        raise UserError(f"config: data.task: {data.task} needs data.path")
    for key in ("path", "eval_path") if made is FileTask else ():
        if path := getattr(data, key):
            check_file(path, f"data.{key}")
    if made in (FileTask, HubTask) and data.verifier is not None:
        check_name("verifier", data.verifier, VERIFIERS, "data.verifier")
    if made not in (None, FileTask, HubTask) and data.verifier not in (None, made.verifier):
        raise UserError(
            f"config: data.verifier: task '{data.task}' has its own ({made.verifier}), not '{data.verifier}'"
        )
    if data.prepare is not None:
        if made is None or not issubclass(made, RowTask):
            raise UserError(f"config: data.prepare takes the rows of a file or data set, and '{data.task}' has none")
        check_name("function", data.prepare, {}, "data.prepare")


def build_task(
    data: DataConfig,
    *,
    demonstrations: bool = False,
    preferences: bool = False,
    held_out: bool = False,
    more_parts: Sequence[str] = (),
    later_parts: Sequence[str] = (),
) -> Task:
    """Build the task that `data` describes, with resolved reward weights.

    demonstrations: for SFT. preferences: for training on comparisons. held_out: read only data.eval_path, if the task has rows.
    more_parts: names of reward parts that other components compute, not the task. later_parts: names of parts that are computed
    when all responses are complete (`Task.later_parts`).

    Errors: UserError for a misspelled name, for missing data, for a task that lacks required preferences, or for a verifier or
    reward part that does not fit the task.
    """
    check_data(data)
    make = resolve("task", _kind(data), TASKS, "data.task")
    if preferences:
        make = PREFERENCES.get(make, make)
    if held_out and issubclass(make, RowTask):
        make = type(make.__name__, (make,), {"held_out_alone": True})
    _check_takes(make, f"{data.task} cannot be made from (data, demonstrations)", data, demonstrations)
    own = {part: weight for part, weight in data.rewards.items() if part not in (*more_parts, *later_parts)}
    task = make(replace(data, rewards=own), demonstrations)
    if not isinstance(task, Task):
        given = type(task).__name__
        raise UserError(f"config: data.task: {data.task} gives {given}, not a megatron_rl.tasks.Task")
    _check_takes(task.score, f"{data.task}.score does not take (prompts, texts, truncated)", [], [], None)
    if taken := sorted({*task.parts, *more_parts} & {*later_parts}):
        raise UserError(
            f"config: rewards.models.{taken[0]}: task '{task.name}' has a part of that name; choose another"
        )
    task.parts = (*task.parts, *more_parts, *later_parts)
    task.later_parts, task.main_parts = tuple(later_parts), (*task.main_parts, *later_parts)
    task.weights = resolve_weights(task, data.rewards)
    if preferences and len(prompts := task.prompts("train")):
        task.comparison(prompts[0], random.Random(0))  # a task without preferences raises here
    return task


def _check_takes(function: Callable, problem: str, *arguments: object) -> None:
    """Raise UserError with `problem` if the function cannot be called with the arguments."""
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError as error:
        raise UserError(f"config: data.task: {problem}: {error}") from None


def _kind(data: DataConfig) -> str:
    name = data.task.partition(":")[0]
    return name if name in ("reasoning_gym", "verifiers") else data.task
