"""Runs and servers of the program for the stages that need whole ones; where one fails, the ends of its logs are said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterable, Mapping
from itertools import chain
from pathlib import Path
from typing import Any

import psutil

from megatron_rl.credentials import bearer
from megatron_rl.metrics.logger import METRICS_FILE, read_json_lines

REPOSITORY = Path(__file__).resolve().parents[2]
TAIL_CHARACTERS = 2200
"""Last characters of each log in the message of a run that failed; conftest.py keeps as many in all as two logs have."""
POLL_S = 0.1
WITHOUT_FLASH_ATTENTION_3 = (
    *("--attention-backend", "triton", "--sampling-backend", "pytorch"),
    *("--cuda-graph-backend-prefill", "disabled"),
)
"""Flags of a server on a machine that has neither FlashAttention 3 nor FlashInfer. Decode goes by CUDA graphs; those of the
prefill are 58 captures more at each start."""
NAMED = ("train", "sft", "reward", "dpo", "eval", "rollout")
"""Commands that make a run of a config; others (`report`) are given the run itself."""

Values = Mapping[str, Any]
Tell = Callable[[list[dict]], None]


class RunFailed(AssertionError):
    """A run that did not end well, or not in time. Its message ends with the last lines of each log, by name."""


class Running:
    """`megatron-rl COMMAND` on a run's folder, in a process of its own."""

    def __init__(
        self,
        command: str,
        folder: Path,
        config: Path | str | None = None,
        values: Values | None = None,
        flags: Iterable[str] = (),
        logs: Iterable[Path] = (),
    ) -> None:
        """Start it. folder: of the run. config: its YAML file; None for commands that are given a run.

        values: overrides by key. logs: of servers that it has not started. Its own is beside the folder: FOLDER-COMMAND.log.
        """
        self.command, self.folder, self._logs = command, folder, [*logs]
        self.log = folder.with_name(f"{folder.name}-{command}.log")
        arguments = [command, str(config or folder), *flags]
        if command in NAMED:
            own = {"runs_dir": str(folder.parent), "name": folder.name, "logging.trackers": []}
            values = own | dict(values or {})
        arguments += overrides(values or {})
        folder.parent.mkdir(parents=True, exist_ok=True)
        self._started = time.monotonic()
        with open(self.log, "w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "megatron_rl.cli", *arguments],
                cwd=REPOSITORY,
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
            )

    @property
    def seconds(self) -> float:
        """Seconds since its start."""
        return time.monotonic() - self._started

    def lines(self) -> list[dict]:
        """Metrics logged so far, a line a step; evaluations before the first step are step 0."""
        path = self.folder / METRICS_FILE
        return list(read_json_lines(path)) if path.exists() else []

    def steps(self) -> list[dict]:
        """Lines of steps alone."""
        return [line for line in self.lines() if line["step"] > 0]

    def finish(self, timeout: float, tell: Tell | None = None) -> list[dict]:
        """Wait for its end; returns `lines`. tell: gets them in any case. Errors: RunFailed."""
        return self._until(lambda: False, timeout, tell)

    def until(self, step: int, timeout: float, tell: Tell | None = None) -> list[dict]:
        """Wait until a step is logged and kill the process, which would save; returns `lines`. Errors: RunFailed."""
        return self._until(lambda: len(self.steps()) >= step, timeout, tell)

    def wait_for(self, condition: Callable[[], object], timeout: float) -> None:
        """Wait until something holds while it runs. Errors: RunFailed where it ends before, or it takes too long."""
        deadline = time.monotonic() + timeout
        while not condition():
            if self._process.poll() is not None:
                raise RunFailed(self._message(f"ended with status {self._process.returncode} too early"))
            if time.monotonic() > deadline:
                self.kill()
                raise RunFailed(self._message(f"did not come so far in {timeout:.0f} s"))
            time.sleep(POLL_S)

    def _until(self, condition: Callable[[], bool], timeout: float, tell: Tell | None) -> list[dict]:
        deadline = time.monotonic() + timeout
        try:
            while (status := self._process.poll()) is None and not condition():
                if time.monotonic() > deadline:
                    raise RunFailed(self._message(f"was not done after {timeout:.0f} s"))
                time.sleep(POLL_S)
            if status:
                raise RunFailed(self._message(f"ended with status {status}"))
            return self.lines()
        finally:
            self.kill()
            if tell:
                tell(self.lines())

    def kill(self) -> None:
        """End it with kill -9, where it runs; its servers end with it, which is waited for."""
        if self._process.poll() is None:
            servers = self.server_processes()
            self._process.kill()
            self._process.wait(30)
            psutil.wait_procs(servers, 30)

    def server_processes(self) -> list[psutil.Process]:
        """SGLang's processes that are alive below it, without their supervisor."""
        found = []
        for process in psutil.Process(self._process.pid).children(recursive=True):
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            if any(word.startswith("sglang") for word in words[:3]):
                found.append(process)
        return found

    def _message(self, what: str) -> str:
        logged = f"{len(self.steps())} steps logged"
        found = (
            f"megatron-rl {self.command} of {self.folder.name} {what}, {self.seconds:.0f} s after its start, {logged}"
        )
        for log in [*sorted(self.folder.glob("sglang*.log")), *self._logs, self.log]:
            found += f"\n== end of {log.name}:\n{tail(log)}"
        return found


class Served:
    """A server by itself (tools/serve.py), whose address is a file of `folder`: a rollout.address_folder."""

    def __init__(self, folder: Path, config: Path | str, values: Values) -> None:
        """Start it; `wait_ready` waits."""
        self.folder, self.log = folder, folder / "served.log"
        folder.mkdir(parents=True)
        command = [sys.executable, "tools/serve.py", str(config), "--host", "127.0.0.1"]
        command += ["--address-file", str(folder / "one.address"), *overrides(values)]
        with open(self.log, "w") as log:
            options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log}
            self._process = subprocess.Popen(command, cwd=REPOSITORY, **options)

    @property
    def key(self) -> str:
        """Its bearer token."""
        return (self.folder / "server.key").read_text().strip()

    @property
    def address(self) -> str:
        """http://host:port."""
        return (self.folder / "one.address").read_text().strip()

    def ask(self, path: str, body: Values | None = None) -> Any:
        """Its answer, from JSON where it is some: to a GET, or with a body to a POST."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": "application/json"} | bearer(self.key)
        with urllib.request.urlopen(urllib.request.Request(self.address + path, data, headers), timeout=60) as reply:
            text = reply.read().decode()
        return json.loads(text) if text[:1] in ("{", "[") else text

    def wait_ready(self, timeout: float) -> None:
        """Wait until it answers. Errors: RunFailed with the end of its log."""
        deadline = time.monotonic() + timeout
        while self.alive() and time.monotonic() < deadline:
            try:
                self.ask("/ready")
                return
            except OSError:
                time.sleep(POLL_S)
        raise RunFailed(f"the server did not start\n== end of {self.log.name}:\n{tail(self.log)}")

    def alive(self) -> bool:
        """True while its process runs."""
        return self._process.poll() is None

    def stop(self) -> None:
        """End it, and wait for its end."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(30)


def overrides(values: Values) -> list[str]:
    """Command-line arguments of values by key."""
    pairs = ((f"--{key}", value if isinstance(value, str) else json.dumps(value)) for key, value in values.items())
    return [*chain.from_iterable(pairs)]


def run(
    command: str,
    folder: Path,
    config: Path | str | None = None,
    values: Values | None = None,
    flags: Iterable[str] = (),
    *,
    timeout: float,
    tell: Tell | None = None,
) -> list[dict]:
    """`Running` to its end: its metrics lines. Errors: RunFailed."""
    return Running(command, folder, config, values, flags).finish(timeout, tell)


def tail(log: Path, characters: int = TAIL_CHARACTERS) -> str:
    """The end of a log, from the beginning of a line on."""
    try:
        with open(log, "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - characters))
            text = file.read().decode(errors="replace")
    except OSError as error:
        return f"({error.strerror})"
    return text.strip() if len(text) < characters else text[text.find("\n") + 1 :].strip()


def figures(lines: list[dict], keys: Iterable[str]) -> dict[str, list]:
    """Values by key, one a line, None where it has none. A key that ends with * stands for all that begin so; numbers have
    six digits."""
    names = {name: None for line in lines for name in line}
    wanted: dict[str, None] = {}
    for key in keys:
        matching = [name for name in names if name.startswith(key[:-1])] if key.endswith("*") else [key]
        wanted |= dict.fromkeys(matching)
    return {key: [_short(line.get(key)) for line in lines] for key in wanted}


def _short(value: object) -> object:
    return float(f"{value:.6g}") if isinstance(value, float) else value
