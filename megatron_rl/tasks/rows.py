"""Tasks on data: a .jsonl or .parquet file, or a Hugging Face data set (by name or folder)."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, override

from megatron_rl.config import DataConfig
from megatron_rl.config.registry import nearest, resolve
from megatron_rl.data.hub import hub_id
from megatron_rl.errors import UserError
from megatron_rl.sandbox import bubblewrap
from megatron_rl.tasks.chat import check_text
from megatron_rl.tasks.openai_messages import Message, Schema, parse_messages, parse_schemas, structs
from megatron_rl.tasks.sampled_demonstrations import Recorded, has_tokens, read_recorded
from megatron_rl.tasks.task import Parts, Prompt, Split, Task, check_options, split_by_hash
from megatron_rl.tasks.verifiers import RowVerifier

if TYPE_CHECKING:
    import pyarrow

log = logging.getLogger(__name__)

Row = tuple[str, dict[str, Any] | None, str]
"""A row that was read: (its location, the row or None, the problem with it or '')."""
VERIFIER_TIMEOUT_S = 5.0
_SHOWN = 5
MISSING = object()
"""Value that `get` returns for a key that a row does not have."""


def check_file(path: str, key: str = "data.path") -> None:
    """Raise UserError if the file does not exist."""
    if not Path(path).is_file():
        hint = " (for a data set of the Hugging Face hub set data.task: hub)" if hub_id(path) else ""
        raise UserError(f"config: {key}: there is no file {path}{hint}")


def read_file(path: str, key: str = "data.path") -> Iterator[Row]:
    """Read rows of a .jsonl or .parquet file. Errors: UserError if the file does not exist or has another suffix."""
    check_file(path, key)
    file = Path(path)
    if file.suffix == ".jsonl":
        return _read_jsonl(file)
    if file.suffix == ".parquet":
        return _read_parquet(file)
    raise UserError(f"config: {key}: {path} is neither .jsonl nor .parquet")


def _read_jsonl(file: Path) -> Iterator[Row]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            row, problem = None, "not a JSON object"
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                problem = f"not JSON ({error})"
            yield (f"{file}:{number}", row, "") if isinstance(row, dict) else (f"{file}:{number}", None, problem)


def _read_parquet(file: Path) -> Iterator[Row]:
    import pyarrow.parquet

    try:
        batches = pyarrow.parquet.ParquetFile(file)
        number, nested = 0, _has_calls(batches.schema_arrow)
        for batch in batches.iter_batches():
            for row, problem in _rows(batch):
                number += 1
                yield f"{file}:{number}", _marked(row) if nested and row else row, problem
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"data: {file} is not a readable parquet file: {str(error).splitlines()[0]}") from None


def _rows(batch: pyarrow.RecordBatch) -> Iterator[tuple[dict[str, Any] | None, str]]:
    try:
        yield from ((row, "") for row in batch.to_pylist())
    except UnicodeDecodeError as error:
        if batch.num_rows > 1:
            for number in range(batch.num_rows):
                yield from _rows(batch.slice(number, 1))
        else:
            yield None, f"not UTF-8 ({error})"


def read_hub(path: str, key: str, subset: str | None, split: str) -> Iterator[Row]:
    """Read rows of a Hugging Face data set, or of a folder of data files, or of a folder that `datasets` has saved."""
    import datasets

    try:
        if (Path(path) / "dataset_info.json").is_file() or (Path(path) / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(path)
            rows: Any = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            rows = datasets.load_dataset(path, subset, split=split)
    except Exception as error:  # the library raises many kinds of errors, its own and those of HTTP clients
        raise UserError(
            f"config: {key}: data set {path} (split {split}): {' '.join(str(error.__cause__ or error).split())[:300]}"
        ) from None
    nested = _has_calls(rows.features)
    return ((f"{path}:{split}:{number}", _marked(row) if nested else row, "") for number, row in enumerate(rows, 1))


def _has_calls(columns: Any) -> bool:
    """Return True for a table with tool calls or tool schemas. In such a table, every call has the fields of all calls."""
    return any(field in str(columns) for field in ("arguments", "parameters"))


def _marked(row: dict[str, Any]) -> dict[str, Any]:
    return {name: structs(value) for name, value in row.items()}


class RowTask(Task):
    """Task whose prompts come from rows of data. It skips unusable rows, counts them, and names the first ones in the log.

    demonstrations: True for SFT. Each row then needs one of three things: a prompt with a response in data.response_key (an
    answer is not needed); a text in data.text_key, without a prompt; or sampled tokens in data.tokens_key.
    """

    known_options: tuple[str, ...] = ("verifier_timeout_s", "isolated")
    generates = False
    """True if the task generates rows when data.path is not set."""
    held_out_alone = False
    """True if only the held-out rows of data.eval_path are read."""

    def __init__(self, data: DataConfig, demonstrations: bool = False):
        super().__init__(data, demonstrations)
        if not data.path and not self.generates and not self.held_out_alone:
            raise UserError(f"config: data.task: {data.task} needs data.path")
        self.path = data.path or ""
        check_options(data, self.known_options)
        self.prepare = resolve("function", data.prepare, {}, "data.prepare") if data.prepare else None
        timeout_s = float(data.options.get("verifier_timeout_s", VERIFIER_TIMEOUT_S))
        alone = data.options.get("isolated", False)
        if not isinstance(alone, bool):
            raise UserError(f"config: data.options.isolated = {alone!r} is neither true nor false")
        name = data.verifier or self.verifier or "exact"
        self.verify = RowVerifier(name, tuple(data.rewards), timeout_s=timeout_s, alone=alone)
        if data.verifier == "code" and not demonstrations and (problem := bubblewrap.problem()):
            raise UserError(f"config: data.verifier: code: {problem}")
        self.parts = self.verify.parts
        self.main_parts = ("correct",)
        self.skipped = 0
        self._split = self._load()
        prompts = [prompt for part in self._split.values() for prompt in part]
        if all(prompt.document for prompt in prompts):
            self._check_asks_nothing(f"texts ('{data.text_key}'), which have no prompt", f"'{data.prompt_key}'")
        elif all(prompt.recorded for prompt in prompts):
            self._check_asks_nothing(f"tokens ('{data.tokens_key}'), which are learned as they are", "texts")

    def _training_rows(self) -> Iterator[Row]:
        raise NotImplementedError

    def _held_out_rows(self) -> Iterator[Row] | None:
        """Return the held-out rows; None if they have no source of their own."""
        raise NotImplementedError

    def _load(self) -> dict[Split, list[Prompt]]:
        train = [] if self.held_out_alone else self._parse(self._training_rows(), f"data.path: {self.path}")
        held_out = self._held_out_rows()
        if held_out is None:
            return split_by_hash(train)
        evaluation = self._parse(held_out, f"data.eval_path: {self.data.eval_path or self.path}")
        held = {prompt.identity for prompt in evaluation}
        fresh = [prompt for prompt in train if prompt.identity not in held]
        if len(fresh) < len(train):
            log.warning("data: %d training prompts are also held-out prompts and are left out", len(train) - len(fresh))
        return {"train": fresh, "eval": evaluation}

    def _check_asks_nothing(self, rows: str, others: str) -> None:
        """Raise UserError if a config key for prompts is set. Called if no row has a prompt as text.

        rows, others: parts of the error message: the rows' description, and the columns that rows with prompts need.
        """
        for key, given, plain in (
            ("chat", self.data.chat, "false"),
            ("template", self.data.template != DataConfig().template, "'{prompt}'"),
        ):
            if given:
                raise UserError(
                    f"config: data.{key} does nothing with {rows}; set it to {plain}, or give rows with {others} and"
                    f" '{self.data.response_key}'"
                )

    def _parse(self, rows: Iterator[Row], source: str) -> list[Prompt]:
        """Return the prompts of rows. Errors: UserError if no row is usable; it names `source`, or a config key and a file."""
        prompts, columns, skipped, where, first = [], set(), 0, "", ""
        missing: dict[str, str] = {}  # columns that rows lack, and their config keys
        for where, row, problem in rows:
            if row is not None:
                try:
                    row = self._prepared(row, where)
                    if row is None:
                        continue
                    columns |= row.keys()
                    needed = {getattr(self.data, key): key for key in self._needed(row)}
                    absent = {name: key for name, key in needed.items() if get(row, name) is MISSING}
                    missing |= absent
                    problem = f"no '{next(iter(absent))}'" if absent else self._empty(row, needed)
                    if not problem:
                        prompt = self._prompt(where, row)
                        check_prompt(prompt, row)
                        prompts.append(prompt)
                        continue
                except ValueError as error:
                    problem = str(error)
                except RecursionError:
                    problem = "it is nested too deeply"
            skipped, first = skipped + 1, first or problem
            if skipped <= _SHOWN:
                log.warning("data: %s skipped: %s", where, problem)
        if not prompts:
            if not where:
                raise UserError(f"config: {source} is empty: it has no line")
            file = where.rpartition(":")[0]
            for name, key in missing.items():
                if name not in columns:
                    more = "; prompts without answers need data.verifier: none" if key == "answer_key" else ""
                    raise UserError(f"data: {file} has no column '{name}' (data.{key}){nearest(name, columns)}{more}")
            raise UserError(f"data: {file} has no usable line ({skipped} skipped; the first: {first})")
        if skipped:
            log.warning("data: %d of %d lines skipped", skipped, skipped + len(prompts))
        self.skipped += skipped
        return prompts

    def _prepared(self, row: dict[str, Any], where: str) -> dict[str, Any] | None:
        """Return the row converted by data.prepare; None if data.prepare drops it. A subclass may raise ValueError."""
        if self.prepare is None:
            return row
        try:
            prepared = self.prepare(row)
        except Exception as error:  # from the user's function
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            raise UserError(f"config: data.prepare: {self.data.prepare} fails on {where}: {reason}") from None
        if prepared is not None and not isinstance(prepared, dict):
            raise UserError(f"config: data.prepare: {self.data.prepare} gives {prepared!r:.60}, not a row or None")
        return prepared

    def _needed(self, row: dict[str, Any]) -> list[str]:
        """Return the config keys of the columns that the row needs. Errors: ValueError with the problem."""
        if not self.demonstrations:
            return ["prompt_key", "answer_key"] if self.parts else ["prompt_key"]
        if has_tokens(row, self.data.tokens_key):
            return ["tokens_key"]
        text, prompt, response = self.data.text_key, self.data.prompt_key, self.data.response_key
        if self._is_text(row):
            return ["text_key"]
        if not any(name in row or get_close_matches(name, row) for name in (prompt, response)):
            if get_close_matches(text, row):
                return ["text_key"]
            raise ValueError(
                f"it has neither '{prompt}' and '{response}' nor '{text}': set data.prompt_key and data.response_key, or"
                " data.text_key"
            )
        return ["prompt_key", "response_key"]

    def _is_text(self, row: dict[str, Any]) -> bool:
        """Return True if the row is a text to learn. In a data set, every row has all columns, so the response may be None."""
        text, response = (get(row, key) for key in (self.data.text_key, self.data.response_key))
        alone = self.demonstrations and self.data.text_key != self.data.prompt_key
        return alone and text is not MISSING and response in (MISSING, None)

    @staticmethod
    def _empty(row: dict[str, Any], needed: Iterable[str]) -> str:
        for name in needed:
            value = get(row, name)
            if value is None or (isinstance(value, str | list) and not len(value)):
                return f"'{name}' is empty"
        return ""

    def _prompt(self, where: str, row: dict[str, Any]) -> Prompt:
        if self.demonstrations and self.data.tokens_key and has_tokens(row, self.data.tokens_key):
            return self._of_tokens(where, row, read_recorded(row, self.data.tokens_key))
        if self._is_text(row):
            return self._document(where, row)
        tools = self._tools(row)
        prompt, answer = self._value(row, self.data.prompt_key, tools), get(row, self.data.answer_key)
        if not isinstance(prompt, str | list):
            raise ValueError(f"'{self.data.prompt_key}' is neither text nor a list of messages")
        response = self._demonstration(row, tools) if self.demonstrations else None
        if isinstance(prompt, list):  # messages of a prompt never train, so their weights have no meaning
            messages = [{key: value for key, value in message.items() if key != "weight"} for message in prompt]
            text = messages[-1]["content"]
        else:
            text = self.data.template.replace("{prompt}", prompt)
            messages = [{"role": "user", "content": text}] if self.data.chat else None
        if answer is MISSING:
            answer = None
        elif not self.demonstrations:
            if isinstance(answer, float) and not math.isfinite(answer):
                raise ValueError(f"'{self.data.answer_key}' is {answer}, which is not an answer")
            answer = self.verify.expected(row, answer, text)
        return Prompt(where, text, answer, response, messages, tools=tools)

    def _demonstration(self, row: dict[str, Any], tools: Sequence[Schema]) -> str | list[Message]:
        name = self.data.response_key
        value = self._value(row, name, tools)
        if not isinstance(value, list):
            return as_text(value, f"'{name}'")
        for place, where in ((0, "begin"), (-1, "end")):
            if value[place]["role"] != "assistant":
                raise ValueError(f"'{name}' does not {where} with a message of the assistant")
        if all(message.get("weight") == 0 for message in value if message["role"] == "assistant"):
            raise ValueError(f"'{name}' has nothing to learn: all its weights are 0")
        return value

    def _tools(self, row: dict[str, Any]) -> list[Schema]:
        name = self.data.tools_key
        value = get(row, name) if name else MISSING
        try:
            return [] if value is MISSING or not value else parse_schemas(value)
        except ValueError as error:
            raise ValueError(f"'{name}': {error}") from None

    def _of_tokens(self, where: str, row: dict[str, Any], recorded: Recorded) -> Prompt:
        """Build a prompt from recorded tokens. Equal prompts get equal texts, because the split depends on the text."""
        prompt = get(row, self.data.prompt_key)
        if not isinstance(prompt, str):
            prompt = json.dumps(prompt if isinstance(prompt, list) else recorded.prompt.tolist())
        return Prompt(where, prompt, tools=self._tools(row), recorded=recorded)

    def _document(self, where: str, row: dict[str, Any]) -> Prompt:
        name = self.data.text_key
        text = get(row, name)
        if not isinstance(text, str):
            raise ValueError(f"'{name}' is not text")
        if not text.strip():
            raise ValueError(f"'{name}' is empty")
        return Prompt(where, text, document=True)

    @staticmethod
    def _value(row: dict[str, Any], key: str, tools: Sequence[Schema] = ()) -> Any:
        """Return row[key]. A list is parsed as the messages of a conversation. Errors: ValueError if it cannot be parsed.

        tools: tools of the row. If the row has tools, the conversation may call no others.
        """
        value = get(row, key)
        return messages_of(value, f"'{key}'", tools) if isinstance(value, list) else value

    @override
    def prompts(self, split: Split) -> list[Prompt]:
        return self._split[split]

    @override
    def extract(self, text: str) -> str:
        return self.verify.extract(text)

    @override
    def score(self, prompts: Sequence[Prompt], texts: Sequence[str], truncated: Sequence[bool] = ()) -> list[Parts]:
        return self.verify.score(prompts, texts, truncated)

    @override
    def close(self) -> None:
        self.verify.close()


class FileTask(RowTask):
    """Task on rows of data.path, a .jsonl or .parquet file, with held-out rows from data.eval_path."""

    def _training_rows(self) -> Iterator[Row]:
        return read_file(self.path)

    def _held_out_rows(self) -> Iterator[Row] | None:
        return read_file(self.data.eval_path, "data.eval_path") if self.data.eval_path else None


class HubTask(RowTask):
    """Task on rows of a Hugging Face data set. data.options: subset, split, eval_split."""

    known_options = (*RowTask.known_options, "subset", "split", "eval_split")

    def _training_rows(self) -> Iterator[Row]:
        options = self.data.options
        return read_hub(self.path, "data.path", options.get("subset"), options.get("split", "train"))

    def _held_out_rows(self) -> Iterator[Row] | None:
        path, options = self.data.eval_path, self.data.options
        if not path and "eval_split" not in options:
            return None
        key = "data.eval_path" if path else "data.path"
        return read_hub(path or self.path, key, options.get("subset"), options.get("eval_split", "test"))


def messages_of(value: list[Any], name: str, tools: Sequence[Schema] = ()) -> list[Message]:
    """Parse the messages of a conversation. Errors: ValueError naming the value.

    tools: if there are tools, the conversation may call no others.
    """
    try:
        messages = parse_messages(value, schemas=tools)
    except ValueError as error:
        raise ValueError(f"{name} is a list, but not one of messages: {error}") from None
    known = {schema["function"]["name"] for schema in tools}
    called = [call["function"]["name"] for message in messages for call in message.get("tool_calls", ())]
    if known and (unknown := [one for one in called if one not in known]):
        raise ValueError(f"{name} calls '{unknown[0]}', which is not a tool of the row ({', '.join(sorted(known))})")
    return messages


def as_text(value: Any, name: str) -> str:
    """Return a response as text. The response is a text or a finite number. Errors: ValueError for another value."""
    if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return str(value)
    if not isinstance(value, str):
        raise ValueError(f"{name} is neither text nor a list of messages, but {value!r:.60}")
    return value


def check_prompt(prompt: Prompt, row: dict[str, Any]) -> None:
    """Raise ValueError, naming the row's column, if a text of the prompt contains half a surrogate pair."""
    judged = prompt.preference.judged if prompt.preference else ()
    responses = [prompt.response, *(one.response for one in judged)]
    try:
        check_text([prompt.text, prompt.messages, prompt.tools, prompt.answer, prompt.metadata, *responses])
    except ValueError as error:
        for name, value in row.items():
            with suppress(ValueError):
                check_text(value)
                continue
            raise ValueError(f"'{name}': {error}") from None
        raise


def get(row: dict[str, Any], key: str) -> Any:
    """Return row[key]; 'reward_model.ground_truth' also looks into nested rows. Return `MISSING` if there is no value."""
    if key in row:
        return row[key]
    head, dot, rest = key.partition(".")
    return get(row[head], rest) if dot and isinstance(row.get(head), dict) else MISSING
