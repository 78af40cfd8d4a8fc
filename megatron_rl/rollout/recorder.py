"""What an agent says through the OpenAI API, as conversations that are exact to the token.

Messages that extend a recorded conversation reuse its tokens. All others (a sub-agent, a rewritten history) begin a sequence of
their own, whose prompt holds whatever was said before; nothing that was sampled is rendered again where it trains.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from megatron_rl.environments.messages import parse_messages
from megatron_rl.rollout.client import Reply
from megatron_rl.rollout.conversation import Conversation
from megatron_rl.rollout.dialects import Dialect, Parsed, without_end

Ask = Callable[[Conversation, dict[str, Any]], Awaitable[Reply]]
"""Samples a reply after a conversation; the second argument has SGLang's sampling parameters that the agent chose."""


class BadRequest(Exception):
    """What the agent asks for cannot be done; its text goes back with status 400."""


@dataclass(eq=False)
class Branch:
    """One recorded sequence, and the messages that it stands for."""

    talk: Conversation
    messages: list[Any]
    """As compared (`_key`): those of the prompt, replies and what was answered."""
    tools: str
    ends: list[tuple[int, int]] = field(default_factory=list)
    """After each reply: how many messages and how many tokens (the prompt's too) there were."""
    busy: bool = False
    """A reply is being sampled."""


@dataclass
class Session:
    """One sample: all that an agent asks while it works on one prompt."""

    form: Dialect
    ask: Ask
    max_new_tokens: int
    """Of one sequence, observations included."""
    context_length: int
    stop_token_ids: Sequence[int] = ()
    """Tokens that end a reply, beside the dialect's own."""
    branches: list[Branch] = field(default_factory=list)
    last: Parsed = field(default_factory=Parsed)
    """What the last reply says."""
    latest: Branch | None = None
    """The sequence that it belongs to."""
    reward: dict[str, float] = field(default_factory=dict)
    """Parts that the agent has given."""
    closed: bool = False
    full: bool = False
    """A conversation had no room for one more reply."""

    async def complete(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """A chat completion (OpenAI's API). Errors: BadRequest, and those of `ask`."""
        messages = body.get("messages")
        if self.closed:
            raise BadRequest("this session has ended")
        if (
            not isinstance(messages, list)
            or not messages
            or not all(isinstance(m, dict) and "role" in m for m in messages)
        ):
            raise BadRequest("messages: a list of objects with a role is wanted")
        if body.get("n") not in (None, 1):
            raise BadRequest("n: one reply at a time")
        asked = body.get("max_completion_tokens") or body.get("max_tokens") or 0
        if not isinstance(asked, int | float) or not float(asked).is_integer():
            raise BadRequest(f"max_tokens: a whole number is wanted, not {asked!r:.40}")
        stop = body.get("stop") or []
        stop = [stop] if isinstance(stop, str) else stop
        if not isinstance(stop, list) or not all(isinstance(mark, str) for mark in stop):
            raise BadRequest(f"stop: a text or a list of texts is wanted, not {stop!r:.40}")
        tools = body.get("tools") or []
        branch = self._branch(plain(messages), tools)
        room = min(self.max_new_tokens - len(branch.talk.tokens), self.context_length - len(branch.talk.context))
        if room < 1:
            self.full = True
            branch.talk.finish_reason = "tokens"
            branch.talk.drop_open_observation()
            branch.busy = False
            raise BadRequest(
                "context_length_exceeded: the conversation has no room for a reply (rollout.max_new_tokens, context_length)"
            )
        try:
            reply = await self.ask(branch.talk, {"max_new_tokens": min(room, int(asked)) if asked > 0 else room})
        except BaseException:
            branch.talk.drop_open_observation()
            raise
        finally:
            branch.busy = False
        if self.closed:  # while the engine sampled: what it answers has no place in the record any more
            raise BadRequest("this session has ended")
        return self._answer(branch, self._stopped(reply, stop), stop)

    def _stopped(self, reply: Reply, stop: Sequence[str]) -> Reply:
        """The reply up to the first text at which the agent wants it to stop. The engine has no tokenizer to look for it."""
        ids = reply.tokens.tolist()
        if not any(mark in self.form.text(ids) for mark in stop):
            return reply
        low, high = 1, len(ids)  # fewest tokens whose text has a mark: with more it still has one
        while low < high:
            middle = (low + high) // 2
            found = any(mark in self.form.text(ids[:middle]) for mark in stop)
            low, high = (low, middle) if found else (middle + 1, high)
        return reply.first(low)

    def _branch(self, messages: list[dict[str, Any]], tools: Sequence[Any]) -> Branch:
        """The branch that the messages extend, with what is new in it appended; else a new one."""
        keys, offered = [_key(message) for message in messages], json.dumps(tools, sort_keys=True)
        best: tuple[int, Branch, int] | None = None
        for branch in self.branches:
            for number, (known, _) in enumerate(branch.ends):
                fits = branch.tools == offered and known < len(keys) and branch.messages[:known] == keys[:known]
                if (
                    fits
                    and all(m["role"] != "assistant" for m in messages[known:])
                    and (best is None or known > best[0])
                ):
                    best = known, branch, number
        if best is None:
            made = Branch(Conversation(self.form.prompt(messages, tools)), keys, offered, busy=True)
            self.branches.append(made)
            return made
        known, branch, number = best
        fresh, reply = messages[known:], branch.talk.replies[number].tokens.tolist()
        between = self.form.observation(fresh, after=reply)
        if branch.busy or branch.ends[-1][0] != known or branch.talk.finish_reason:
            # The conversation has gone on otherwise: up to here it is another sequence's prompt.
            before = branch.talk.context[: branch.ends[number][1]]
            made = Branch(Conversation([*before, *between]), keys, offered, busy=True)
            self.branches.append(made)
            return made
        branch.busy = True
        branch.talk.add_observation(between, str(fresh[-1]["role"]), fresh)
        branch.messages = keys
        return branch

    def _answer(self, branch: Branch, reply: Reply, stop: Sequence[str]) -> dict[str, Any]:
        """Record a reply, and say it in OpenAI's form."""
        ids = reply.tokens.tolist()
        said = without_end(ids, self.stop_token_ids)
        turn, parsed = branch.talk.add_reply(reply, [self.form.message(said)]), self.form.parse(said)
        self.last = parsed
        self.latest = branch
        turn.calls, turn.malformed = [call.name for call in parsed.calls], parsed.malformed or ""
        ended = [token for token in ids if token not in (*self.form.stop_token_ids, *self.stop_token_ids)]
        text = self.form.text(ended) if parsed.malformed is not None else (parsed.final or "")
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
        """End all sequences; no more is sampled. reason: why, for those that did not end before."""
        self.closed = True
        for branch in self.branches:
            branch.talk.drop_open_observation()
            last = branch.talk.replies[-1].finish_reason if branch.talk.replies else "stop"
            ended = "tokens" if last == "length" and reason == "stop" else reason
            branch.talk.finish_reason = branch.talk.finish_reason or ended


def plain(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages with the content of each as one text. Errors: BadRequest for parts that are no text."""
    found = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            for part in content:
                if not isinstance(part, dict) or part.get("type") not in ("text", "refusal"):
                    kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                    raise BadRequest(f"messages: a part of type {kind} cannot be given to this policy: text alone can")
            content = "".join(str(part.get("text", "")) for part in content)
        role = "system" if message["role"] == "developer" else message["role"]
        found.append({**message, "role": role, "content": content or ""})
    try:
        return parse_messages(found)
    except ValueError as error:
        raise BadRequest(f"messages: {error}") from None


def _key(message: Mapping[str, Any]) -> Any:
    """What makes two messages the same: role, text and calls, but not the calls' ids."""
    calls = []
    for call in message.get("tool_calls") or []:
        calls.append((call["function"]["name"], json.dumps(call["function"]["arguments"], sort_keys=True)))
    return message["role"], message["content"], calls


def chunks(completion: Mapping[str, Any], *, usage: bool) -> Iterable[dict[str, Any]]:
    """A completion as the chunks of a stream."""
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
