"""Rollout program for the user's own agents, which use the OpenAI API: one session of the endpoint per sample."""

from __future__ import annotations

import asyncio
import inspect
import logging
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Self, override

from transformers import PreTrainedTokenizerBase

from megatron_rl.agents.agent import AgentCollection, Agents, TimeLimit
from megatron_rl.agents.conversation import Conversation
from megatron_rl.agents.endpoint import Endpoint, reward_parts
from megatron_rl.agents.recorder import Session
from megatron_rl.config import Config
from megatron_rl.config.registry import resolve
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.errors import UserError
from megatron_rl.rollout.collect import Collection
from megatron_rl.servers.client import EngineLost, SGLangClient
from megatron_rl.servers.reply import Reply
from megatron_rl.tasks import Task
from megatron_rl.tools.tool import ToolLost, in_thread

if TYPE_CHECKING:
    from megatron_rl.distributed.parallel import Ranks

log = logging.getLogger(__name__)


class OpenAIAgents(Agents):
    """Calls agent.function, or the task's own agent, once per sample, with the prompt and the base URL of its session.

    The agent is a function (prompt, base_url) -> reward, either async or plain (called in a thread). The reward is a number, or
    numbers by name. If the function returns None, the task computes the reward from the last reply. Instead of returning the
    reward, an agent may post it: a function with a parameter reward_url gets the URL for this. Tools that know only the base
    URL cannot set a reward.
    """

    calls_tools = False

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase, task: Task, ranks: Ranks) -> None:
        name = config.agent.function
        function = resolve("function", name, {}, "agent.function") if name else task.agent()
        if function is None:
            raise UserError(
                "config: rollout.program: openai_agent needs agent.function: module:name, a function (prompt, base_url)"
            )
        super().__init__(config, tokenizer, task, ranks)
        self.set_function(function)
        self.endpoint = Endpoint()
        ranks.leaders_do(lambda: self._begin(own=not name))

    def set_function(self, function: Callable[..., Any]) -> None:
        """Set the function to call for each sample. Errors: UserError if it does not take a prompt and a base URL."""
        self.function = function
        try:
            signature = inspect.signature(function)
            self.posts = "reward_url" in signature.parameters
            signature.bind(None, "", **({"reward_url": ""} if self.posts else {}))
        except (TypeError, ValueError) as error:
            name = self.config.agent.function
            raise UserError(f"config: agent.function: {name} takes no (prompt, base_url): {error}") from None

    def _begin(self, *, own: bool) -> None:
        assert self.toolbox is not None  # only leaders call this
        try:
            if own:
                self.toolbox.loop.run(self.task.open())
            self.toolbox.loop.run(self.endpoint.start())
        except ToolLost as error:
            self.toolbox.close()
            raise UserError(f"data.task: {self.task.name}: {error}") from None

    @override
    def with_task(self, task: Task) -> Self:
        if not self.config.agent.function:
            raise UserError(f"the agent of data.task: {self.task.name} plays only its own prompts; set agent.function")
        return super().with_task(task)

    @override
    def collect(self, **settings: Any) -> Collection:
        # A session may have several sequences: only when all have ended, it is known which belong to the first update.
        settings["features_from"] = 0
        return OpenAICollection(**settings, agents=self)

    @override
    def close(self) -> None:
        if self.toolbox is not None:
            self.toolbox.loop.run(self.endpoint.close())
        super().close()


@dataclass
class OpenAICollection(AgentCollection):
    """The sessions of one step. While a dead engine is restarted, the sessions continue, and their requests wait."""

    agents: OpenAIAgents = None  # type: ignore[assignment]  # as in AgentCollection

    def __post_init__(self) -> None:
        super().__post_init__()
        self._sessions: dict[int, Session] = {}
        self._ended: dict[int, str] = {}
        self._asked: dict[int, int] = {}
        self._working: list[asyncio.Task] = []
        self._flying: set[asyncio.Task] = set()
        self._problem: BaseException | None = None

    @property
    @override
    def _arrived(self) -> int:
        return len(self._ended)

    @override
    async def _run(self, client: SGLangClient) -> None:
        before = client.retried
        self._problem, self._broken = None, asyncio.Event()
        async with client:
            self._client = client
            if not self._working:
                self._served = asyncio.Event()
                self._free = asyncio.Semaphore(self.agents.config.rollout.concurrency)
                self._working = [asyncio.create_task(self._work(request)) for request in self._requests]
            self._served.set()
            broken = asyncio.create_task(self._broken.wait())
            everything = asyncio.create_task(asyncio.wait(self._working))
            try:
                await asyncio.wait([broken, everything], return_when=asyncio.FIRST_COMPLETED)
            except asyncio.CancelledError:
                for task in self._working:
                    task.cancel()
                raise
            finally:
                broken.cancel()
                self._served.clear()
            if self._flying:  # these also notice that the engine is lost
                await asyncio.wait(self._flying)
        self.retries += client.retried - before
        if self._problem is not None and not isinstance(self._problem, EngineLost):
            for task in self._working:
                task.cancel()
        if self._problem is not None:
            raise self._problem
        for task in self._working:
            task.result()

    async def _work(self, request: int) -> None:
        async with self._free:
            await self._lead(request)

    async def _lead(self, request: int) -> None:
        agents, prompt = self.agents, self.prompts[self._prompt_of(request)]
        name = secrets.token_urlsafe(16)  # late requests of an earlier step find no session
        limit = TimeLimit(agents.settings.time_limit_s)

        asking = 0

        async def ask(talk: Conversation, sampling: dict[str, Any]) -> Reply:
            nonlocal asking
            asking += 1
            try:
                return await self._ask_when_served(request, talk, sampling, limit)
            finally:
                asking -= 1

        most, room = self.max_new_tokens, agents.config.rollout.context_length
        ends, parts = self.stop_token_ids, agents.task.parts
        renders = agents.renders(self)
        session = Session(agents.dialect, ask, most, room, stop_token_ids=ends, parts=parts, renders=renders)
        self._sessions[request] = agents.endpoint.sessions[name] = session
        reason = "stop"
        try:
            async with limit:
                named = {"reward_url": agents.endpoint.reward_url(name)} if agents.posts else {}
                work = partial(agents.function, prompt, agents.endpoint.url(name), **named)
                if inspect.iscoroutinefunction(agents.function):
                    found = await work()
                else:
                    found = await in_thread(work)
            if found is not None:
                session.reward = reward_parts(found)
        except TimeoutError as error:
            reason = "time" if limit.expired() and not asking else "failure"
            late = f"a request was running when agent.time_limit_s = {agents.settings.time_limit_s:g} s ended"
            problem = late if limit.expired() else f"its agent failed: {error!r}"
            self._note(request, problem if reason == "failure" else "")
        except Exception as error:  # from the user's function
            reason = "tokens" if session.full else "failure"
            text = f"its agent failed: {type(error).__name__}: {' '.join(str(error).split())[:300]}"
            self._note(request, "" if session.full else text)
        finally:
            session.close(reason)
            agents.endpoint.sessions.pop(name, None)
        cut = session.latest is not None and session.latest.talk.finish_reason == "tokens"
        self._ended[request] = "tokens" if cut and reason == "stop" else reason
        await self._finish([request])

    async def _ask_when_served(
        self, request: int, talk: Conversation, sampling: dict[str, Any], limit: TimeLimit
    ) -> Reply:
        """Return a reply. The time limit pauses while the engine restarts, but not while it samples.

        The time limit is the only bound of a session, because an agent may send any number of requests.
        """
        number = self._asked.setdefault(request, 0)
        self._asked[request] += 1
        while True:
            with limit.paused():
                await self._served.wait()
            try:
                asking = asyncio.create_task(self._reply(self._client, request, talk, sampling, number=number))
                self._flying.add(asking)
                asking.add_done_callback(self._flying.discard)
                return await asking
            except EngineLost as error:
                self._break(error)
            except UserError as error:
                self._break(error)
                raise

    def _break(self, error: BaseException) -> None:
        """Pass the error to the step's loop, which restarts the engine or ends the run."""
        self._served.clear()
        self._problem = self._problem or error
        self._broken.set()

    @override
    def _sample(self, request: int) -> list[Trajectory]:
        session, prompt = self._sessions[request], self.prompts[self._prompt_of(request)]
        talks = [branch.talk for branch in session.branches if branch.talk.replies]
        talks = talks or [Conversation(prompt.tokens)]
        return self._judged(talks, request, session.last.final or "", session.reward, self._ended[request])
