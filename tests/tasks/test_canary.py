"""No response, prompt or row is ever executed, evaluated, unpickled or rendered, by whatever this project has registered."""

from __future__ import annotations

import contextlib
import json
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from megatron_rl.config import AgentConfig, Config, DataConfig
from megatron_rl.config.load import load_config
from megatron_rl.dialects import DIALECTS, Call, dialect
from megatron_rl.dialects.harmony_ids import MARKS
from megatron_rl.errors import UserError
from megatron_rl.sandbox import bubblewrap
from megatron_rl.tasks import Prompt, build_task
from megatron_rl.tasks.from_config import TASKS
from megatron_rl.tasks.verifiers import VERIFIERS
from megatron_rl.tools.tool import ToolError, ToolLost
from megatron_rl.tools.toolbox import TOOLS, Toolbox
from tests.tasks.canary import Canary
from tools.make_tiny_model import text_tokenizer

contained = pytest.mark.skipif(bool(bubblewrap.problem()), reason=bubblewrap.problem() or "contained")
FORMS = (
    "{}",
    "The answer is {}",
    "\\boxed{{{}}}",
    "<answer>{}</answer>",
    "#### {}",
    "[{}]",
    "<think>\n{}</think> $${}$$",
    "'{}'",
    "{}\n\nNo.",
)
ANSWERS: dict[str, Any] = {
    "code": "assert f(1) == 2",
    "instructions": {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["zebra"]}]},
}
"""Answers for verifiers that take no number."""
ELSEWHERE = {
    "openenv": "its environments are servers",
    "reasoning_gym": "test_reasoning.py, with all of its data sets",
    "verifiers": "test_verifiers_package.py",
}
"""Tasks whose scorers run in another process than this project's."""


@pytest.fixture
def canary(tmp_path) -> Iterator[Canary]:
    with Canary(tmp_path) as made:
        yield made
        assert not made.signs()


def formed(canary: Canary) -> list[str]:
    """All payloads, each in two of the forms in which an answer is stated."""
    return [
        form.replace("{}", text).replace("{{", "{").replace("}}", "}")
        for text in canary.texts()
        for form in random.sample(FORMS, 2)
    ]


@contained
@pytest.mark.parametrize("name", VERIFIERS)
def test_verifiers(name, canary):
    """In this process, also those that have workers of their own."""
    verifier, answer = VERIFIERS[name], ANSWERS.get(name, "8317")
    texts = formed(canary)
    texts = (
        random.sample(texts, 8) + [f"```python\n{text}\n```" for text in canary.texts("python")]
        if name == "code"
        else texts
    )

    def judge(text: str, expected: Any) -> None:
        found = verifier.function(text, expected)
        assert not found.get("correct")

    with ThreadPoolExecutor(4 if name == "code" else 1) as threads:
        list(threads.map(lambda text: judge(text, answer), texts))
    for text in texts:
        verifier.extract(text)
        with contextlib.suppress(ValueError, TypeError, UserError):  # of an answer that is none
            row = {"answer": text, "test_setup_code": text, "entry_point": text}
            verifier.function("1", verifier.expected(row, text, text) if verifier.expected else text)


def made(name: str, folder: Path, texts: list[str]) -> Any:
    """A task of that name, with rows of payloads where it takes rows."""
    with contextlib.suppress(UserError):
        return build_task(DataConfig(task=name, options={"size": 20}))
    with contextlib.suppress(UserError):
        return build_task(DataConfig(task=name))
    path = folder / "rows.jsonl"
    rows = [{"prompt": text, "question": text, "answer": f"{text} #### 1", "more": {"a": [text]}} for text in texts]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return build_task(
        DataConfig(task=name, path=str(folder if name == "hub" else path), template="{prompt}" + texts[0])
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(TASKS.keys() - ELSEWHERE.keys()))
def test_tasks(name, canary, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "rows"
    folder.mkdir()
    task = made(name, folder, canary.texts())
    try:
        prompts = [*task.prompts("train")[:4]]
        texts = random.sample(formed(canary), 40)
        found = task.score([random.choice(prompts) for _ in texts], texts)
        assert len(found) == 40 and (name == "verify_if" or not any(parts.get("correct") for parts in found))
        for text in texts:
            task.extract(text)
    finally:
        task.close()


def test_a_data_set_that_brings_a_script_is_refused(canary, tmp_path):
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "rows.py").write_text(canary.texts("python")[0])
    with pytest.raises(UserError, match="config: data.path: data set .*rows"):
        build_task(DataConfig(task="hub", path=str(folder)))


def test_every_task_is_tried():
    assert TASKS.keys() >= ELSEWHERE.keys()


@contained
def test_tools(canary, tmp_path):
    """All in one conversation; the interpreter executes what it is given, where it harms nothing."""
    folder = tmp_path / "documents"
    folder.mkdir()
    for number, text in enumerate(canary.texts()):
        (folder / f"{number}.html").write_text(text)
    box = Toolbox(AgentConfig(tools=list(TOOLS), tool_options={"search": {"folder": str(folder)}}))
    box.open()

    async def call_all() -> int:
        sessions: dict[str, Any] = {}
        count = 0
        for name, tool in box.tools.items():
            for text in canary.texts():
                with contextlib.suppress(ToolError, ToolLost):
                    await box.call(name, dict.fromkeys(tool.parameters["properties"], text), sessions)
                with contextlib.suppress(ToolError, ToolLost):
                    await box.call(text, {text: text}, sessions)
                count += 1
        await box.end(sessions)
        return count

    try:
        assert box.loop.run(call_all()) == len(TOOLS) * len(canary.texts())
    finally:
        box.close()


@pytest.fixture(scope="module")
def tokenizer():
    made = text_tokenizer(512)
    made.backend_tokenizer.normalizer = None
    made.add_special_tokens({"additional_special_tokens": list(MARKS)})
    return made


@pytest.mark.slow
@pytest.mark.parametrize("name", DIALECTS)
def test_dialects(name, canary, tokenizer):
    form = dialect(name, tokenizer)
    for text in canary.texts():
        schema = {
            "name": "f",
            "description": text,
            "parameters": {"type": "object", "properties": {"x": {"description": text}}},
        }
        call = {"name": text, "arguments": {"x": text}}
        written = [text, form.call_text(Call("f", {"x": text})), form.call_text(Call("f", {text: text}))]
        written += [f"<tool_call>\n{text}\n</tool_call>", json.dumps(call), f"Action: {text}\nAction Input: {text}"]
        for reply in written:
            form.parse_text(reply)
            form.message(form.reply(reply))
        with contextlib.suppress(UserError):  # of a name that no function can have
            form.prompt([{"role": "user", "content": text}], [{"type": "function", "function": schema}])
            form.observation([text])


def test_templates(canary, tokenizer, monkeypatch):
    """Templates of a tokenizer that somebody else has made, and of a prompt in one that is right."""
    own = tokenizer.chat_template
    for template in canary.texts():
        monkeypatch.setattr(tokenizer, "chat_template", template)
        with contextlib.suppress(Exception):  # jinja2's SecurityError, UndefinedError, TemplateSyntaxError
            Prompt("a", "b", messages=[{"role": "user", "content": "b"}]).encode(tokenizer)
        assert not canary.signs(), template
    monkeypatch.setattr(tokenizer, "chat_template", own)
    for text in canary.texts():
        messages = [{"role": "user", "content": text}]
        assert text.strip("\0") in Prompt("a", text, messages=messages).encode(tokenizer).text or "\0" in text


def test_configs(canary, tmp_path):
    path = tmp_path / "config.yaml"
    for text in canary.texts():
        for form in (text, f"name: {text}", f"data:\n  template: {json.dumps(text)}", f"model: {{path: {text}}}"):
            path.write_text(form)
            with contextlib.suppress(UserError):
                assert isinstance(load_config(str(path)), Config)
