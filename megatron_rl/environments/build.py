"""From the config's `data` section to a task."""

from __future__ import annotations

from megatron_rl.config import DataConfig
from megatron_rl.environments.files import RowTask, read_file, read_hub
from megatron_rl.environments.number_sorting import NumberSorting
from megatron_rl.environments.number_zigzag import NumberZigzag
from megatron_rl.environments.reasoning import ReasoningGym
from megatron_rl.environments.task import Split, Task, nearest, resolve_weights
from megatron_rl.errors import UserError

TASKS = ("file", "hub", "number_sorting", "number_zigzag", "reasoning_gym:NAME")


def build_task(data: DataConfig, *, demonstrations: bool = False) -> Task:
    """The task that `data` describes, with its weights resolved. demonstrations: for SFT.

    Errors: UserError for a misspelt name, missing data, or a verifier or reward part that does not fit.
    """
    if "{prompt}" not in data.template:
        raise UserError(f"config: data.template = {data.template!r} does not contain {{prompt}}")
    task = _make(data, demonstrations)
    task.weights = resolve_weights(task, data.rewards)
    return task


def _make(data: DataConfig, demonstrations: bool) -> Task:
    kind, _, name = data.task.partition(":")
    if kind in ("file", "hub"):
        return _row_task(kind, data, demonstrations)
    own_verifier = {"number_sorting": "number_list", "number_zigzag": "zigzag", "reasoning_gym": "reasoning_gym"}
    if kind not in own_verifier:
        raise UserError(f"config: data.task: unknown task '{data.task}'{nearest(data.task, TASKS)}")
    if data.verifier not in (None, own_verifier[kind]):
        raise UserError(
            f"config: data.verifier: task '{data.task}' has its own ({own_verifier[kind]}), not '{data.verifier}'"
        )
    if kind in ("number_sorting", "number_zigzag"):
        return (NumberSorting if kind == "number_sorting" else NumberZigzag)(data.options, data.seed)
    return ReasoningGym(name, data.options, data.seed, data.template, data.chat)


def _row_task(kind: str, data: DataConfig, demonstrations: bool) -> Task:
    if not data.path:
        raise UserError(f"config: data.task: {kind} needs data.path")
    known = {"file": {"verifier_timeout_s"}, "hub": {"verifier_timeout_s", "subset", "split", "eval_split"}}[kind]
    for option in data.options:
        if option not in known:
            raise UserError(f"config: unknown key 'data.options.{option}' of task '{kind}'{nearest(option, known)}")

    def read(split: Split):
        if kind == "file":
            if split == "train":
                return read_file(data.path)
            return read_file(data.eval_path, "data.eval_path") if data.eval_path else None
        subset = data.options.get("subset")
        if split == "train":
            return read_hub(data.path, "data.path", subset, data.options.get("split", "train"))
        if data.eval_path or "eval_split" in data.options:
            key = "data.eval_path" if data.eval_path else "data.path"
            return read_hub(data.eval_path or data.path, key, subset, data.options.get("eval_split", "test"))
        return None

    return RowTask(data.task, data, read, demonstrations=demonstrations)
