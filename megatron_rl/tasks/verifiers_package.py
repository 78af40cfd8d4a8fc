"""Task for environments of the `verifiers` package (https://github.com/PrimeIntellect-ai/verifiers), data.task: verifiers:NAME.

The package needs other versions of dependencies than the trainer, so it has its own Python environment (tools/setup.sh
--verifiers). A worker process in this environment plays the episodes (verifiers_worker.py). The worker reaches the policy
through the recording endpoint, an OpenAI-compatible server that records the exact tokens of each trajectory.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, override

from megatron_rl.config import DataConfig
from megatron_rl.credentials import RUN_KEY
from megatron_rl.errors import UserError
from megatron_rl.tasks.task import Parts, Prompt, Split, Task, check_options, split_by_hash
from megatron_rl.tools.tool import ToolLost

log = logging.getLogger(__name__)

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-verifiers/bin/python"
WORKER = Path(__file__).with_name("verifiers_worker.py")
START_TIMEOUT_S = 300.0
"""Longest time in seconds for a worker to load an environment with its data."""
END_TIMEOUT_S = 8.0
"""Longest time in seconds for a worker to end by itself. It is shorter than the event loop's own limit for remaining tasks."""
MOST_BYTES = 2**24
"""Largest size in bytes of one answer of the worker."""


class Worker:
    """The worker process that plays episodes.

    The process starts with the first episode, restarts after a crash, and ends with its event loop.
    """

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: asyncio.subprocess.Process | None = None
        self._waiting: dict[int | None, asyncio.Future[dict[str, Any]]] = {}
        self._reading: asyncio.Task | None = None
        self._starting: asyncio.Lock | None = None
        self._requests = 0

    async def play(self, request: dict[str, Any]) -> float:
        """Play an episode and return its reward. Errors: ToolLost if the episode did not run to its end."""
        await self.start()
        self._requests += 1
        number = self._requests
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._send({"id": number} | request)
            found = await answer
        except asyncio.CancelledError:
            self._send({"id": number})
            raise
        finally:
            self._waiting.pop(number, None)
        if "error" in found:
            raise ToolLost(found["error"])
        return float(found["reward"])

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process is not None and self._process.stdin is not None
        self._process.stdin.write(json.dumps(message).encode() + b"\n")

    async def start(self) -> None:
        """Start the process unless it already runs. Errors: ToolLost."""
        self._starting = self._starting or asyncio.Lock()
        async with self._starting:
            if self._reading is None or self._reading.done():
                await self._start()

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        self._process = await asyncio.create_subprocess_exec(
            *self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            limit=MOST_BYTES,
            env=_environment(Path(self._command[0]).parent),
            start_new_session=True,  # Ctrl-C reaches only this process, which then ends the worker
        )
        ready = self._waiting[None] = loop.create_future()
        self._reading = asyncio.create_task(self._read(self._process))
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                found = await ready
        except TimeoutError:
            found = {"error": f"it did not start within {START_TIMEOUT_S:g} s"}
        finally:
            self._waiting.pop(None, None)
        if "error" in found:
            self._reading.cancel()
            raise ToolLost(f"the worker of verifiers: {found['error']}")

    async def _read(self, process: asyncio.subprocess.Process) -> None:
        """Hand each answer of the process to the waiting caller. When the process ends, report this to all waiting callers."""
        assert process.stdout is not None
        problem = ""
        try:
            async for line in process.stdout:
                message = json.loads(line)
                future = self._waiting.get(message["id"])
                if future is not None and not future.done():
                    future.set_result(message)
        except ValueError as error:  # a line that is too long, or not JSON
            problem = f": {error}"
        finally:
            await self._end(process)
            lost = {"error": f"the worker of verifiers has ended{problem}; see its messages above"}
            for future in self._waiting.values():
                if not future.done():
                    future.set_result(lost)

    @staticmethod
    async def _end(process: asyncio.subprocess.Process) -> None:
        """Close the process's input, so that it ends itself and the programs that it started. If it stays alive, kill it."""
        assert process.stdin is not None
        process.stdin.close()
        with suppress(TimeoutError):
            async with asyncio.timeout(END_TIMEOUT_S):
                await process.wait()
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def _environment(programs: Path) -> dict[str, str]:
    """Return a worker's environment variables: PATH begins with `programs` (for uv).

    The key that the run's processes share is left out.
    """
    ours = {name: value for name, value in os.environ.items() if name != RUN_KEY}
    return ours | {"PATH": f"{programs}:{os.environ.get('PATH', os.defpath)}"}


class VerifiersPackage(Task):
    """Task on an environment of `verifiers` with its own agent and rewards. Its agent calls the recording endpoint.

    data.options: `environment` (its config as in the package's own files, without taskset.id, which data.task names); `limit`
    (largest number of tasks); `python` (interpreter of the environment with the package); `network` (True gives episodes
    network access beyond the policy, as judge models need it); `isolated` (False lets episodes run with all rights of this
    user).
    """

    parts = ("reward",)
    main_parts = ("reward",)
    verifier = "verifiers"
    program = "openai_agent"

    def __init__(self, data: DataConfig, demonstrations: bool = False):
        super().__init__(data, demonstrations)
        check_options(data, ("environment", "isolated", "limit", "network", "python"))
        name = data.task.partition(":")[2]
        if not name:
            raise UserError(
                "config: data.task: verifiers:NAME needs the name of a task set, as in verifiers:my-environment"
            )
        python = Path(data.options.get("python", PYTHON))
        if not python.exists():
            raise UserError(
                f"config: data.task: {data.task}: there is no {python}; tools/setup.sh --verifiers makes an environment"
                " with the package, and data.options.python names one of your own"
            )
        config = json.dumps(environment_config(name, data.options.get("environment", {})))
        limit = str(int(data.options.get("limit", 10_000)))
        settings = {"isolated": data.options.get("isolated", True), "network": data.options.get("network", False)}
        for key, value in settings.items():
            if not isinstance(value, bool):
                raise UserError(f"config: data.options.{key} = {value!r} is neither true nor false")
        # -P keeps the worker's folder out of sys.path, because a module there has the name of the package.
        command = [str(python), "-P", str(WORKER)]
        self._worker = Worker([*command, "serve", limit, config, json.dumps(settings)])
        self._split = split_by_hash(self._load([*command, "prompts", limit, config]))

    def _load(self, command: Sequence[str]) -> list[Prompt]:
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=START_TIMEOUT_S, check=False)
        except subprocess.TimeoutExpired:
            raise UserError(f"config: data.task: {self.name}: not loaded within {START_TIMEOUT_S:g} s") from None
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise UserError(f"config: data.task: {self.name}: {last[:500]}")
        found = []
        for index, row in enumerate(map(json.loads, done.stdout.splitlines())):
            text = row["text"] or f"{row['name'] or self.name} {index}"
            found.append(Prompt(f"{self.name}:{index}", text, None, None, row["messages"] or None, {"task": index}))
        if not found:
            raise UserError(f"config: data.task: {self.name} has no tasks")
        return found

    @override
    def prompts(self, split: Split) -> list[Prompt]:
        return self._split[split]

    @override
    async def open(self) -> None:
        await self._worker.start()

    @override
    def agent(self) -> Callable[[Prompt, str], Any]:
        async def play(prompt: Prompt, base_url: str) -> Parts:
            request = {"task": prompt.metadata["task"], "base_url": base_url, "model": "policy"}
            return {"reward": await self._worker.play(request)}

        return play

    @override
    def score(self, prompts: Sequence[Prompt], texts: Sequence[str], truncated: Sequence[bool] = ()) -> list[Parts]:
        """Score episodes that were ended by a limit of the run and therefore have no score from the environment."""
        return [{"reward": 0.0} for _ in prompts]


def environment_config(name: str, given: dict[str, Any]) -> dict[str, Any]:
    """Return the config of an environment: `given`, completed so that it runs on this machine with a plain chat loop."""
    config = {**given, "taskset": {**given.get("taskset", {}), "id": name}}
    if "id" not in given and "agent" not in given:
        config["agent"] = {"runtime": {"type": "subprocess"}, "harness": {"id": "null"}}
    return config
