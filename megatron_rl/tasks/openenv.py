"""Task whose environments run behind an OpenEnv server (https://github.com/meta-pytorch/OpenEnv), data.task: openenv.

The server can run anywhere, for example in a container. The task uses the server's WebSocket (/ws: reset and step), with one
session per conversation. It needs no OpenEnv package.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, overload, override
from weakref import WeakKeyDictionary

import aiohttp

from megatron_rl.config import DataConfig
from megatron_rl.credentials import hide, read
from megatron_rl.errors import UserError
from megatron_rl.tasks.task import Parts, Prompt, Split, Task, check_options
from megatron_rl.tools.tool import ToolError, ToolLost
from megatron_rl.tools.toolbox import Environment, Said, Waiting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from megatron_rl.tools.toolbox import Toolbox

HELD_OUT_SIZE = 1000
PAUSE_S = 1.0
"""Seconds to wait before the first observation is requested again."""
MOST_BYTES = 16 * 2**20
"""Largest size in bytes of an answer, including images. Reading a larger answer would block all conversations."""
MOST_UNREAD = 64
"""Largest number of received messages that wait to be read. If there are more, the server has to wait."""
_OF_THE_ACTION = ("INVALID_JSON", "VALIDATION_ERROR", "EXECUTION_ERROR")
"""Codes of the errors that the model's action causes."""


@dataclass(frozen=True)
class Result:
    """A server's answer to reset or step."""

    observation: dict[str, Any]
    reward: float
    done: bool


class Server:
    """An OpenEnv server. At most `sessions` sessions are open at once; further callers wait."""

    def __init__(
        self, url: str, *, sessions: int, timeout_s: float, headers: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        self.url, self.sessions, self.timeout_s, self.headers = url.rstrip("/"), sessions, timeout_s, headers
        self._open: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def __str__(self) -> str:
        return f"OpenEnv server {hide(self.url)}"

    @asynccontextmanager
    async def session(self, waiting: Waiting = nullcontext) -> AsyncIterator[Session]:
        """Open an environment for the duration of the context. waiting: context entered during the wait for a slot.

        Errors: ToolLost.
        """
        free = self._open.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self.sessions))
        with waiting():
            await free.acquire()
        try:
            try:
                async with (
                    aiohttp.ClientSession(self.url, headers=self.headers) as http,
                    http.ws_connect("/ws", max_msg_size=MOST_BYTES) as socket,
                ):
                    session = Session(self, socket)
                    try:
                        yield session
                        with suppress(aiohttp.ClientError, ConnectionError):
                            await socket.send_json({"type": "close"})
                    finally:
                        session.reading.cancel()
            except (aiohttp.ClientError, OSError) as error:
                raise ToolLost(f"{self}: {hide(repr(error))}") from error
        finally:
            free.release()

    async def action_schema(self) -> dict[str, Any]:
        """Return the JSON schema of the actions. Errors: ToolLost."""
        try:
            timeout = aiohttp.ClientTimeout(self.timeout_s)
            session = aiohttp.ClientSession(self.url, timeout=timeout, headers=self.headers, raise_for_status=True)
            async with session as http:
                return (await (await http.get("/schema")).json())["action"]
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError, TypeError, KeyError, RecursionError) as error:
            raise ToolLost(f"{self} gives no /schema: {hide(repr(error))}") from error


class Session:
    """A session with one environment of a server."""

    def __init__(self, server: Server, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._server, self._socket = server, socket
        self._answers: asyncio.Queue[aiohttp.WSMessage] = asyncio.Queue(MOST_UNREAD)
        self.reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        """Read messages continuously. Reading also answers pings; a server ends a session that leaves pings unanswered."""
        while True:
            message = await self._socket.receive()
            await self._answers.put(message)
            if message.type is not aiohttp.WSMsgType.TEXT:
                return

    async def reset(self, arguments: Mapping[str, Any]) -> Result:
        """Start an episode. Errors: ToolLost; UserError if the environment does not accept the arguments."""
        try:
            return await self._ask("reset", arguments)
        except ToolError as error:
            raise UserError(f"data.options.reset: {self._server} does not accept it: {error}") from None

    async def step(self, action: Mapping[str, Any]) -> Result:
        """Take an action. Errors: ToolError if the environment does not accept the action; ToolLost."""
        return await self._ask("step", action)

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Result:
        where = str(self._server)
        try:
            async with asyncio.timeout(self._server.timeout_s):
                await self._socket.send_json({"type": kind, "data": dict(data)})
                answer = await self._answers.get()
        except TimeoutError:
            raise ToolLost(f"{where}: no answer to {kind} within {self._server.timeout_s:g} s") from None
        if answer.type is not aiohttp.WSMsgType.TEXT:
            why = (
                f": {answer.data}" if isinstance(answer.data, Exception) else ""
            )  # for example if the answer is too large
            raise ToolLost(f"{where}: the connection ended at {kind} ({answer.type.name}{why})")
        try:
            message = json.loads(answer.data)
            content = message["data"]
            if message["type"] == "error":
                problem = " ".join(str(content.get("message")).split())[:300]
                if content.get("code") in _OF_THE_ACTION:
                    raise ToolError(f"{problem}{_details(content.get('errors'))}")
                if content.get("code") == "CAPACITY_REACHED":
                    problem += "; lower data.options.sessions, or raise the server's max_concurrent_envs"
                raise ToolLost(f"{where}: {problem}")
            reward = float(content.get("reward") or 0.0)
            if not math.isfinite(reward):
                raise ToolLost(f"{where}: the reward of {kind} is {reward}")
            return Result(dict(content["observation"]), reward, bool(content.get("done")))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
            raise ToolLost(f"{where}: its answer to {kind} does not have the form of OpenEnv: {error!r}") from error


def _details(errors: Any) -> str:
    found = [f"{'.'.join(map(str, error.get('loc', ())))}: {error.get('msg')}" for error in errors or ()]
    return f" ({'; '.join(found)[:300]})" if found else ""


def to_action(text: str, schema: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the model's answer to an action: a JSON object, or the value of the only required field.

    Errors: ToolError if the answer is neither.
    """
    body = text.strip()
    if body.startswith("```") and body.endswith("```"):
        body = body.strip("`").partition("\n")[2].strip()
    value: Any = body
    with suppress(ValueError, RecursionError):
        value = json.loads(body)
    if isinstance(value, dict):
        return value
    required = schema.get("required", [])
    if len(required) != 1:
        raise ToolError(f"an action is a JSON object with {', '.join(required) or 'fields of the environment'}")
    kind = schema.get("properties", {}).get(required[0], {}).get("type")
    return {required[0]: body if kind == "string" else value}


class OpenEnv(Task):
    """Task: episodes on an OpenEnv server. The first observation is the prompt, answers are actions, and rewards are summed.

    data.options: `url`; `headers` (of requests, for example with a key); `size` (number of training episodes, each with its own
    seed for reset); `reset` (more arguments of reset); `observation` (the observation's field that the policy sees; by default
    the only text field, or all fields as JSON); `sessions`; `timeout_s`.
    """

    parts = ("reward",)
    main_parts = ("reward",)
    verifier = "openenv"

    def __init__(self, data: DataConfig, demonstrations: bool = False):
        super().__init__(data, demonstrations)
        check_options(data, ("url", "headers", "size", "reset", "observation", "sessions", "timeout_s"))
        options = data.options
        if not options.get("url"):
            raise UserError("config: data.task: openenv needs data.options.url, as in http://localhost:8000")
        self.size = int(options.get("size", 10_000))
        self.reset = dict(options.get("reset", {}))
        self.shown = options.get("observation")
        self.server = Server(
            str(options["url"]),
            sessions=int(options.get("sessions", 16)),
            timeout_s=float(options.get("timeout_s", 60.0)),
            headers=_headers(options.get("headers", {})),
        )
        self.schema = _now(self.server.action_schema())

    @override
    def prompts(self, split: Split) -> Episodes:
        """Return the episodes of a split. Held-out episodes have the seeds from 0 on, training episodes the following seeds."""
        held_out = range(min(self.size, HELD_OUT_SIZE))
        return Episodes(self, held_out if split == "eval" else range(len(held_out), len(held_out) + self.size))

    def prompt(self, seed: int) -> Prompt:
        """Return the prompt of the episode with this seed. Errors: UserError if the server does not answer."""
        text = self.data.template.replace("{prompt}", self.text(_now(self._first(seed)).observation))
        messages = [{"role": "user", "content": text}] if self.data.chat else None
        return Prompt(f"openenv:{seed}", text, None, None, messages, {"seed": seed})

    async def _first(self, seed: int) -> Result:
        """Return the first result of an episode. A full or restarting server gets the request again. Errors: ToolLost."""
        deadline = asyncio.get_running_loop().time() + self.server.timeout_s
        while True:
            try:
                async with self.server.session() as session:
                    return await session.reset({"seed": seed} | self.reset)
            except ToolLost:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                await asyncio.sleep(PAUSE_S)

    def text(self, observation: Mapping[str, Any]) -> str:
        """Return an observation as text for the policy.

        Errors: ToolLost if the observation lacks the field that data.options.observation names.
        """
        if self.shown is not None:
            if self.shown not in observation:
                raise ToolLost(
                    f"data.options.observation: {self.server} gives no '{self.shown}', but {', '.join(observation)}"
                )
            return str(observation[self.shown])
        texts = [value for value in observation.values() if isinstance(value, str)]
        return texts[0] if len(texts) == 1 else json.dumps(observation, ensure_ascii=False)

    @override
    def environment(self, prompt: Prompt, toolbox: Toolbox) -> Environment:
        return Episode(toolbox, task=self, prompt=prompt)

    @override
    def score(self, prompts: Sequence[Prompt], texts: Sequence[str], truncated: Sequence[bool] = ()) -> list[Parts]:
        """Return the reward of the first action of each episode, for rollout.program: single_turn."""

        async def one(prompt: Prompt, text: str) -> Parts:
            async with self.server.session() as session:
                await session.reset({"seed": prompt.metadata["seed"]} | self.reset)
                try:
                    return {"reward": (await session.step(to_action(text, self.schema))).reward}
                except ToolError:
                    return {"reward": 0.0}

        async def together() -> list[Parts]:
            return await asyncio.gather(*(one(*pair) for pair in zip(prompts, texts, strict=True)))

        return _now(together())


def _headers(given: Any) -> dict[str, str]:
    if not isinstance(given, Mapping):
        raise UserError("config: data.options.headers: {NAME: VALUE} is wanted")
    return {str(name): read(str(value), f"data.options.headers.{name}") for name, value in given.items()}


class Episodes(Sequence[Prompt]):
    """Prompts of episodes with different seeds. Each prompt is requested from the server at its first use, and cached."""

    def __init__(self, task: OpenEnv, seeds: range) -> None:
        self._task, self._seeds = task, seeds
        self._known: dict[int, Prompt] = {}

    @override
    def __len__(self) -> int:
        return len(self._seeds)

    @overload
    def __getitem__(self, index: int) -> Prompt: ...
    @overload
    def __getitem__(self, index: slice) -> list[Prompt]: ...
    @override
    def __getitem__(self, index: int | slice) -> Prompt | list[Prompt]:
        if isinstance(index, slice):
            return [self[i] for i in range(len(self))[index]]
        seed = self._seeds[index]
        if seed not in self._known:
            self._known[seed] = self._task.prompt(seed)
        return self._known[seed]


@dataclass
class Episode(Environment):
    """A conversation with one environment of the server. The policy's final answers are actions; tool calls go to the tools."""

    task: OpenEnv = None  # type: ignore[assignment]  # the fields of Environment have defaults
    prompt: Prompt = None  # type: ignore[assignment]
    total: float = 0.0
    _context: Any = None
    _session: Session = field(init=False)

    @override
    async def respond(self, turn: Said) -> list[Mapping[str, Any]] | None:
        if turn.final is None:
            return await super().respond(turn)
        if self._context is None:
            await self._begin()
        try:
            result = await self._session.step(to_action(turn.final, self.task.schema))
        except ToolError as error:
            return [{"role": "user", "content": f"Error: {error}"}]
        self.total += result.reward
        return None if result.done else [{"role": "user", "content": self.task.text(result.observation)}]

    async def _begin(self) -> None:
        """Open the session and start the episode. Errors: ToolLost if the first observation differs from the prompt."""
        self._context = self.task.server.session(self.waiting)
        self._session = await self._context.__aenter__()
        result = await self._session.reset({"seed": self.prompt.metadata["seed"]} | self.task.reset)
        shown = self.task.data.template.replace("{prompt}", self.task.text(result.observation))
        if shown != self.prompt.text:
            raise ToolLost(
                f"{self.task.server}: two resets with seed {self.prompt.metadata['seed']} begin with"
                " different observations; the environment has to respect its seed, or data.options.reset to fix the episode"
            )

    @override
    def reward_parts(self) -> dict[str, float]:
        return {"reward": self.total}

    @override
    async def close(self) -> None:
        context, self._context = self._context, None
        if context is not None:
            with suppress(ToolLost):
                await context.__aexit__(None, None, None)
        await super().close()


def _now[T](work: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine to its end from code without an event loop. Errors: UserError if the server fails."""
    try:
        return asyncio.run(work)
    except ToolLost as error:
        raise UserError(f"data.task: openenv: {error}") from None
