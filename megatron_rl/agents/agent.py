"""The agent loop: generate, parse, act, observe. Many conversations run at once, and each is recorded token by token."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, override

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_rl.agents.conversation import Conversation, Messages
from megatron_rl.algorithms.sampling_support import request_seed
from megatron_rl.config import AgentConfig, Config
from megatron_rl.config.registry import nearest
from megatron_rl.data.sequence import Sequence
from megatron_rl.data.trajectory import TRUNCATED, Trajectory
from megatron_rl.dialects import DIALECTS, Dialect, Harmony, dialect, without_end
from megatron_rl.errors import UserError
from megatron_rl.rollout.collect import Collection
from megatron_rl.rollout.program import SingleTurn
from megatron_rl.servers.client import Aborted, SGLangClient
from megatron_rl.servers.reply import Reply
from megatron_rl.tasks import Prompt, Task
from megatron_rl.tasks.chat import check_text
from megatron_rl.tasks.openai_messages import parse_messages
from megatron_rl.tasks.preferences import Response
from megatron_rl.tools.tool import ToolLost
from megatron_rl.tools.toolbox import Environment, Toolbox

if TYPE_CHECKING:
    from megatron_rl.distributed.parallel import Ranks

# -- time limit ----------------------------------------------------------------------------------------------------------
# A time limit that pauses while the engine works.


class TimeLimit:
    """Ends the body of `async with TimeLimit(seconds)` with TimeoutError, like asyncio.timeout. `paused` stops the clock."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds
        """Remaining seconds. The value is current only while the clock is paused, and after the body has ended."""
        self._pauses = 0
        self._since = 0.0

    async def __aenter__(self) -> TimeLimit:
        self._since = time.monotonic()
        self._timeout = asyncio.timeout(self.left)
        await self._timeout.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if not self._pauses:
            self.left -= time.monotonic() - self._since
        return await self._timeout.__aexit__(kind, error, trace)

    def expired(self) -> bool:
        """Return whether this limit ended the body."""
        return self._timeout.expired()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock within the block. Blocks may overlap, and may run in other tasks than the body."""
        if not self._pauses:
            self.left -= time.monotonic() - self._since
            self._reschedule(None)
        self._pauses += 1
        try:
            yield
        finally:
            self._pauses -= 1
            if not self._pauses:
                self._since = time.monotonic()
                self._reschedule(asyncio.get_running_loop().time() + self.left)

    def _reschedule(self, when: float | None) -> None:
        with suppress(RuntimeError):  # the limit has expired already, or the body has ended
            self._timeout.reschedule(when)


# -- agent ---------------------------------------------------------------------------------------------------------------


log = logging.getLogger(__name__)

WELL_FORMED = "well_formed"
"""Name of a reward part: 1 if no call in the conversation was malformed, else 0."""


class Agents(SingleTurn):
    """Rollout program for conversations of several turns with tools, in the model's dialect (its chat format)."""

    parts = (WELL_FORMED,)
    calls_tools = True
    """True if the tools of the run itself answer the model's calls."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase, task: Task, ranks: Ranks) -> None:
        super().__init__(config, tokenizer, task, ranks)
        self.settings: AgentConfig = config.agent
        self.dialect: Dialect = dialect(self.settings.dialect, tokenizer, **self.settings.dialect_options)
        if self._harmony and self.settings.dialect in DIALECTS and not isinstance(self.dialect, Harmony):
            raise UserError(
                f"config: agent.dialect: {self.settings.dialect} would read the channels of this model (Harmony) as a part of"
                " its answers; set agent.dialect: harmony"
            )
        if self.settings.history == "rendered" and type(self.dialect).history is Dialect.history:
            raise UserError(
                f"config: agent.history: rendered with agent.dialect: {self.settings.dialect}, which keeps the history as"
                " sampled; set history: sampled"
            )
        self.toolbox: Toolbox | None = ranks.leaders_do(self._open)
        # Prompts are the same on every process, so the tools that they list must be the same too.
        self.schemas = ranks.from_main(self.toolbox.schemas if self.toolbox else None)

    def _open(self) -> Toolbox:
        toolbox = Toolbox(self.settings, self.task.tools())
        toolbox.open()
        return toolbox

    @override
    def with_task(self, task: Task) -> Self:
        known = {schema["function"]["name"] for schema in self.schemas}
        if missing := [tool.name for tool in task.tools() if tool.name not in known]:
            raise UserError(
                f"data.task: {task.name} brings the tool '{missing[0]}', which the run's conversations do not have"
            )
        return super().with_task(task)

    @override
    def encode(self, prompt: Prompt) -> Prompt:
        messages = prompt.messages or [{"role": "user", "content": prompt.text}]
        try:
            return replace(prompt, tokens=self.dialect.prompt(messages, prompt.tools or self.schemas))
        except UserError as error:
            raise UserError(f"data: prompt {prompt.prompt_id}: {error}") from None

    @property
    @override
    def stop_token_ids(self) -> list[int]:
        """Empty, because each request gets the dialect's stop tokens."""
        return []

    @override
    def check_tools(self, prompt: Prompt) -> None:
        there = [schema["function"]["name"] for schema in self.schemas]
        told = [schema["function"]["name"] for schema in prompt.tools]
        if self.calls_tools and (missing := [name for name in told if name not in there]):
            raise UserError(
                f"data: prompt {prompt.prompt_id} has the tool '{missing[0]}' ('{self.config.data.tools_key}'), which the run"
                f" does not have{nearest(missing[0], there)}; add it to agent.tools, or set data.tools_key: null"
            )

    @override
    def sequence(self, prompt: Prompt, response: Response) -> Sequence:
        return demonstration(self.dialect, prompt, response)

    def renders(self, collection: Collection) -> bool:
        """Return True if a user turn after an answer starts a new sequence, whose prompt is the rendered history."""
        return collection.evaluates or self.settings.history == "rendered"

    @override
    def collect(self, **settings: Any) -> Collection:
        if self.settings.history == "rendered":  # the sequences of the first update are known only at the end
            settings["features_from"] = 0
        return AgentCollection(**settings, agents=self)

    @override
    def check(self, collection: Collection) -> None:
        """Raise UserError if there were several conversations over all processes and all failed, which cannot be chance."""
        assert isinstance(collection, AgentCollection)
        found = self.ranks.gather_from_leaders((collection.failures, collection.asked))
        problems = [problem for failures, _ in found for problem in failures]
        if len(problems) == sum(asked for _, asked in found) > 1:
            raise UserError(f"agent: all {len(problems)} conversations failed, the last one: {problems[-1]}")

    @override
    def close(self) -> None:
        if self.toolbox is not None:
            self.toolbox.close()


def demonstration(form: Dialect, prompt: Prompt, turns: str | list[dict[str, Any]]) -> Sequence:
    """Return a conversation to imitate. The loss includes replies (except those of weight 0), but not observations.

    turns: the answer, or messages in OpenAI's form (assistant with content and tool_calls, tool). Errors: UserError.
    """
    try:
        check_text(turns)
        messages = parse_messages([{"role": "assistant", "content": turns}] if isinstance(turns, str) else turns)
    except ValueError as error:
        raise UserError(f"data.task: the demonstration of {prompt.prompt_id}: {error}") from None
    sequence, counted, results, reply = list[int](), list[bool](), list[dict[str, Any]](), list[int]()
    try:
        for message in messages:
            if message["role"] != "assistant":
                results.append(message)
                continue
            between = form.observation(results, after=reply or None) if results or reply else []
            reply, results = form.reply_of(message), []
            sequence += [*between, *reply]
            counted += [False] * len(between) + [message.get("weight", 1) != 0] * len(reply)
    except UserError as error:
        raise UserError(f"data: the demonstration of {prompt.prompt_id}: {error}") from None
    found = Sequence.demonstration(prompt.tokens, sequence)
    found["loss_mask"] = np.asarray(counted, bool)
    return found


@dataclass
class AgentCollection(Collection):
    """The conversations of one step. They keep their replies, so `run` can continue them after a failure of an engine."""

    agents: Agents = None  # type: ignore[assignment]  # the fields of Collection have defaults

    def __post_init__(self) -> None:
        super().__post_init__()
        self._talks = {r: Conversation(self.prompts[self._prompt_of(r)].tokens) for r in self._requests}
        """Current (last) sequence of each conversation."""
        self._before: dict[int, list[Conversation]] = defaultdict(list)
        """Earlier sequences of each conversation, if new sequences start from rendered histories."""
        self._said: dict[int, list[tuple[list[int], Messages]]] = defaultdict(list)
        """(reply, messages that answer the reply) of each conversation, in order."""
        self._worlds: dict[int, Environment] = {}
        self._finals: dict[int, str] = {}
        self.failures: list[str] = []
        """Reasons of failures that were not the model's fault, one for each failed conversation."""

    @property
    def asked(self) -> int:
        """Number of this process's conversations that were not aborted."""
        return len(self._all) - len(self.aborted)

    @property
    @override
    def _arrived(self) -> int:
        return sum(bool(talk.finish_reason) for talk in self._talks.values())

    @property
    @override
    def finished(self) -> set[int]:
        return {*self.known} | {request for request, talk in self._talks.items() if talk.finish_reason}

    @override
    def run(self, client: SGLangClient) -> None:
        toolbox = self.agents.toolbox
        assert toolbox is not None  # only leaders send requests
        toolbox.loop.run(self._until_canceled(client))

    @override
    async def _run(self, client: SGLangClient) -> None:
        before = client.retried
        async with client:
            waiting = [r for r in self._requests if not self._talks[r].finish_reason]
            done = await asyncio.gather(*(self._converse(client, r) for r in waiting), return_exceptions=True)
        self.retries += client.retried - before
        self._raise(done)

    async def _converse(self, client: SGLangClient, request: int) -> None:
        """Run a conversation to its end. Errors: EngineLost; the conversation then keeps its state."""
        talk, settings = self._talks[request], self.agents.settings
        limit = TimeLimit(settings.time_limit_s - talk.seconds)
        assert self.agents.toolbox is not None
        world = self._worlds.get(request)
        if world is None:
            world = self._worlds[request] = self.agents.task.environment(
                self.prompts[self._prompt_of(request)], self.agents.toolbox
            )
        world.waiting = limit.paused
        try:
            async with limit:
                while not self._talks[request].finish_reason:
                    await self._turn(client, request, self._talks[request], world, limit)
        except TimeoutError:
            if not limit.expired():
                raise
            self._talks[request].finish_reason = "time"
        except ToolLost as error:
            self._note(request, str(error))
            self._talks[request].finish_reason = "failure"
        except Aborted as ended:
            self.aborted[request] = self._length(request) + sum(ended.lengths)
            await world.close()
            return
        except asyncio.CancelledError:
            if client.aborted:  # the conversation was in a tool, and the run continues without it
                self.aborted[request] = self._length(request)
                await world.close()
            raise
        finally:
            self._talks[request].seconds = settings.time_limit_s - limit.left
        self._talks[request].drop_open_observation()
        await world.close()
        await self._finish([request])

    async def _turn(
        self, client: SGLangClient, request: int, talk: Conversation, world: Environment, limit: TimeLimit
    ) -> None:
        settings, form = self.agents.settings, self.agents.dialect
        room = self.max_new_tokens - self._length(request)
        most, before = min(room, settings.max_turn_tokens or room), self._said[request]
        with limit.paused():
            reply = await self._reply(client, request, talk, {"max_new_tokens": most}, number=len(before))
        said = without_end(reply.tokens.tolist(), self.stop_token_ids)
        turn, parsed = talk.add_reply(reply, [form.message(said)]), form.parse(said)
        turn.calls, turn.malformed = [call.name for call in parsed.calls], parsed.malformed or ""
        self._finals[request] = parsed.final or ""
        cut = reply.finish_reason != "stop"
        if cut and (parsed.open or not parsed.calls):
            talk.finish_reason = "tokens"
            return
        replies = len(before) + 1
        if replies == settings.max_turns and (parsed.calls or parsed.malformed):
            talk.finish_reason = "turns"
            return
        world.seconds = 0.0
        try:
            messages = await world.respond(parsed)
        except ToolLost:
            raise
        except Exception as error:  # from a task's own environment
            raise ToolLost(f"its environment: {type(error).__name__}: {' '.join(str(error).split())[:300]}") from error
        if messages is None:
            talk.finish_reason = "stop"
            return
        if replies == settings.max_turns:
            talk.finish_reason = "turns"
            return
        before.append((reply.tokens.tolist(), messages))
        if parsed.final is not None and self._begin_anew(request, talk, messages):
            return
        tokens = form.observation(messages, after=reply.tokens.tolist())
        if self._length(request) + len(tokens) >= self.max_new_tokens:
            talk.finish_reason = "tokens"
            return
        talk.add_observation(tokens, str(messages[-1]["role"]), messages).seconds = world.seconds

    def _length(self, request: int) -> int:
        """Return the number of tokens of all sequences of a conversation, without their prompts."""
        return sum(len(talk.tokens) for talk in (*self._before[request], self._talks[request]))

    def _begin_anew(self, request: int, talk: Conversation, messages: Messages) -> bool:
        """Start a new sequence with the rendered history if a user turn follows an answer. Return True if this is the case."""
        agents, prompt = self.agents, self.prompts[self._prompt_of(request)]
        if not agents.renders(self) or all(message["role"] != "user" for message in messages):
            return False
        asked = prompt.messages or [{"role": "user", "content": prompt.text}]
        history = agents.dialect.history(asked, prompt.tools or agents.schemas, self._said[request])
        if history is None:
            return False
        left = min(self.max_new_tokens - self._length(request), agents.config.rollout.context_length - len(history))
        if left < 1:
            talk.finish_reason = "tokens"
            return True
        talk.finish_reason = "stop"
        self._before[request].append(talk)
        self._talks[request] = Conversation(history)
        return True

    async def _reply(
        self, client: SGLangClient, request: int, talk: Conversation, sampling: dict[str, Any], *, number: int
    ) -> Reply:
        """Sample the next reply. sampling: SGLang's parameters. number: count of the conversation's earlier replies."""
        stop = sorted({*map(int, self.stop_token_ids), *self.agents.dialect.stop_token_ids})
        sampling = self.support.request() | {"stop_token_ids": stop} | sampling
        if self.seed is not None:
            key = f"{self.seed}/turn {number}" if number else self.seed
            sampling["sampling_seed"] = request_seed(key, request)
        shared = [talk.prompt] if not number and self.samples_per_prompt > 1 else []
        (reply,) = await client.call(
            [talk.context],
            sampling,
            number=request,  # same for all turns, so that a conversation stays with its server
            total=self._total,
            prefixes=shared,
            routes=self.routes,
            routes_start=talk.known_routes(client.pushed()) if self.routes else 0,
            features=self._features_of(request),
            top_log_probs=self.top_log_probs,
            options=self.support.options(),
        )
        return reply

    @override
    def _sample(self, request: int) -> list[Trajectory]:
        parts = self._worlds[request].reward_parts() if request in self._worlds else {}
        talk = self._talks[request]
        talks = [*self._before[request], *([talk] if talk.replies or not self._before[request] else [])]
        return self._judged(talks, request, self._finals.get(request, ""), parts, talk.finish_reason)

    def _judged(
        self, talks: Seq[Conversation], request: int, text: str, parts: dict[str, float], ended: str
    ) -> list[Trajectory]:
        """Return the sequences of one sample with their rewards, which they share.

        text: answer of the sample; parts: rewards that are known already; ended: finish reason.
        """
        p = self._prompt_of(request)
        well_formed = float(not any(turn.malformed for talk in talks for turn in talk.turns))
        parts = {name: float(value) for name, value in parts.items()} | {WELL_FORMED: well_formed}
        masked = ended == "failure" or (ended in TRUNCATED and self.agents.settings.on_truncation == "mask")
        made = []
        for part, talk in enumerate(talks):
            found = talk.trajectory(
                self.routes,
                prompt_id=self.prompts[p].prompt_id,
                group_id=p,
                support=self.support.sampled(),
                text=text,
                part=part,
            )
            found.reward_parts, found.masked, found.finish_reason = dict(parts), masked, ended
            if masked:
                found["loss_mask"] = False
            made.append(found)
        return made

    def _note(self, request: int, problem: str) -> None:
        """Record that a conversation failed through no fault of the model, so that it is not trained on."""
        if problem:
            self.failures.append(problem)
            log.warning(f"conversation {self.prompts[self._prompt_of(request)].prompt_id} is not trained on: {problem}")
