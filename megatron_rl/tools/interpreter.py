"""The Python interpreter as a tool.

It runs in a container and keeps its state within a conversation (ReTool, arXiv:2504.11536).
"""

from __future__ import annotations

import secrets
import subprocess
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, ClassVar, override

from megatron_rl.sandbox import bubblewrap
from megatron_rl.tools.tool import Tool, ToolError, ToolLost, in_thread

DRIVER = """
import ast, os, sys, traceback

calls = os.fdopen(os.dup(0), "rb")
os.dup2(os.open("/dev/null", os.O_RDONLY), 0)
scope = {"__name__": "__main__"}
while header := calls.readline():
    length, mark = header.split()
    code = calls.read(int(length)).decode()
    try:
        tree = ast.parse(code, "main.py")
        last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
        exec(compile(tree, "main.py", "exec"), scope)
        if last is not None and (value := eval(compile(ast.Expression(last.value), "main.py", "eval"), scope)) is not None:
            print(repr(value))
    except SystemExit:
        pass
    except BaseException as error:
        trace = error.__traceback__.tb_next if not isinstance(error, SyntaxError) else None
        sys.stdout.flush()
        traceback.print_exception(type(error), error, trace)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except Exception:
            pass
    os.write(1, mark)
"""
"""Program in the container. It reads `LENGTH MARK` and LENGTH bytes of code, runs the code, and ends its output with MARK."""
OUTPUT_BYTES = 65536


class Session:
    """The interpreter of one conversation. It starts at the first call. If a call breaks a limit, the next call restarts it."""

    def __init__(
        self, *, timeout_s: float, memory_mb: int, start: Callable[..., bubblewrap.Container] = bubblewrap.Container
    ) -> None:
        """start: function that creates the container. The container ends when the thread that called `start` ends."""
        self.timeout_s, self.memory_mb, self._start = timeout_s, memory_mb, start
        self._container: bubblewrap.Container | None = None
        self._lock = threading.Lock()
        """Held while code runs, because only one thread may use the container's pipes."""
        self._ended = False

    def run(self, code: str) -> str:
        """Run code, and return its output and the value of its last expression.

        Errors: ToolError if the code breaks a limit (all variables are then lost); ToolLost if the container cannot be started.
        """
        with self._lock:
            if self._ended:  # the conversation ended before this thread ran
                raise ToolError("the conversation has ended")
            return self._run(code)

    def _run(self, code: str) -> str:
        encoded, mark = code.encode(errors="replace"), secrets.token_hex(16).encode()
        try:
            if self._container is None:
                # CPU seconds over all calls of a conversation; each call also has a wall-clock limit.
                self._container = self._start(
                    DRIVER.encode(), cpu_s=3600, memory_mb=self.memory_mb, stderr=subprocess.STDOUT
                )
        except (OSError, ImportError) as error:
            raise ToolLost(str(error)) from None
        if self._ended:  # ended while the container started
            self._drop()
            raise ToolError("the conversation has ended")
        self._container.thaw()
        outputs, reason = bubblewrap.watch(
            self._container,
            b"%d %s\n%s" % (len(encoded), mark, encoded),
            timeout_s=self.timeout_s,
            output_bytes=OUTPUT_BYTES,
            until=mark,
        )
        (output,) = outputs
        if reason == "ok" and output.endswith(mark):
            self._container.freeze()  # nothing watches it until the next call
            if not self._container.is_over():
                return output.removesuffix(mark).decode(errors="replace").rstrip("\n")
            reason = "memory"
        started = reason != "ok" or self._container.started
        self._drop()
        text = bytes(output[:OUTPUT_BYTES]).decode(errors="replace")
        if not started:
            raise ToolLost(f"the sandbox does not start: {' '.join(text.split())[:300]}")
        problem = {
            "timeout": f"it took longer than {self.timeout_s:g} s",
            "memory": f"it needed more than {self.memory_mb} MB",
            "output": f"it wrote more than {OUTPUT_BYTES} bytes",
        }.get(reason, "the interpreter ended")
        raise ToolError(f"{problem}; all variables are lost\n{text}".strip())

    def _drop(self) -> None:
        container, self._container = self._container, None
        if container is not None:
            container.end()

    def end(self) -> None:
        """Kill the interpreter, even while code runs. It runs no further code."""
        self._ended = True
        if (container := self._container) is not None:
            container.kill()
        with self._lock:
            self._drop()


class PythonTool(Tool):
    """Tool `python`: runs code, and shows its output and the value of its last expression."""

    name = "python"
    description = (
        "Runs Python code and returns what it prints, and the value of a last line that is an expression."
        " Variables stay until the end of the conversation."
    )
    parameters: ClassVar[dict[str, Any]] = {
        "type": "object",
        "properties": {"code": {"type": "string", "description": "Python code"}},
        "required": ["code"],
        "additionalProperties": False,
    }

    def __init__(self, timeout_s: float = 10.0, memory_mb: int = 512) -> None:
        """timeout_s: time limit in seconds of one call; memory_mb: memory limit of the interpreter."""
        self.timeout_s, self.memory_mb = timeout_s, memory_mb
        # A container dies with the thread that started it (bubblewrap's --die-with-parent), and each call has its own thread.
        # Therefore one thread, which lives as long as the tool, starts all containers.
        self._starter = ThreadPoolExecutor(1, "sandbox")

    def _start(self, script: bytes, **settings: Any) -> bubblewrap.Container:
        return self._starter.submit(bubblewrap.Container, script, **settings).result()

    @override
    async def open(self) -> None:
        if problem := await in_thread(bubblewrap.problem):
            raise ToolLost(problem)

    @override
    async def close(self) -> None:
        self._starter.shutdown(wait=False, cancel_futures=True)

    @override
    def session(self) -> Session:
        return Session(timeout_s=self.timeout_s, memory_mb=self.memory_mb, start=self._start)

    @override
    async def call(self, arguments: dict[str, Any], session: Session) -> str:
        return await in_thread(session.run, arguments["code"])

    @override
    async def end(self, session: Session) -> None:
        await in_thread(session.end)
