"""Worker process that plays environments of the package `verifiers`, in that package's own Python, without megatron_rl.

    python verifiers_worker.py prompts LIMIT CONFIG            one line of JSON for each task
    python verifiers_worker.py serve LIMIT CONFIG SETTINGS     requests on standard input, answers on standard output

CONFIG is an environment's config of `verifiers.v1` as JSON. SETTINGS is {"isolated", "network"}. A request {"id", "task",
"base_url", "model"} gets the answer {"id", "reward"} or {"id", "error"}; a request {"id"} alone cancels the episode. The worker
ends when its standard input is closed, so it never outlives its parent.

Each episode is played and judged in a forked process, so its changes to the process end with it. An isolated fork has no
privileges, sees no other processes, and has no network except for the policy. It can write only to its own folder (with
Landlock, if the kernel has it).
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import asyncio
import contextlib
import ctypes
import fcntl
import itertools
import json
import os
import selectors
import shutil
import signal
import socket
import struct
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO
from urllib.parse import urlsplit

if TYPE_CHECKING:
    import verifiers.v1 as vf

END_S = 5.0
"""Longest time in seconds for a canceled episode to end what it started."""
MOST_BYTES = 4096
"""Largest size of an episode's answer, in bytes."""
_PDEATHSIG, _CAPBSET_DROP, _NO_NEW_PRIVS = 1, 24, 38
_LANDLOCK_CREATE, _LANDLOCK_ADD, _LANDLOCK_RESTRICT = 444, 445, 446
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_WRITES = {1: sum(1 << bit for bit in (1, *range(4, 13))), 2: 1 << 13, 3: _TRUNCATE}
"""{Landlock version: rights to write that it introduced}. Version 1 is for files and folders, version 2 for moves between
folders, version 3 for truncation."""
LIBC = ctypes.CDLL(None, use_errno=True)


def chat_message(message: Any) -> dict[str, str]:
    """Return a message of the package as {"role", "content"}."""
    found = message.model_dump(mode="json")
    content = found["content"]
    text = content if isinstance(content, str) else "".join(part.get("text", "") for part in content or [])
    return {"role": found["role"], "content": text}


def prompt(data: vf.TaskData) -> dict[str, Any]:
    """Return the prompt of a task: its text, and the messages with which the conversation starts."""
    asked = data.prompt
    messages = [{"role": "user", "content": asked}] if isinstance(asked, str) else [*map(chat_message, asked or ())]
    if data.system_prompt:
        messages.insert(0, {"role": "system", "content": data.system_prompt})
    return {"text": data.prompt_text, "messages": messages, "name": data.name or data.id or ""}


@dataclass
class Settings:
    """Settings for isolation. isolated: episodes lose all rights. network: isolated episodes may still use the network."""

    isolated: bool = True
    network: bool = False


# -- what an episode may do --------------------------------------------------------------------------------------------


def isolate(folder: str, network: bool) -> None:
    """Remove all rights of this process and its children, except writing to a folder. This cannot be undone.

    The next child is the first process of a new process namespace. When this child ends, all processes of the namespace end.
    Errors: OSError.
    """
    user, group = os.geteuid(), os.getegid()
    flags = os.CLONE_NEWPID | os.CLONE_NEWIPC | (0 if network else os.CLONE_NEWNET)
    os.unshare(flags | (os.CLONE_NEWUSER if user else 0))
    if user:
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"{user} {user} 1")
        Path("/proc/self/gid_map").write_text(f"{group} {group} 1")
    if not network:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:  # SIOCSIFFLAGS: up, running
            fcntl.ioctl(any_socket, 0x8914, struct.pack("16sh", b"lo", 0x1 | 0x40))
    for capability in range(64):
        LIBC.prctl(_CAPBSET_DROP, capability)
    LIBC.capset((ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)())  # version 3, this process
    LIBC.prctl(_NO_NEW_PRIVS, 1, 0, 0, 0)
    _write_into(folder)


def _write_into(folder: str) -> None:
    """Restrict writes to the folder and to devices that store nothing, if the kernel has Landlock."""
    version = LIBC.syscall(_LANDLOCK_CREATE, None, 0, 1)
    rights = sum(bits for since, bits in _WRITES.items() if since <= version)
    if not rights:
        return
    ruleset = LIBC.syscall(_LANDLOCK_CREATE, ctypes.byref(ctypes.c_uint64(rights)), 8, 0)
    of_files = rights & (_WRITE_FILE | _TRUNCATE)
    for path, allowed in (
        (folder, rights),
        ("/dev/null", of_files),
        ("/dev/zero", of_files),
        ("/dev/urandom", of_files),
    ):
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
        rule = ctypes.create_string_buffer(struct.pack("=Qi", allowed, descriptor))
        if LIBC.syscall(_LANDLOCK_ADD, ruleset, 1, rule, 0):
            raise OSError(ctypes.get_errno(), f"Landlock: {path}")
        os.close(descriptor)
    if LIBC.syscall(_LANDLOCK_RESTRICT, ruleset, 0):
        raise OSError(ctypes.get_errno(), "Landlock")
    os.close(ruleset)


async def _pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(ConnectionError):
        while part := await reader.read(65536):
            writer.write(part)
            await writer.drain()
    with contextlib.suppress(ConnectionError, RuntimeError):
        writer.write_eof()


async def _join(opened: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with contextlib.suppress(OSError):
        further, back = await opened()
        await asyncio.gather(_pump(reader, back), _pump(further, writer))
        back.close()
    writer.close()


def start_relay(path: str, host: str, port: int) -> int:
    """Start a process that forwards a local socket to the policy. Episodes without a network can reach only this socket."""

    async def relay() -> None:
        opened = lambda: asyncio.open_connection(host, port)  # noqa: E731
        server = await asyncio.start_unix_server(lambda r, w: _join(opened, r, w), sock=listening)
        await server.serve_forever()

    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen(1024)
    child = os.fork()
    if not child:
        try:
            LIBC.prctl(_PDEATHSIG, signal.SIGKILL)
            os.closerange(0, 2)
            asyncio.run(relay())
        finally:
            os._exit(1)
    listening.close()
    return child


# -- an episode --------------------------------------------------------------------------------------------------------


async def play(env: vf.Env, task: vf.Task, request: dict[str, Any]) -> float:
    """Play one episode and return its reward. Errors: RuntimeError if the episode did not run to its end."""
    import verifiers.v1 as vf  # imported here, because the trainer's Python does not have the package

    client = vf.EvalClientConfig(base_url=request["base_url"], api_key_var="OF_NO_MEANING_HERE")
    context = vf.ModelContext(model=request["model"], client=client)
    [slot] = env.slots(task)
    episode = await env.run_slot(slot, context)
    problems = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok and problems:
        raise RuntimeError(f"{problems[-1].type}: {' '.join(problems[-1].message.split())[:500]}")
    return sum(trace.reward for trace in episode.traces) / max(1, len(episode.traces))


async def _episode(env: vf.Env, task: vf.Task, request: dict[str, Any], relay: str) -> float:
    """Play an episode with servers that only it uses. SIGTERM cancels the episode and ends the servers."""
    playing = asyncio.current_task()
    assert playing is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, playing.cancel)
    async with contextlib.AsyncExitStack() as stack:
        if relay:
            address = urlsplit(request["base_url"])
            opened = lambda: asyncio.open_unix_connection(relay)  # noqa: E731
            bridge = await asyncio.start_server(lambda r, w: _join(opened, r, w), "127.0.0.1", address.port)
            await stack.enter_async_context(bridge)
            request = request | {"base_url": address._replace(netloc=f"127.0.0.1:{address.port}").geturl()}
        await stack.enter_async_context(env.serving())
        return await play(env, task, request)


def _work_in(folder: str) -> None:
    from verifiers.v1.runtimes import subprocess as runtime

    os.environ["TMPDIR"] = tempfile.tempdir = folder
    runtime.CACHE_DIR = Path(folder)


def _child(work: Any, told: int, folder: str, settings: Settings) -> None:
    """Do the work in a forked process, write the answer to file descriptor `told`, and exit with status 0. Never returns."""
    status = 1
    try:
        LIBC.prctl(_PDEATHSIG, signal.SIGKILL)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(2, 1)
        os.dup2(told, 3)
        os.closerange(4, 4096)
        if settings.isolated:
            isolate(folder, settings.network)
            inner = os.fork()
            if inner:  # this process forwards signals and the exit status
                signal.signal(signal.SIGTERM, lambda *_: os.kill(inner, signal.SIGTERM))
                status = os.waitstatus_to_exitcode(os.waitpid(inner, 0)[1])
                os._exit(status if status >= 0 else 128 - status)
            LIBC.prctl(_PDEATHSIG, signal.SIGKILL)
        os.write(3, json.dumps(work()).encode()[:MOST_BYTES])
        status = 0
    finally:
        os._exit(status)


def _end_of(pid: int) -> int:
    """Return the exit status of a process that has sent its answer. If the process does not end within 1 s, it is killed."""
    deadline = time.monotonic() + 1.0
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@dataclass
class Episode:
    """A forked process that plays one episode."""

    number: int
    pid: int
    told: int
    folder: str
    heard: bytes = b""
    given_up: float = 0.0
    """Time at which the episode is killed; 0 unless the episode was canceled."""


@dataclass
class Episodes:
    """All episodes that are being played, each in its own forked process."""

    env: Any
    tasks: list[Any]
    answers: TextIO
    settings: Settings
    playing: dict[int, Episode] = field(default_factory=dict)
    relay: str = ""

    def __post_init__(self) -> None:
        self.ready = selectors.DefaultSelector()
        self.base = tempfile.mkdtemp(prefix="megatron_rl-verifiers-")
        self._relaying = 0

    def answer(self, message: dict[str, Any]) -> None:
        """Send an answer to the trainer."""
        self.answers.write(json.dumps(message) + "\n")
        self.answers.flush()

    def fork(self, work: Any, number: int) -> Episode:
        """Run `work` in a forked process."""
        folder = tempfile.mkdtemp(dir=self.base)
        hear, told = os.pipe()
        pid = os.fork()
        if not pid:
            _work_in(folder)
            _child(work, told, folder, self.settings)
        os.close(told)
        episode = Episode(number, pid, hear, folder)
        self.ready.register(hear, selectors.EVENT_READ, episode)
        return episode

    def begin(self, request: dict[str, Any]) -> None:
        """Start the requested episode."""
        if self.settings.isolated and not self.settings.network and not self.relay:
            address = urlsplit(request["base_url"])
            self.relay = f"{self.base}/policy"
            self._relaying = start_relay(self.relay, str(address.hostname), int(address.port or 80))

        def work() -> dict[str, Any]:
            try:
                return {"reward": asyncio.run(_episode(self.env, self.tasks[request["task"]], request, self.relay))}
            except Exception as error:
                return {"error": f"{type(error).__name__}: {error}"[:700]}

        self.playing[request["id"]] = self.fork(work, request["id"])

    def give_up(self, number: int) -> None:
        """Cancel an episode, so that it can end what it started. If it does not end in time, it is killed."""
        episode = self.playing.get(number)
        if episode and not episode.given_up:
            episode.given_up = time.monotonic() + END_S
            os.kill(episode.pid, signal.SIGTERM)

    def hear(self, episode: Episode) -> bool:
        """Read an episode's output, and pass the answer on when the episode ends. Returns True if the episode has ended."""
        part = os.read(episode.told, MOST_BYTES)
        episode.heard += part
        if part and len(episode.heard) <= MOST_BYTES:
            return False
        self.ready.unregister(episode.told)
        os.close(episode.told)
        status = _end_of(episode.pid)
        shutil.rmtree(episode.folder, ignore_errors=True)
        self.playing.pop(episode.number, None)
        try:
            found = json.loads(episode.heard)
            said = {"reward": float(found["reward"])} if "reward" in found else {"error": str(found["error"])}
        except (ValueError, TypeError, KeyError):
            said = {"error": f"its process has ended with status {status}; see its messages above"}
        self.answer({"id": episode.number, **said})
        return True

    def wait(self, also: int | None = None) -> bool:
        """Read episodes' output until descriptor `also` is readable, and return True.

        Without `also`, read until no episode is running, and return False.
        """
        while True:
            now = time.monotonic()
            for episode in [*self.playing.values()]:
                if episode.given_up and now > episode.given_up:
                    os.kill(episode.pid, signal.SIGKILL)
            found = {key.fd: key.data for key, _ in self.ready.select(0.5)}
            for descriptor, episode in found.items():
                if descriptor != also:
                    self.hear(episode)
            if also in found:
                return True
            if also is None and not self.playing:
                return False

    def serve(self) -> None:
        """Handle requests as they arrive, until standard input is closed."""
        self.ready.register(0, selectors.EVENT_READ)
        waiting = b""
        while self.wait(0) and (part := os.read(0, 65536)):
            *lines, waiting = (waiting + part).split(b"\n")
            for line in lines:
                request = json.loads(line)
                (self.begin(request) if "task" in request else self.give_up(request["id"]))
        self.ready.unregister(0)

    def close(self) -> None:
        """End all episodes and remove their folders."""
        for number in [*self.playing]:
            self.give_up(number)
        self.wait()
        if self._relaying:
            os.kill(self._relaying, signal.SIGKILL)
        shutil.rmtree(self.base, ignore_errors=True)


async def prepare(env: vf.Env) -> None:
    """Do once what each episode would otherwise repeat: start and stop the servers, install the agents' client programs."""
    from verifiers.v1.runtimes.subprocess import SubprocessConfig, SubprocessRuntime

    async with env.serving():
        for name, harness in env._harnesses.items():
            if isinstance(config := env._agent_specs[name].runtime, SubprocessConfig):
                runtime = SubprocessRuntime(config)
                await runtime.start()
                try:
                    await harness.setup(runtime)
                finally:
                    await runtime.teardown()


def problem_of(episodes: Episodes) -> str:
    """Return the reason why episodes cannot be isolated on this machine, or ''."""
    said: list[dict[str, Any]] = []
    episodes.answer = said.append  # type: ignore[method-assign]
    try:
        tried = episodes.fork(lambda: {"reward": 0.0}, -1)
        while not episodes.hear(tried):
            pass
    finally:
        del episodes.answer
    if "error" not in said[0]:
        return ""
    return (
        "episodes cannot be isolated here (user namespaces are forbidden?); data.options.isolated: false plays them with all"
        " rights of this user"
    )


def main(kind: str, limit: str, config: str, settings: str = "{}") -> None:
    """Run the command; the module's docstring describes it."""
    from verifiers.v1.utils.loaders import load_environment, resolve_env_config

    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # output that packages print must not mix with the answers
    env = load_environment(resolve_env_config(json.loads(config)))
    tasks = list(itertools.islice(env.taskset, int(limit)))
    if kind == "serve":
        episodes = Episodes(env, tasks, answers, Settings(**json.loads(settings)))
        try:
            asyncio.run(prepare(env))
            problem = problem_of(episodes)
            episodes.answer({"id": None, "error": problem} if problem else {"id": None})
            if not problem:
                episodes.serve()
        finally:
            episodes.close()
        return
    for task in tasks:
        answers.write(json.dumps(prompt(task.data)) + "\n")
    answers.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
