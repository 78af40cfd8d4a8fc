"""The verifier of programs, and games of several attempts."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from megatron_rl.config import DataConfig
from megatron_rl.errors import UserError
from megatron_rl.sandbox import bubblewrap
from megatron_rl.tasks import build_task
from megatron_rl.verifiers.code import passes_tests, program_of

contained = pytest.mark.skipif(bool(bubblewrap.problem()), reason=bubblewrap.problem() or "contained")
PROMPT = "def double(x):\n    '''Doubles.'''\n"
TESTS = "assert double(3) == 6\nassert double('a') == 'aa'"


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\ndef f(): pass\n```", "def f(): pass\n"),
        ("First:\n```\nx = 1\n```\nthen:\n```py\ndef f(): return 1\n```\nDone.", "def f(): return 1\n"),
        ("```python\ndef f():\n    return 1", "def f():\n    return 1"),
        ("    return 2 * x\n", f"{PROMPT}    return 2 * x\n"),
        ("def f(): pass", "def f(): pass"),
        ("no code at all", "no code at all"),
        ("", ""),
    ],
)
def test_the_program_of_a_response(response, program):
    assert program_of(response, PROMPT if program.startswith(PROMPT) else "") == program


@contained
@pytest.mark.parametrize(
    ("response", "right"),
    [
        ("```python\ndef double(x):\n    return x + x\n```", 1.0),
        ("    return 2 * x\n", 1.0),
        ("    return x\n", 0.0),
        ("    while True: pass\n", 0.0),
        ("", 0.0),
    ],
)
def test_tests_decide(response, right):
    limit_s = 1.0 if "while True" in response else 60.0  # of what ends by itself, on a machine however busy
    assert passes_tests(response, TESTS, PROMPT, timeout_s=limit_s)["correct"] == right


@pytest.mark.slow
@contained
def test_a_task_of_programs(tmp_path):
    rows = [{"prompt": f"# {i}\n{PROMPT}", "answer": TESTS} for i in range(20)]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = build_task(DataConfig(path=str(tmp_path / "a.jsonl"), verifier="code", options={"verifier_timeout_s": 5}))
    try:
        prompts = task.prompts("train")[:4]
        texts = ["```python\ndef double(x): return x * 2\n```", "    return 2 * x\n", "    while True: pass", "nothing"]
        assert [parts["correct"] for parts in task.score(prompts, texts)] == [1.0, 1.0, 0.0, 0.0]
    finally:
        task.close()


def test_a_machine_that_cannot_contain_programs_refuses(tmp_path, monkeypatch):
    (tmp_path / "a.jsonl").write_text(json.dumps({"prompt": "a", "answer": "b"}) + "\n")
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: None)
    with pytest.raises(
        UserError, match="config: data.verifier: code: programs cannot be contained here.*apt-get install"
    ):
        build_task(DataConfig(path=str(tmp_path / "a.jsonl"), verifier="code"))
    with pytest.raises(UserError, match="data.verifier: code: bubblewrap"):
        passes_tests("x = 1", "assert x == 1")


def test_a_game_of_several_attempts():
    task = build_task(DataConfig(task="reasoning_gym:chain_sum", options={"size": 20, "attempts": 3}))
    prompt = task.prompts("train")[0]
    say = lambda text: SimpleNamespace(calls=[], final=text, malformed=None)  # noqa: E731

    async def play(*answers):
        world, said = task.environment(prompt, None), []
        for answer in answers:
            said.append(await world.respond(say(answer)))
        return said

    try:
        wrong = asyncio.run(play("1000001", "1000002", "1000003"))
        assert [bool(messages) for messages in wrong] == [True, True, False]
        assert "Try again (2 left)" in wrong[0][0]["content"] and wrong[0][0]["role"] == "user"
        assert asyncio.run(play("1000001", str(prompt.answer)))[1] is None
    finally:
        task.close()
