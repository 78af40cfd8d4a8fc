"""The interpreter of a conversation: it remembers, survives its user's errors, and breaks no limit."""

from __future__ import annotations

import asyncio
import threading
import time
from pathlib import Path

import pytest

from megatron_rl.sandbox import bubblewrap
from megatron_rl.tools.interpreter import OUTPUT_BYTES, PythonTool, Session
from megatron_rl.tools.tool import ToolError, ToolLost
from tests.waiting import wait_for

pytestmark = pytest.mark.skipif(bool(bubblewrap.problem()), reason=bubblewrap.problem() or "contained")


@pytest.fixture
def session():
    made = Session(timeout_s=60.0, memory_mb=256)  # an interpreter of a busy machine starts in seconds
    yield made
    made.end()


def test_variables_stay_and_the_last_expression_is_shown(session):
    assert session.run("import math\nx = 3\ndef f(y): return x + y") == ""
    assert session.run("print('a')\nf(4)") == "a\n7"
    assert session.run("x = None\nx") == ""
    assert session.run("'text'; [i for i in range(3)]") == "[0, 1, 2]"
    assert session.run("") == "" and session.run("# nothing") == ""
    assert session.run("print('é', end='')") == "é"


def test_errors_are_shown_and_lose_nothing(session):
    session.run("x = 3")
    shown = session.run("print('before')\n1/0")
    assert shown.startswith("before\nTraceback") and "ZeroDivisionError" in shown and "driver" not in shown.lower()
    assert 'File "main.py", line 2' in shown and "exec(" not in shown
    assert "SyntaxError" in session.run("def f(:")
    assert session.run("import sys; sys.exit(3)") == "" and session.run("raise SystemExit") == ""
    assert session.run("x") == "3"


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("print('so far', flush=True)\nwhile True: pass", "longer than 3 s.*so far"),
        (
            (
                "import os, time\nfor _ in range(9):\n    if os.fork() == 0:\n        z = bytearray(2**26)\n"
                "        time.sleep(9)\ntime.sleep(9)"
            ),
            "more than 256 MB",
        ),
        ("while True: print('x' * 1000)", f"more than {OUTPUT_BYTES} bytes"),
        ("import os; os._exit(1)", "interpreter ended"),
        ("import os; os.close(1)", "interpreter ended|longer than"),
        ("import os; os.abort()", "interpreter ended"),
    ],
)
def test_a_call_that_breaks_a_limit_starts_anew(session, code, problem):
    session.run("import time; x = 3")
    patient_s = session.timeout_s
    if "longer than" in problem:
        session.timeout_s = 3.0
    with pytest.raises(ToolError, match=f"(?s)({problem})") as found:
        session.run(code)
    session.timeout_s = patient_s
    assert "variables are lost" in str(found.value)
    assert "NameError" in session.run("x")


def test_its_own_signals_do_not_end_it(session):
    """It is the first process of its container."""
    session.run("import os, signal; x = 3")
    assert session.run("os.kill(os.getpid(), 9); os.kill(1, signal.SIGTERM); x") == "3"


BUSY = """
import os, threading, time
def work():
    kept = []
    while True:
        kept.append(bytearray(2**16))
        time.sleep(0.0005)
for _ in range(2):
    if os.fork() == 0:
        work()
threading.Thread(target=work, daemon=True).start()
'returned'
"""


def test_nothing_runs_between_calls(session):
    """Or else processes in the background would hold memory and compute while nobody looks."""
    assert session.run(BUSY) == "'returned'"
    container, deadline = session._container, time.monotonic() + 30

    def look() -> tuple[set[str], int]:
        stats = [Path(f"/proc/{pid}/stat").read_text() for pid in container.processes()[1:]]
        return {stat.rpartition(")")[2].split()[0] for stat in stats}, container.memory()

    seen = [look()]
    while (seen[-1] != look() or seen[-1][0] != {"T"}) and time.monotonic() < deadline:  # a signal takes a moment
        seen.append(look())
    assert len(container.processes()) == 4 and seen[-1][0] == {"T"}
    time.sleep(0.3)  # of what would hold 100 MB more
    assert look() == seen[-1] and seen[-1][1] < 256 * 2**20
    assert session.run("1 + 1") == "2"


def test_code_with_a_nul_is_an_error(session):
    assert "null bytes" in session.run("print(1)\0print(2)") and session.run("3") == "3"


def test_it_reads_no_input_and_sees_no_calls(session):
    assert "EOFError" in session.run("input()")
    assert session.run("import sys; sys.stdin.read()") == "''"


def test_a_session_that_is_ended_while_it_runs():
    """As when its conversation takes too long: the thread that runs it comes back, and nothing starts again."""
    session, seen = Session(timeout_s=60.0, memory_mb=256), []

    def run():
        try:
            session.run("import time\ntime.sleep(600)")
        except (ToolError, ToolLost) as error:  # which one depends on how far it had come: any is the end of it
            seen.append(str(error))

    thread = threading.Thread(target=run)
    thread.start()
    wait_for(lambda: session._container, 30)
    session.end()
    thread.join(30)
    assert not thread.is_alive() and any(
        problem in seen[0] for problem in ("interpreter ended", "does not start", "conversation has ended")
    )
    with pytest.raises(ToolError, match="conversation has ended"):
        session.run("1")
    assert session._container is None


def test_conversations_share_nothing():
    tool = PythonTool(timeout_s=60.0)

    async def both():
        first, second = tool.session(), tool.session()
        try:
            await tool.call({"code": "x = 1; open('/tmp/a', 'w').write('1')"}, first)
            return await tool.call({"code": "import os; os.listdir('/tmp'), 'x' in globals()"}, second)
        finally:
            await tool.end(first)
            await tool.end(second)

    assert asyncio.run(both()) == "([], False)"


def test_a_sandbox_that_does_not_start_is_no_fault_of_the_model(monkeypatch):
    monkeypatch.setattr(
        bubblewrap, "_command", lambda *a, **k: ["/bin/sh", "-c", "echo 'bwrap: no namespaces'; exit 1"]
    )
    with pytest.raises(ToolLost, match="does not start: bwrap: no namespaces"):
        Session(timeout_s=3.0, memory_mb=256).run("1")
    monkeypatch.setattr(bubblewrap.shutil, "which", lambda name: None)
    with pytest.raises(ToolLost, match="not installed"):
        asyncio.run(PythonTool().open())


def test_one_interpreter_serves_all_calls_of_a_conversation():
    started = []

    def start(*arguments, **settings):
        started.append(bubblewrap.Container(*arguments, **settings))
        return started[-1]

    session = Session(timeout_s=30.0, memory_mb=256, start=start)
    try:
        for number in range(100):
            assert session.run(f"{number} + 1") == str(number + 1)
    finally:
        session.end()
    assert len(started) == 1
