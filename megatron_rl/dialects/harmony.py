"""Calls and channels as gpt-oss models write them, rendered and parsed by openai-harmony (github.com/openai/harmony)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, override

from openai_harmony import (
    Author,
    Conversation,
    DeveloperContent,
    HarmonyError,
    ReasoningEffort,
    RenderConversationConfig,
    Role,
    SystemContent,
    ToolDescription,
    ToolNamespaceConfig,
)
from openai_harmony import Message as Spoken
from transformers import PreTrainedTokenizerBase

from megatron_rl.dialects.base import Call, Dialect, Message, Parsed, Schemas, encodable
from megatron_rl.dialects.harmony_ids import MARKS, HarmonyIds
from megatron_rl.errors import UserError
from megatron_rl.tasks import openai_messages
from megatron_rl.tasks.openai_messages import parse_call

CHANNELS = ("analysis", "commentary", "final")
FUNCTIONS = "functions"
"""Namespace of the tools that the developer message describes."""
BUILT_IN = ("python", "browser")
"""Further tool namespaces that the models know from training."""
_JSON = "<|constrain|>json"
_KEEP = RenderConversationConfig(auto_drop_analysis=False)
_UNSET = SystemContent()


class Harmony(Dialect):
    """The dialect of gpt-oss: a reply is one or several messages, each on the channel analysis, commentary or final.

    The text of the final channel is the answer. Analysis is thinking. Commentary without a recipient is text before a call or
    an answer. A reply without an answer or a call is malformed. A call is a message to `functions.NAME` with the arguments as a
    JSON object. A reply may have several calls, if all but the last end in <|end|>. The system prompt becomes the developer's
    instructions.

    A tool named `python` with the single argument `code` is the interpreter that the models know. The system message describes
    it under `# Tools`, with the tool's own description, and a message to `python` is plain code.

    The options (agent.dialect_options) set lines of the system message; None leaves a line out. The date is left out by
    default, so that the same prompt has the same tokens every day.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        reasoning_effort: str | None = "medium",
        model_identity: str | None = _UNSET.model_identity,
        knowledge_cutoff: str | None = _UNSET.knowledge_cutoff,
        conversation_start_date: str | None = None,
    ) -> None:
        """Create it. Errors: UserError if reasoning_effort is not low, medium or high, or if the tokenizer lacks `MARKS`."""
        super().__init__(tokenizer)
        efforts = {effort.value.lower(): effort for effort in ReasoningEffort}
        if reasoning_effort is not None and reasoning_effort not in efforts:
            raise UserError(
                f"config: agent.dialect_options.reasoning_effort: {reasoning_effort} is none of {', '.join(efforts)}"
            )
        self._ids = HarmonyIds(tokenizer)
        self._encoding = self._ids.encoding
        lines = [model_identity, knowledge_cutoff, conversation_start_date]
        identity, cutoff, date = (None if line is None else str(line) for line in lines)  # YAML has date objects
        self._system = SystemContent(
            reasoning_effort=efforts.get(reasoning_effort or ""),
            model_identity=identity,
            knowledge_cutoff=cutoff,
            conversation_start_date=date,
        )
        ends = self._encoding.stop_tokens_for_assistant_actions()
        self._stops = sorted(self._ids.from_library(ends))
        self._begin = self._encoding.render_conversation_for_completion(Conversation(), Role.ASSISTANT, _KEEP)

    @property
    @override
    def stop_token_ids(self) -> list[int]:
        """Token ids of <|return|> and <|call|>. The token <|end|> ends a message, but not a reply."""
        return list(self._stops)

    # -- parsing of replies ---------------------------------------------------------------------------------------------

    @override
    def parse(self, token_ids: Sequence[int]) -> Parsed:
        ids = [int(token) for token in token_ids]
        while ids and ids[-1] in self._stops:
            ids.pop()
        if problem := self._misplaced(ids):
            return Parsed(malformed=problem)
        try:
            messages = self.messages(ids)
        except (HarmonyError, OverflowError) as error:
            return Parsed(malformed=f"the reply has not the form of messages ({' '.join(str(error).split())[:200]})")
        calls, finals, said, heard = [], [], [], ""
        for message in messages:
            try:
                if _to(message) is not None:
                    calls.append(_call(message))
                elif (channel := _channel(message)) == "final":
                    finals.append(_text(message))
                else:
                    said += [_text(message)] if channel == "commentary" else []
                    continue
            except ValueError as error:
                return Parsed(malformed=str(error))
            heard += _text(message)
        if "\ufffd" in heard and not self._is_utf8(ids):  # the library's replacement of invalid bytes
            return Parsed(malformed="a call or the answer is not valid UTF-8")
        if calls and finals:
            return Parsed(malformed="a call and an answer on the final channel in one reply")
        if len(finals) > 1:
            return Parsed(malformed="more than one message on the final channel")
        if not calls and not finals:
            return Parsed(
                malformed="the reply has neither a call nor a message on the final channel, which is the answer"
            )
        ended = ids[-1] == self._ids.marks["<|end|>"]
        if not calls:
            return Parsed(final=finals[0])
        beside = "\n".join(filter(None, said))
        return Parsed(calls, said=beside, open=not ended and _is_code(messages[-1]))

    @override
    def message(self, token_ids: Sequence[int]) -> dict[str, Any]:
        """Return the reply as `Dialect.message` does, but without the thinking, because conversation histories leave it out."""
        parsed = self.parse(token_ids)
        if parsed.malformed is not None:
            return super().message(token_ids)
        functions = [{"name": call.name, "arguments": call.arguments} for call in parsed.calls]
        calls = [{"type": "function", "function": function} for function in functions]
        return {"role": "assistant", "content": parsed.final or parsed.said} | ({"tool_calls": calls} if calls else {})

    def messages(self, token_ids: Sequence[int]) -> list[Spoken]:
        """Return the messages of a reply; the last one may lack its end. Errors: HarmonyError for an invalid form."""
        found = self._encoding.parse_messages_from_completion_tokens(
            self._ids.to_library(token_ids), Role.ASSISTANT, strict=True
        )
        for message in found:  # without a recipient, the library reads the content type as one
            if message.content_type is None and (message.recipient or "").startswith("<|constrain|>"):
                message.content_type, message.recipient = message.recipient, None
        return found

    def _is_utf8(self, token_ids: Sequence[int]) -> bool:
        try:
            self._encoding.decode_utf8(self._ids.to_library(token_ids))
        except HarmonyError:
            return False
        return True

    def _misplaced(self, token_ids: Sequence[int]) -> str | None:
        """Describe a misplaced special token, which the library would read as text within a message; None if there is none."""
        marks = self._ids.marks
        ends = {marks["<|end|>"], *self._stops}
        places = {  # allowed positions of each special token, and the next position
            marks["<|start|>"]: {"": "header"},
            marks["<|channel|>"]: {"header": "header"},
            marks["<|constrain|>"]: {"header": "header"},
            marks["<|message|>"]: {"header": "content"},
            **{end: {"header": "", "content": ""} for end in ends},
        }
        place = "header"
        for token in token_ids:
            if not 0 <= token < self._ids.size:
                return f"the reply has the id {token}, which is no token"
            if token in self._ids.special:
                follows = places.get(token, {}).get(place)
                if follows is None:
                    name = self.tokenizer.convert_ids_to_tokens(token)
                    return f"the special token {name} {f'in the {place} of a message' if place else 'after a message'}"
                place = follows
        return None

    @override
    def parse_text(self, text: str) -> Parsed:
        return self.parse(self.tokenizer.encode(encodable(text), add_special_tokens=False))

    # -- prompts and observations ---------------------------------------------------------------------------------------

    @override
    def prompt(self, messages: Sequence[Message], tools: Schemas = ()) -> list[int]:
        return self._rendered(self._opening(messages, tools))

    @override
    def history(
        self, messages: Sequence[Message], tools: Schemas, turns: Sequence[tuple[Sequence[int], Sequence[Message]]]
    ) -> list[int] | None:
        """Return the history as `Dialect.history` does. An answer ends in <|end|>; the analysis channel is left out.

        Calls and results on the analysis channel are left out too. Returns None if a reply cannot be parsed.
        """
        told = self._opening(messages, tools)
        try:
            for reply, answered in turns:
                told += self.messages(reply)
                asked = self._asked(reply)
                told += [one for message in answered for one in self._told(message, asked)]
        except (HarmonyError, OverflowError):
            return None
        return self._rendered([message for message in told if message.channel != "analysis"])

    def _opening(self, messages: Sequence[Message], tools: Schemas) -> list[Spoken]:
        functions = [tool.get("function") or {} for tool in tools]
        if not all(isinstance(function.get("name"), str) for function in functions):
            raise UserError("agent.dialect: harmony needs a name for every function")
        system = self._system.model_copy()
        for function in filter(_is_interpreter, functions):
            description = encodable(function.get("description") or "")
            system.with_tools(ToolNamespaceConfig(name="python", description=description, tools=[]))
        declared = [_declared(function) for function in functions if not _is_interpreter(function)]
        told = [Spoken.from_role_and_content(Role.SYSTEM, system)]
        messages = list(messages)
        developer = DeveloperContent()
        if messages and messages[0]["role"] in ("system", "developer"):
            developer.instructions = encodable(str(messages.pop(0).get("content") or "")) or None
        if declared:
            developer = developer.with_function_tools(declared)
        if developer.to_dict() != DeveloperContent().to_dict():
            told.append(Spoken.from_role_and_content(Role.DEVELOPER, developer))
        final = [place for place, m in enumerate(messages) if m["role"] == "assistant" and not m.get("tool_calls")]
        for place, message in enumerate(messages):
            if final and place <= final[-1]:  # the history leaves out thinking before an answer
                message = {key: value for key, value in message.items() if key != "reasoning_content"}
            told += self._told(message)
        return told

    @override
    def observation(self, results: Sequence[str | Message], after: Sequence[int] | None = None) -> list[int]:
        """Return the tokens that `Dialect.observation` describes.

        The author of a result is the called tool: the one with the message's name, or the next one in the order of calls.
        """
        asked = self._asked(after or [])
        told = []
        for result in results:
            message: Message = {"role": "tool", "content": result} if isinstance(result, str) else result
            told += self._told(message, asked)
        return self._missing_end(after) + self._rendered(told)

    @override
    def call_text(self, call: Call) -> str:
        return self._encoding.decode(self._said([_calling(call)]))

    @override
    def reply(self, text: str) -> list[int]:
        """Return the tokens of an answer on the final channel."""
        return self.reply_of({"role": "assistant", "content": text})

    @override
    def reply_of(self, message: Message) -> list[int]:
        return self._ids.from_library(self._said(self._told(message)))

    def _said(self, messages: Sequence[Spoken]) -> list[int]:
        """Return one reply that consists of these messages of the assistant, as ids of the openai-harmony library."""
        end, call = (self._encoding.encode(mark, allowed_special="all")[0] for mark in ("<|end|>", "<|call|>"))
        rendered = [self._encoding.render(message) for message in messages[:-1]]
        ids = [token for one in rendered for token in [*one[:-1], end if one[-1] == call else one[-1]]]
        ids += self._encoding.render_conversation_for_training(Conversation(messages=list(messages[-1:])), _KEEP)
        return ids[len(self._begin) :]

    def _rendered(self, messages: Sequence[Spoken]) -> list[int]:
        conversation = Conversation(messages=list(messages))
        try:
            ids = self._encoding.render_conversation_for_completion(conversation, Role.ASSISTANT, _KEEP)
        except HarmonyError as error:
            raise UserError(
                f"agent.dialect: harmony cannot render these messages: {' '.join(str(error).split())[:300]}"
            ) from None
        return self._ids.from_library(ids)

    def _told(self, message: Message, asked: list[tuple[str, str]] | None = None) -> list[Spoken]:
        """Convert a message in OpenAI's form to one or more messages of the openai-harmony library. asked: see `_author`."""
        text, role = encodable(str(message.get("content") or "")), message["role"]
        if role == "assistant":
            calls = [_calling(Call(*parse_call(call))) for call in message.get("tool_calls") or []]
            thought = encodable(str(message.get("reasoning_content") or ""))
            before = [_spoken(thought, "analysis")] if thought else []
            if text and calls:
                before.append(_spoken(text, "commentary"))
            return [*before, *(calls or [_spoken(text, "final")])]
        if role in ("system", "developer"):
            return [Spoken.from_role_and_content(Role.DEVELOPER, DeveloperContent(instructions=text))]
        if role == "user":
            return [Spoken.from_role_and_content(Role.USER, text)]
        if role != "tool":
            raise UserError(f"agent.dialect: harmony has no role '{role}'; it has system, user, assistant and tool")
        name, channel = _author(message.get("name"), asked if asked is not None else [])
        author = Author.new(Role.TOOL, name)
        result = Spoken.from_author_and_content(author, text).with_channel(channel)
        return [result.with_recipient("assistant")]

    def _asked(self, reply: Sequence[int]) -> list[tuple[str, str]]:
        """Return (recipient, channel) of each call in a reply, malformed calls included."""
        try:
            messages = self.messages(reply)
        except (HarmonyError, OverflowError):
            return []
        return [(to, message.channel or "commentary") for message in messages if (to := _to(message)) and _named(to)]

    def _missing_end(self, reply: Sequence[int] | None) -> list[int]:
        """Return the tokens that a truncated reply lacks at its end: the end mark of its last message."""
        marks = self._ids.marks
        if not reply or reply[-1] in {marks["<|end|>"], *self._stops}:
            return []
        try:
            calls = _to(self.messages(reply)[-1]) is not None
        except (HarmonyError, OverflowError):
            calls = False
        return [marks["<|call|>" if calls else "<|end|>"]]


def _text(message: Spoken) -> str:
    return "".join(getattr(content, "text", "") for content in message.content)


def _shown(name: str) -> str:
    return repr(name[:60])


def _spoken(text: str, channel: str) -> Spoken:
    return Spoken.from_role_and_content(Role.ASSISTANT, text).with_channel(channel)


def _channel(message: Spoken) -> str:
    """Return the channel of an assistant's message. Errors: ValueError, in the words that the model gets to read."""
    role = message.author.role
    if role is not Role.ASSISTANT:
        raise ValueError(
            f"a message of {_shown(message.author.name or role.value)}: the reply is to be the assistant's alone"
        )
    if message.channel not in CHANNELS:
        channel = f"on an unknown channel {_shown(message.channel)}" if message.channel else "without a channel"
        raise ValueError(f"a message {channel}; the channels are {', '.join(CHANNELS)}")
    return message.channel


def _to(message: Spoken) -> str | None:
    return None if message.recipient == "all" else message.recipient


def _named(recipient: str) -> str | None:
    """Return the name of the tool that a recipient stands for; None for a malformed one, for example with a special token."""
    if any(mark in recipient for mark in MARKS):
        return None
    namespace, _, name = recipient.partition(".")
    if namespace == FUNCTIONS:
        return name or None
    return recipient if namespace in BUILT_IN and all(recipient.split(".")) else None


def _is_code(message: Spoken) -> bool:
    return message.recipient == "python" and "json" not in (message.content_type or "")


def _call(message: Spoken) -> Call:
    """Convert a message to a call. Errors: ValueError, in the words that the model gets to read."""
    channel, recipient, text = _channel(message), _to(message) or "", _text(message)
    name = _named(recipient)
    if name is None:
        raise ValueError(f"an unknown recipient {_shown(recipient)}; a call goes to {FUNCTIONS}.NAME")
    if channel == "final":
        raise ValueError("a call on the final channel; calls go to the commentary channel")
    if _is_code(message):
        return Call(name, {"code": text})
    try:
        arguments = openai_messages.loads(text)
    except ValueError as error:
        raise ValueError(f"the arguments of {_shown(name)} are not JSON ({error})") from None
    if not isinstance(arguments, dict):
        raise ValueError(f"the arguments of {_shown(name)} are no JSON object")
    return Call(name, arguments)


def _calling(call: Call) -> Spoken:
    if call.name == "python" and list(call.arguments) == ["code"]:
        return (
            _spoken(encodable(str(call.arguments["code"])), "analysis")
            .with_recipient("python")
            .with_content_type("code")
        )
    text = encodable(json.dumps(call.arguments, ensure_ascii=False, separators=(",", ":")))
    return _spoken(text, "commentary").with_recipient(_recipient(call.name)).with_content_type(_JSON)


def _recipient(tool: str) -> str:
    return tool if tool.partition(".")[0] in BUILT_IN else f"{FUNCTIONS}.{tool}"


def _author(tool: str | None, asked: list[tuple[str, str]]) -> tuple[str, str]:
    """Return (author, channel) for a tool's result, and remove the matching call from `asked`.

    tool: name of the tool, or None. asked: (recipient, channel) of calls without a result yet. If there is neither a name nor a
    call (after a reply that cannot be parsed), the author is the namespace itself.
    """
    for place, (recipient, channel) in enumerate(asked):
        if tool in (None, _named(recipient)):
            del asked[place]
            return recipient, channel if channel in CHANNELS else "commentary"
    if tool is None:
        return FUNCTIONS, "commentary"
    recipient = _recipient(tool)
    return recipient, "commentary" if recipient.startswith(FUNCTIONS) else "analysis"


def _is_interpreter(function: Mapping[str, Any]) -> bool:
    """Return True if the model calls this tool by a message of plain code to `python`."""
    arguments = (function.get("parameters") or {}).get("properties") or {}
    return function["name"] == "python" and list(arguments) == ["code"]


def _declared(function: Mapping[str, Any]) -> ToolDescription:
    parameters = function.get("parameters") or {}
    known = json.loads(encodable(json.dumps(parameters, ensure_ascii=False))) if parameters.get("properties") else None
    return ToolDescription.new(function["name"], encodable(function.get("description") or ""), known)
