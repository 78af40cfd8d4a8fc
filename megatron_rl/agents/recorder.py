"""Records an agent's requests through the OpenAI API as conversations, with exactly the sampled tokens.

Messages that extend a recorded conversation reuse its tokens. All other messages (a sub-agent, a rewritten history) start a new
sequence, whose prompt contains the earlier messages. Tokens that are trained on are never rendered again.
"""

from __future__ import annotations

import asyncio
import json
import reprlib
import secrets
import time
import uuid
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from megatron_rl.agents.conversation import Conversation
from megatron_rl.dialects import Dialect, Parsed, without_end
from megatron_rl.servers.reply import Reply
from megatron_rl.tasks.openai_messages import parse_messages

# -- chat request --------------------------------------------------------------------------------------------------------
# A request for a chat completion (OpenAI's API) is checked once, so that the endpoint can rely on a valid request.


MOST_STOPS = 1024
ROLES = ("system", "developer", "user", "assistant", "tool")
OLD_NAMES = {"functions": "tools", "function_call": "tools and tool_choice"}
"""Fields of an older API, which the policy would not see, and the fields that replace them."""


class BadRequest(Exception):
    """Error for a request that cannot be answered. The agent gets the error's text with status 400."""


def _is_tool(tool: dict[str, Any]) -> dict[str, Any]:
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a tool has a function with a name")
    return tool


def _is_length(tokens: int) -> int:
    if tokens == 0:
        raise ValueError("a reply has at least one token; for no limit, leave it out or give -1")
    return tokens


def _is_message(message: dict[str, Any]) -> dict[str, Any]:
    if (role := message.get("role")) not in ROLES:
        raise ValueError(f"a message has a role, one of {', '.join(ROLES)}, not {reprlib.repr(role)}")
    if message.get("function_call") is not None:
        raise ValueError("function_call belongs to an older API: use tool_calls")
    return message


Whole = Annotated[int, BeforeValidator(lambda n: int(n) if isinstance(n, float) and n.is_integer() else n)]
"""Integer in a request. JSON may write it as 7.0, because JSON has only one type of number."""
Length = Annotated[Whole, AfterValidator(_is_length)]
Message = Annotated[dict[str, Any], AfterValidator(_is_message)]
Tool = Annotated[dict[str, Any], AfterValidator(_is_tool)]


class ChatRequest(BaseModel):
    """The fields of a request that the endpoint uses; other fields are ignored. null means the same as a missing field."""

    model_config = ConfigDict(strict=True, extra="ignore")

    messages: list[Message] = Field(min_length=1)
    tools: list[Tool] | None = None
    n: Literal[1] | None = None
    max_tokens: Length | None = None
    max_completion_tokens: Length | None = None
    stop: Annotated[
        Annotated[list[str], Field(max_length=MOST_STOPS)] | None,
        BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop),
    ] = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None

    @property
    def most_tokens(self) -> int:
        """Largest number of tokens in the reply; below 1: no limit."""
        return self.max_completion_tokens or self.max_tokens or 0

    @property
    def stops(self) -> list[str]:
        """Texts at which a reply ends, without the empty texts that some clients add."""
        return [mark for mark in self.stop or [] if mark]


def parse_request(body: Mapping[str, Any]) -> ChatRequest:
    """Parse the body of a request. Errors: BadRequest that names the first invalid field."""
    for old, new in OLD_NAMES.items():
        if body.get(old) is not None:
            raise BadRequest(f"{old}: it belongs to an older API: use {new}")
    try:
        return ChatRequest.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        raise BadRequest(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


# -- recorder ------------------------------------------------------------------------------------------------------------


CHARACTERS_PER_TOKEN = 64
"""Largest average number of characters per token. A request with more characters cannot fit into the context, so it is refused
without slow tokenization."""
LONG = 65_536
"""Largest number of characters that are tokenized without an extra thread. This takes less than a tenth of a second."""
Ask = Callable[[Conversation, dict[str, Any]], Awaitable[Reply]]
"""Function that samples a reply to a conversation. The second argument holds the agent's SGLang sampling parameters."""


@dataclass(eq=False)
class Branch:
    """One recorded sequence, and the messages that its tokens represent."""

    talk: Conversation
    messages: list[Any]
    """Comparison keys (`_key`) of all messages: prompt, replies and answers to replies."""
    tools: str
    ends: list[tuple[int, int]] = field(default_factory=list)
    """(number of messages, number of tokens including the prompt) after each reply."""
    busy: bool = False
    """True while a reply is being sampled."""


@dataclass
class Session:
    """One sample: all requests of an agent while it works on one prompt."""

    form: Dialect
    ask: Ask
    max_new_tokens: int
    """Largest number of tokens of a sequence after its prompt, tool results included."""
    context_length: int
    stop_token_ids: Sequence[int] = ()
    """Tokens that end a reply, in addition to the dialect's own."""
    branches: list[Branch] = field(default_factory=list)
    last: Parsed = field(default_factory=Parsed)
    """The last reply, parsed."""
    latest: Branch | None = None
    """Sequence that contains the last reply."""
    parts: Collection[str] = ("correct",)
    """Names of the reward parts that may be posted."""
    reward_key: str = field(default_factory=lambda: secrets.token_urlsafe(16))
    """Secret in the URL for posting a reward, which the agent's tools do not know."""
    reward: dict[str, float] = field(default_factory=dict)
    """Reward parts that the agent has set."""
    renders: bool = False
    """True to render the history again when a user turn follows an answer, if the dialect has a format for histories."""
    closed: bool = False
    full: bool = False
    """True if a conversation had no space for another reply."""

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Return a chat completion (OpenAI's API). Errors: BadRequest, and the errors of `ask`."""
        if self.closed:
            raise BadRequest("this session has ended")
        request = parse_request(body)
        stop = request.stops
        try:
            branch = await self._branch(plain(request.messages), request.tools or [])
        except RecursionError:
            raise BadRequest("the request is nested too deeply") from None
        room = min(self.max_new_tokens - len(branch.talk.tokens), self.context_length - len(branch.talk.context))
        if room < 1:
            branch.talk.finish_reason = "tokens"
            branch.talk.drop_open_observation()
            branch.busy = False
            raise self._no_room()
        most = request.most_tokens
        try:
            reply = await self.ask(branch.talk, {"max_new_tokens": min(room, most) if most > 0 else room})
        except BaseException:
            branch.talk.drop_open_observation()
            raise
        finally:
            branch.busy = False
        if self.closed:  # closed while the engine sampled: the reply is not recorded
            raise BadRequest("this session has ended")
        return self._answer(branch, self._stopped(reply, stop), stop)

    def _no_room(self) -> BadRequest:
        self.full = True
        return BadRequest(
            "context_length_exceeded: the conversation has no room for a reply (rollout.max_new_tokens, context_length)"
        )

    def _stopped(self, reply: Reply, stop: Sequence[str]) -> Reply:
        """Cut the reply after the agent's first stop text. The engine has no tokenizer and cannot find stop texts."""
        ids = reply.tokens.tolist()
        if not any(mark in self.form.text(ids) for mark in stop):
            return reply
        low, high = 1, len(ids)  # bisection: a longer text still has the mark
        while low < high:
            middle = (low + high) // 2
            found = any(mark in self.form.text(ids[:middle]) for mark in stop)
            low, high = (low, middle) if found else (middle + 1, high)
        return reply.first(low)

    async def _branch(self, messages: list[dict[str, Any]], tools: Sequence[Any]) -> Branch:
        """Return the branch that the messages extend, with the new messages appended; else a new branch.

        Errors: BadRequest if the text is too long, or if the template does not accept the messages.
        """
        keys, offered = [_key(message) for message in messages], json.dumps(tools, sort_keys=True)
        texts = [offered, *(text for _, content, calls in keys for text in (content, *chain.from_iterable(calls)))]
        if (size := sum(map(len, texts))) > CHARACTERS_PER_TOKEN * self.context_length:
            raise self._no_room()
        best: tuple[int, Branch, int] | None = None
        for branch in self.branches:
            for number, (known, _) in enumerate(branch.ends):
                if self._rendered_anew(branch, number, messages[known:]):
                    continue
                fits = branch.tools == offered and known < len(keys) and branch.messages[:known] == keys[:known]
                if (
                    fits
                    and all(m["role"] != "assistant" for m in messages[known:])
                    and (best is None or known > best[0])
                ):
                    best = known, branch, number
        if best is None:
            made = Branch(
                Conversation(await self._rendered(lambda form: form.prompt(messages, tools), size)),
                keys,
                offered,
                busy=True,
            )
            self.branches.append(made)
            return made
        known, branch, number = best
        fresh, reply = messages[known:], branch.talk.replies[number].tokens.tolist()
        between = await self._rendered(lambda form: form.observation(fresh, after=reply), size)
        if branch.busy or branch.ends[-1][0] != known or branch.talk.finish_reason:
            # The conversation continued differently from here: the tokens so far become another sequence's prompt.
            before = branch.talk.context[: branch.ends[number][1]]
            made = Branch(Conversation([*before, *between]), keys, offered, busy=True)
            self.branches.append(made)
            return made
        branch.busy = True
        branch.talk.add_observation(between, str(fresh[-1]["role"]), fresh)
        branch.messages = keys
        return branch

    def _rendered_anew(self, branch: Branch, number: int, fresh: Sequence[Mapping[str, Any]]) -> bool:
        """Return True if new messages after a reply start a new sequence with a rendered history."""
        if not self.renders or type(self.form).history is Dialect.history:
            return False
        answered = self.form.parse(branch.talk.replies[number].tokens.tolist()).final is not None
        return answered and any(message["role"] == "user" for message in fresh)

    async def _rendered(self, render: Callable[[Dialect], list[int]], size: int) -> list[int]:
        """Return the tokens of messages with `size` characters.

        Long texts are tokenized in a thread, so that other agents need not wait.
        """
        try:
            if size > LONG:
                form, thread = self.form.beside
                tokens = await asyncio.get_running_loop().run_in_executor(thread, render, form)
            else:
                tokens = render(self.form)
        except Exception as error:  # a template is the model's program, and may raise any error
            problem = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
            raise BadRequest(f"messages: the model's chat template does not accept them ({problem})") from None
        if self.closed:
            raise BadRequest("this session has ended")
        return tokens

    def _answer(self, branch: Branch, reply: Reply, stop: Sequence[str]) -> dict[str, Any]:
        ids = reply.tokens.tolist()
        said = without_end(ids, self.stop_token_ids)
        turn, parsed = branch.talk.add_reply(reply, [self.form.message(said)]), self.form.parse(said)
        self.last = parsed
        self.latest = branch
        turn.calls, turn.malformed = [call.name for call in parsed.calls], parsed.malformed or ""
        ended = [token for token in ids if token not in (*self.form.stop_token_ids, *self.stop_token_ids)]
        text = self.form.text(ended) if parsed.malformed is not None else (parsed.final or parsed.said)
        for mark in stop:
            text = text.partition(mark)[0]
        message: dict[str, Any] = {"role": "assistant", "content": text or None}
        if parsed.calls:
            message["tool_calls"] = [
                {
                    "id": f"call_{uuid.uuid4().hex[:24]}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(call.arguments)},
                }
                for call in parsed.calls
            ]
        elif text == "":
            message["content"] = ""
        branch.messages = [*branch.messages, *map(_key, plain([message]))]
        branch.ends.append((len(branch.messages), len(branch.talk.context)))
        cut = reply.finish_reason == "length"
        whole = parsed.calls and not (cut and parsed.open)
        prompt_tokens = len(branch.talk.context) - len(ids)
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": "policy",
            "choices": [
                {
                    "index": 0,
                    "message": message,
                    "finish_reason": "tool_calls" if whole else "length" if cut else "stop",
                    "logprobs": None,
                }
            ],
            "usage": {
                "prompt_tokens": prompt_tokens,
                "completion_tokens": len(ids),
                "total_tokens": prompt_tokens + len(ids),
            },
        }

    def close(self, reason: str) -> None:
        """End all sequences and refuse further requests. reason: finish reason for sequences without one."""
        self.closed = True
        for branch in self.branches:
            branch.talk.drop_open_observation()
            last = branch.talk.replies[-1].finish_reason if branch.talk.replies else "stop"
            ended = "tokens" if last == "length" and reason == "stop" else reason
            branch.talk.finish_reason = branch.talk.finish_reason or ended


def plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return messages whose content is a single text. Errors: BadRequest for parts that are not text."""
    found = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            content = "".join(map(_part_text, content))
        role = "system" if message.get("role") == "developer" else message.get("role")
        found.append({**message, "role": role, "content": "" if content is None else content})
    try:
        return parse_messages(found, strict=False)
    except ValueError as error:
        raise BadRequest(f"messages: {error}") from None


def _part_text(part: Any) -> str:
    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
    if not isinstance(part, dict) or kind not in ("text", "refusal"):
        raise BadRequest(
            f"messages: a part of type {reprlib.repr(kind)} cannot be given to this policy, which takes only text"
        )
    text = part.get(kind, "")
    if not isinstance(text, str):
        raise BadRequest(f"messages: the {kind} of a part is not text")
    return text


def _key(message: Mapping[str, Any]) -> Any:
    """Return the comparison key of a message: role, text and calls, without the ids of the calls."""
    calls = []
    for call in message.get("tool_calls") or []:
        calls.append((call["function"]["name"], json.dumps(call["function"]["arguments"], sort_keys=True)))
    return message["role"], message["content"], calls


def chunks(completion: Mapping[str, Any], *, usage: bool) -> Iterable[dict[str, Any]]:
    """Split a completion into the chunks of a streamed reply. usage: add a chunk with the numbers of tokens."""
    head = {key: completion[key] for key in ("id", "created", "model")} | {"object": "chat.completion.chunk"}
    choice = completion["choices"][0]
    message = choice["message"]

    def chunk(delta: dict[str, Any], finish: str | None = None) -> dict[str, Any]:
        return head | {"choices": [{"index": 0, "delta": delta, "finish_reason": finish, "logprobs": None}]}

    yield chunk({"role": "assistant", "content": ""})
    text = message.get("content") or ""
    for start in range(0, len(text), 64):
        yield chunk({"content": text[start : start + 64]})
    for index, call in enumerate(message.get("tool_calls") or []):
        yield chunk({"tool_calls": [{"index": index, **call}]})
    yield chunk({}, choice["finish_reason"])
    if usage:
        yield head | {"choices": [], "usage": completion["usage"]}
