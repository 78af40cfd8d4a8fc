"""The dialect of gpt-oss against openai-harmony's own renderer, with the released tokenizer's ids."""

from __future__ import annotations

import asyncio
import copy
import datetime
import importlib.util
import json
import os
import random
from functools import cache
from itertools import pairwise
from types import SimpleNamespace

import numpy as np
import pytest
from openai_harmony import (
    Author,
    Conversation,
    DeveloperContent,
    Message,
    ReasoningEffort,
    RenderConversationConfig,
    Role,
    SystemContent,
    ToolDescription,
    ToolNamespaceConfig,
)

from megatron_rl.agents.agent import Agents, demonstration
from megatron_rl.agents.recorder import Session
from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.config import Config
from megatron_rl.config.load import build_config
from megatron_rl.data.trajectory import WeightSpan
from megatron_rl.dialects import Call, dialect
from megatron_rl.dialects.harmony_ids import MARKS, HarmonyIds, _load_from
from megatron_rl.errors import UserError
from megatron_rl.rollout.program import SingleTurn
from megatron_rl.servers.reply import Reply
from megatron_rl.tasks import Prompt, build_task
from megatron_rl.tasks.openai_messages import parse_messages
from megatron_rl.tools.calculator import Calculator
from megatron_rl.tools.interpreter import PythonTool
from megatron_rl.tools.toolbox import Environment
from tests.tasks.scripted import ONE_PROCESS
from tools.make_tiny_model import harmony_calls_tokenizer, harmony_tokenizer, text_tokenizer

KEEP = RenderConversationConfig(auto_drop_analysis=False)
RETURN, CALL, END = 200002, 200012, 200007
PIECES = [
    *(
        "the",
        " sum ",
        "7",
        "\n\n",
        "it's",
        "Ünï",
        "日本語",
        "💖👋🏾",
        "\u200d",
        "\ufffd",
        "  ",
        '{"a": 1}',
        "to=python",
    ),
    *MARKS,
    *("<|endoftext|>", "assistant", "analysis", "<|reserved_200017|>"),
]


@cache
def gpt_oss_tokenizer():
    return harmony_tokenizer(201088)


ids_of = cache(HarmonyIds)
"""Made once for a tokenizer: to look at all of gpt-oss's tokens takes a second."""


@pytest.fixture(autouse=True)
def _ids_once(monkeypatch):
    monkeypatch.setattr("megatron_rl.dialects.harmony.HarmonyIds", ids_of)


@cache
def harmony():
    return dialect("harmony", gpt_oss_tokenizer())


def special(text: str) -> list[int]:
    return harmony()._encoding.encode(text, allowed_special="all")


def words(rng: random.Random, most: int = 8) -> str:
    return "".join(rng.choices(PIECES, k=rng.randint(0, most)))


def of_role(role: Role, content) -> Message:
    return Message.from_role_and_content(role, content)


# -- conversations from the library's renderer ---------------------------------------------------------------------------


class Talk:
    """A random conversation: in the library's messages, and what the dialect is given of it."""

    def __init__(self, rng: random.Random, effort: str | None = None, date: str | None = None) -> None:
        self.rng = rng
        self.asked, self.tools = [], []
        system = SystemContent(
            reasoning_effort=ReasoningEffort(effort.title()) if effort else None, conversation_start_date=date
        )
        developer = DeveloperContent()
        if rng.random() < 0.5:
            self.asked.append({"role": "system", "content": "x" + words(rng)})
            developer = developer.with_instructions(self.asked[0]["content"])
        self.names = rng.sample(["f", "get_weather", "calculator"], k=rng.randint(0, 3))
        if self.names:
            schema = {"type": "object", "properties": {"x": {"type": "integer", "description": words(rng)}}}
            self.tools = [
                {"type": "function", "function": {"name": n, "description": words(rng), "parameters": schema}}
                for n in self.names
            ]
            told = [
                ToolDescription.new(t["function"]["name"], t["function"]["description"], schema) for t in self.tools
            ]
            developer = developer.with_function_tools(told)
        if rng.random() < 0.3:
            tool = PythonTool()
            self.tools.insert(rng.randint(0, len(self.tools)), tool.schema)
            system = system.with_tools(ToolNamespaceConfig(name="python", description=tool.description, tools=[]))
        self.messages = [of_role(Role.SYSTEM, system)]
        if developer.instructions or developer.tools:
            self.messages.append(of_role(Role.DEVELOPER, developer))
        self.user()

    def user(self) -> dict:
        text = words(self.rng)
        self.messages.append(of_role(Role.USER, text))
        self.asked.append({"role": "user", "content": text})
        return self.asked[-1]

    def reply(self) -> tuple[list[Message], list[Call], str | None]:
        """Messages of a reply, and what it says."""
        rng, said, calls, final = self.rng, [], [], None
        for _ in range(rng.randint(0, 2)):
            channel = rng.choice(["analysis", "commentary"])
            said.append(of_role(Role.ASSISTANT, words(rng)).with_channel(channel))
        if rng.random() < 0.4:
            final = words(rng)
            said.append(of_role(Role.ASSISTANT, final).with_channel("final"))
            if rng.random() < 0.2:
                said[-1].content_type = "<|constrain|>json"
            return said, calls, final
        for _ in range(rng.randint(1, 2)):
            recipient = rng.choice(
                [*(f"functions.{name}" for name in [*self.names, "no-such"]), "python", "browser.search"]
            )
            if recipient == "python":
                text = words(rng)
                calls.append(Call("python", {"code": text}))
                made = of_role(Role.ASSISTANT, text).with_channel(rng.choice(["analysis", "commentary"]))
                made.content_type = rng.choice([None, "code"])
            else:
                calls.append(Call(recipient.removeprefix("functions."), {words(rng): words(rng), "n": rng.random()}))
                text = json.dumps(calls[-1].arguments, ensure_ascii=rng.random() < 0.5, indent=rng.choice([None, 1]))
                made = of_role(Role.ASSISTANT, text).with_channel("commentary")
                made.content_type = rng.choice([None, "json", "<|constrain|>json"])
            said.append(made.with_recipient(recipient))
        return said, calls, final

    def results(self, said: list[Message]) -> tuple[list[str], list[Message]]:
        """What the tools return: texts for the dialect, and the library's messages."""
        texts, told = [], []
        for call in said:
            if call.recipient:
                texts.append(words(self.rng))
                author = Author.new(Role.TOOL, call.recipient)
                told.append(
                    Message.from_author_and_content(author, texts[-1])
                    .with_channel(call.channel)
                    .with_recipient("assistant")
                )
        return texts, told


def rendered(messages: list[Message], *, reply: bool = True) -> list[int]:
    conversation = Conversation(messages=messages)
    if reply:
        return harmony()._encoding.render_conversation_for_completion(conversation, Role.ASSISTANT, KEEP)
    return harmony()._encoding.render_conversation(conversation, KEEP)


def written(said: list[Message], rng: random.Random) -> list[int]:
    """A reply's tokens after <|start|>assistant: a call before the last message ends in <|end|>, the last one in any way."""
    ids = []
    for message in said:
        one = harmony()._encoding.render(message)
        ids += [*one[:-1], END]
    return [*ids[len(rendered([])) : -1], rng.choice([RETURN, CALL, END])]


def alike(ids: list[int]) -> list[int]:
    """With one token for all that end a message."""
    return [END if token in (RETURN, CALL) else token for token in ids]


def test_conversations_of_the_librarys_renderer():
    """Parsed and rendered again the tokens are the same; prompt, replies and observations are the whole."""
    rng = random.Random()
    effort, date = rng.choice(["low", "high", None]), f"2026-11-{rng.randint(10, 30)}"
    dated = dialect("harmony", gpt_oss_tokenizer(), reasoning_effort=effort, conversation_start_date=date)
    for number in range(80):
        form = (dated, harmony())[number % 2]
        talk = Talk(rng, "medium") if form is harmony() else Talk(rng, effort, date)
        record = form.prompt(talk.asked, talk.tools)
        assert record == rendered(talk.messages)
        whole = list(talk.messages)
        for _ in range(rng.randint(1, 3)):
            said, calls, final = talk.reply()
            reply = written(said, rng)
            parsed = form.parse(reply)
            assert (parsed.calls, parsed.final, parsed.malformed) == (calls, final, None), form.text(reply)
            again = form.messages(reply)
            assert again == said
            assert alike(rendered(again, reply=False))[len(rendered([])) :] == alike(reply)
            assert form.parse(reply[:-1]).calls == calls and form.parse(reply[:-1]).final == final
            texts, told = talk.results(said) if calls else ([talk.user()], talk.messages[-1:])
            between = form.observation(texts, after=reply)
            cut = form.observation(texts, after=reply[:-1])
            assert cut == [CALL if calls else END, *between], "what was cut off gets its end"
            record += reply + between
            whole += [*said, *told]
            assert alike(record) == alike(rendered(whole))


# -- the library's own tests (tests/test_harmony.py and test-data/ of github.com/openai/harmony, Apache License 2.0) ----------

IDENTITY = (
    "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n"
)
CHANNELS = "# Valid channels: analysis, commentary, final. Channel must be included for every message."
TO_FUNCTIONS = "\nCalls to these tools must go to the commentary channel: 'functions'."
ROBOT = "Answer the user's questions like a robot."
CAPITAL = "What is the capital of the largest country in the world?"
UNITS = {"type": "string", "enum": ["celsius", "fahrenheit"], "default": "celsius"}
PLACE = {"type": "string", "description": "The city and state, e.g. San Francisco, CA"}
PLACES = {
    "type": "array",
    "items": {"type": "string"},
    "description": 'List of city and state, e.g. ["San Francisco, CA", "New York, NY"]',
}
SINK = {
    "description": "params object",
    "type": "object",
    "properties": {
        "string": {"type": "string", "title": "STRING", "description": "A string", "examples": ["hello", "world"]},
        "string_nullable": {
            "type": "string",
            "nullable": True,
            "description": "A nullable string",
            "default": "the default",
        },
        "string_enum": {"type": "string", "enum": ["a", "b", "c"]},
        "oneof_string_or_number": {
            "oneOf": [
                {"type": "string", "default": "default_string_in_oneof"},
                {"type": "number", "description": "numbers can happen too"},
            ],
            "description": "a oneof",
            "default": 20,
        },
    },
}
FUNCTIONS = {
    "get_location": ("Gets the location of the user.", None),
    "get_current_weather": (
        "Gets the current weather in the provided location.",
        {"type": "object", "properties": {"location": PLACE, "format": UNITS}, "required": ["location"]},
    ),
    "get_multiple_weathers": (
        "Gets the current weather in the provided list of locations.",
        {"type": "object", "properties": {"locations": PLACES, "format": UNITS}, "required": ["locations"]},
    ),
    "kitchensink": ("A function with various complex schemas.", SINK),
}
RIDDLES = """<|start|>developer<|message|># Instructions

Always respond in riddles

# Tools

## functions

namespace functions {

// Gets the location of the user.
type get_location = () => any;

// Gets the current weather in the provided location.
type get_current_weather = (_: {
// The city and state, e.g. San Francisco, CA
location: string,
format?: "celsius" | "fahrenheit", // default: celsius
}) => any;

// Gets the current weather in the provided list of locations.
type get_multiple_weathers = (_: {
// List of city and state, e.g. ["San Francisco, CA", "New York, NY"]
locations: string[],
format?: "celsius" | "fahrenheit", // default: celsius
}) => any;

// A function with various complex schemas.
type kitchensink = (_: // params object
{
// STRING
//
// A string
// Examples:
// - "hello"
// - "world"
string?: string,
// A nullable string
string_nullable?: string | null, // default: "the default"
string_enum?: "a" | "b" | "c",
// a oneof
// default: 20
oneof_string_or_number?:
 | string // default: "default_string_in_oneof"
 | number // numbers can happen too
,
}) => any;

} // namespace functions<|end|>"""


@pytest.mark.parametrize("effort", ["low", "medium", "high"])
@pytest.mark.parametrize("instruction", [True, False])
def test_the_librarys_prompts(effort, instruction):
    form = dialect("harmony", gpt_oss_tokenizer(), reasoning_effort=effort)
    asked = [{"role": "system", "content": ROBOT}] * instruction + [{"role": "user", "content": CAPITAL}]
    developer = f"<|start|>developer<|message|># Instructions\n\n{ROBOT}<|end|>" * instruction
    expected = f"{IDENTITY}\nReasoning: {effort}\n\n{CHANNELS}<|end|>{developer}"
    expected += f"<|start|>user<|message|>{CAPITAL}<|end|><|start|>assistant"
    assert form.prompt(asked, []) == special(expected)


@pytest.mark.parametrize("nothing", [{}, {"parameters": None}, {"parameters": {"type": "object", "properties": {}}}])
def test_the_librarys_prompt_of_functions_with_parameters(nothing):
    """Also where a function without parameters says so in another way."""
    form = dialect("harmony", gpt_oss_tokenizer(), reasoning_effort="high", conversation_start_date="2025-06-28")
    tools = [
        {"type": "function", "function": {"name": name, "description": told} | ({"parameters": p} if p else nothing)}
        for name, (told, p) in FUNCTIONS.items()
    ]
    question = "What is the weather like in SF?"
    asked = [{"role": "system", "content": "Always respond in riddles"}, {"role": "user", "content": question}]
    expected = f"{IDENTITY}Current date: 2025-06-28\n\nReasoning: high\n\n{CHANNELS}{TO_FUNCTIONS}<|end|>{RIDDLES}"
    expected += f"<|start|>user<|message|>{question}<|end|><|start|>assistant"
    assert gpt_oss_tokenizer().decode(form.prompt(asked, tools)) == expected


TOKYO, PARIS = '{"location": "Tokyo"}', '{"latitude":48.8566,"longitude":2.3522}'
ANSWERED = "<|start|>assistant<|channel|>analysis<|message|>We must refuse<|end|>"
ANSWERED += "<|start|>assistant<|channel|>final<|message|>I'm sorry, but I can't help with that.<|return|>"
# fmt: off
SUM = [
    200005, 35644, 200008, 1844, 31064, 25, 392, 4827, 382, 220, 17, 659, 220, 17, 16842, 12295, 81645, 13, 51441, 6052, 13,
    200002, 200006, 173781, 200005, 17196, 200008, 17, 659, 220, 17, 314, 220, 19, 13,
]
LOOKUP = [
    200005, 35644, 200008, 1844, 31064, 25, 392, 4827, 382, 290, 11122, 306, 40510, 16842, 1416, 1309, 316, 1199, 37342, 170154,
    4584, 13, 200002, 200006, 173781, 316, 28, 29712, 170154, 200005, 35644, 3490, 200008, 10848, 7693, 1243, 392, 173844,
    18583,
]
# fmt: on
NO_HEADER = "unexpected tokens remaining in message header"


@pytest.mark.parametrize(
    ("reply", "found"),
    [
        (SUM, "2 + 2 = 4."),
        (f" to=functions.get_weather<|channel|>commentary <|constrain|>json<|message|>{TOKYO}<|call|>", TOKYO),
        (f" to=functions.get_weather<|channel|>commentary<|constrain|>json<|message|>{TOKYO}<|call|>", TOKYO),
        (f"<|channel|>commentary to=functions.get_weather<|constrain|>json<|message|>{PARIS}<|call|>", PARIS),
    ],
)
def test_the_librarys_replies(reply, found):
    parsed = harmony().parse(special(reply) if isinstance(reply, str) else reply)
    assert parsed.malformed is None
    if parsed.final is not None:
        assert (parsed.calls, parsed.final) == ([], found)
    else:
        assert parsed.calls == [Call("get_weather", json.loads(found))]


@pytest.mark.parametrize(
    ("reply", "problem"),
    [
        (f"I must refuse<|end|>{ANSWERED}", NO_HEADER),
        (f"<|channel|>analysis I must refuse<|end|>{ANSWERED}", NO_HEADER),
        (
            f"... Let's see.<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{TOKYO}<|call|>",
            NO_HEADER,
        ),
        (LOOKUP, "functions.NAME"),
    ],
    ids=range(4),
)
def test_the_librarys_replies_that_are_malformed(reply, problem):
    """Its strict parser refuses them; to a name that is none of a namespace's there is no call."""
    parsed = harmony().parse(special(reply) if isinstance(reply, str) else reply)
    assert problem in parsed.malformed and not parsed.calls and parsed.final is None


def test_the_librarys_result_of_a_tool():
    call = special(' to=browser.search<|channel|>commentary code<|message|>{"query": "openai"}<|call|>')
    expected = (
        '<|start|>browser.search to=assistant<|channel|>commentary<|message|>{"result": "https://openai.com/"}<|end|>'
    )
    between = harmony().observation(['{"result": "https://openai.com/"}'], after=call)
    assert between == special(f"{expected}<|start|>assistant")


def test_a_stream_of_whatever_tokens_is_never_an_error():
    """Random ids, valid replies that are cut, and such with tokens changed, added and left out."""
    rng, tool = random.Random(), [Calculator().schema]
    marks = list(harmony()._ids.marks.values())
    parts = [
        special(text)
        for text in ("assistant", "analysis", "commentary", "final", " to=functions.f", "{}", "user", "💖")
    ]
    seen = {"calls": 0, "final": 0, "malformed": 0}
    for number in range(900):
        if number % 3 == 0:
            ids = [rng.choice([rng.choice(marks), rng.randrange(201088)]) for _ in range(rng.randint(0, 30))]
            ids = [token for token in ids for token in rng.choice([[token], [token], rng.choice(parts)])]
            if rng.random() < 0.1:
                ids.insert(rng.randint(0, len(ids)), rng.choice([-1, 201088, 99999999, 2**32 - 1, 2**32, 2**70]))
        else:
            said, calls, final = Talk(rng).reply()
            ids = written(said, rng)
            if number % 3 == 1:
                ids = ids[: rng.randint(0, len(ids))]
                parsed = harmony().parse(ids)
                if parsed.calls and parsed.open:
                    assert (
                        calls[len(parsed.calls) - 1]
                        .arguments["code"]
                        .encode()
                        .startswith(parsed.calls[-1].arguments["code"].encode())
                    )
                else:
                    assert parsed.calls == calls[: len(parsed.calls)], "a part of a call is none"
                assert parsed.final is None or final.startswith(parsed.final)
            for _ in range(rng.randint(0, 3)):
                place = rng.randint(0, len(ids))
                ids[place : place + rng.randint(0, 1)] = rng.choice(
                    [[], [rng.choice(marks)], rng.choice(parts), [9552]]
                )
        parsed = harmony().parse(ids)
        kinds = {
            "calls": bool(parsed.calls),
            "final": parsed.final is not None,
            "malformed": parsed.malformed is not None,
        }
        assert sum(kinds.values()) == 1
        if parsed.malformed is not None:
            assert len(parsed.malformed.splitlines()) == 1 and 10 < len(parsed.malformed) < 300
        for kind, found in kinds.items():
            seen[kind] += found
        between = harmony().observation(["x"], after=ids)
        assert between[-len(rendered([])) :] == rendered([])
        assert not ids or (ids[-1] in (END, CALL, RETURN)) == (between[0] == marks[0])
    assert min(seen.values()) > 30, seen
    assert harmony().prompt([{"role": "user", "content": "a"}], tool)


MALFORMED = {
    '<|channel|>commentary to=functions.add<|channel|>json<|message|>{"a": 1}<|call|>': "an unknown recipient 'functions.add<|",
    # of the library's own tests
    "I must refuse<|end|><|start|>assistant<|channel|>final<|message|>I'm sorry<|return|>": "the form",
    "<|channel|>analysis I must refuse<|end|><|start|>assistant<|channel|>final<|message|>No<|return|>": "the form",
    "... Let's call.<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>{}<|call|>": "the form",
    "<|channel|>commentary Hello<|end|>": "the form",
    # headers
    "": "the form",
    "7": "the form",
    "<|channel|>final": "the form",
    "<|channel|><|message|>7": "the form",
    "<|message|>7": "without a channel",
    "<|channel|>finale<|message|>7": "unknown channel 'finale'",
    "<|channel|>Final<|message|>7": "unknown channel 'Final'",
    "<|start|>assistant<|channel|>final<|message|>7": "special token <|start|> in the header",
    "<|channel|>commentary to=functions.<|start|>f<|message|>{}": "special token <|start|> in the header",
    "<|channel|>final<|message|>7<|end|><|message|>8": "special token <|message|> after a message",
    "<|channel|>final<|message|>7<|end|>8": "the form",
    "<|channel|>final<|message|>7<|end|><|end|>": "special token <|end|> after a message",
    "<|channel|>final<|message|>7<|end|><|start|>": "the form",
    "<|channel|>analysis<|message|>hm<|end|><|start|>user<|channel|>final<|message|>7": "a message of 'user'",
    "<|channel|>analysis<|message|>hm<|end|><|start|>functions.f to=assistant<|channel|>commentary<|message|>7": "of 'fun",
    "<|channel|>analysis<|message|>hm<|end|><|start|>narrator<|channel|>final<|message|>7": "the form",
    # recipients
    "<|channel|>commentary to=f<|message|>{}": "unknown recipient 'f'",
    "<|channel|>commentary to=functions.<|message|>{}": "unknown recipient 'functions.'",
    "<|channel|>commentary to=functions<|message|>{}": "unknown recipient 'functions'",
    "<|channel|>commentary to=browser.<|message|>{}": "unknown recipient 'browser.'",
    "<|channel|>commentary to=assistant<|message|>{}": "unknown recipient 'assistant'",
    "<|channel|>commentary f<|message|>{}": "unknown recipient 'f'",
    "<|channel|>final to=functions.f<|message|>{}": "a call on the final channel",
    " to=functions.f<|message|>{}": "without a channel",
    # arguments
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>": "arguments of 'f' are not JSON",
    '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1': "arguments of 'f' are not JSON",
    "<|channel|>commentary to=functions.f code<|message|>f(1)": "arguments of 'f' are not JSON",
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>[1]": "arguments of 'f' are no JSON object",
    "<|channel|>commentary to=functions.f <|constrain|>json<|message|>" + "[" * 9999: "arguments of 'f' are not JSON",
    "<|channel|>commentary to=python <|constrain|>json<|message|>print(1)": "arguments of 'python' are not JSON",
    # special tokens
    "<|channel|>final<|message|>7<|message|>8": "special token <|message|> in the content",
    "<|channel|>final<|message|>7<|start|>assistant": "special token <|start|> in the content",
    "<|channel|>final<|message|><|constrain|>7": "special token <|constrain|> in the content",
    "<|channel|>final<|message|>7<|endoftext|>": "special token <|endoftext|> in the content",
    "<|channel|>final<|reserved_200017|><|message|>7": "special token <|reserved_200017|> in the header",
    "<|channel|>analysis<|channel|>final<|message|>7": "unknown recipient",
    # what it says
    "<|channel|>analysis<|message|>hm": "neither a call nor a message on the final channel",
    "<|channel|>analysis<|message|>hm<|end|>": "neither a call nor a message on the final channel",
    "<|channel|>commentary<|message|>I shall call f": "neither a call nor a message on the final channel",
    "<|channel|>final<|message|>7<|end|><|start|>assistant<|channel|>final<|message|>8": "more than one message on the final",
    "<|channel|>commentary to=functions.f<|message|>{}<|end|><|start|>assistant<|channel|>final<|message|>8": "a call and an",
}


@pytest.mark.parametrize("text", MALFORMED)
def test_a_malformed_reply_is_told_what_is_wrong(text):
    for end in ([], [CALL], [RETURN]):
        ids = special(text) + end
        parsed = harmony().parse(ids)
        assert not parsed.calls and parsed.final is None
        assert MALFORMED[text] in parsed.malformed
        told = asyncio.run(Environment(toolbox=None).respond(parsed))
        between = harmony().text(harmony().observation(told, after=ids))
        assert f"<|message|>Error: {parsed.malformed}<|end|><|start|>assistant" in between
    assert harmony().parse_text(text) == harmony().parse(special(text))


@pytest.mark.parametrize(
    ("ids", "problem"),
    [
        (["<|channel|>final", 9552, "<|message|>7"], "the form"),  # half of a character in a header
        (["<|channel|>final<|message|>", 9552, 9552, "7"], "UTF-8"),
        (["<|channel|>commentary to=functions.f<|message|>{", 9552, '"a":1}'], "JSON"),
        (['<|channel|>commentary to=functions.f<|message|>{"a":"', 9552, '"}'], "UTF-8"),
        (["<|channel|>final<|message|>7", 99999999], "99999999, which is no token"),
        (["<|channel|>final<|message|>7", 201087], "201087, which is no token"),
        ([2**32 - 1], "is no token"),
        ([-1], "is no token"),
    ],
)
def test_ids_that_are_no_text(ids, problem):
    tokens = [token for part in ids for token in (special(part) if isinstance(part, str) else [part])]
    assert problem in harmony().parse(tokens).malformed
    assert harmony().observation(["x"], after=tokens)


def test_a_malformed_call_is_answered_by_whom_it_called():
    text = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{<|call|>"
    between = harmony().text(harmony().observation(["Error"], after=special(text)))
    assert between == "<|start|>functions.f to=assistant<|channel|>commentary<|message|>Error<|end|><|start|>assistant"
    between = harmony().text(harmony().observation(["Error"], after=special("hm<|return|>")))
    assert between == "<|start|>functions to=assistant<|channel|>commentary<|message|>Error<|end|><|start|>assistant"


def test_a_result_with_a_name_goes_to_the_call_of_that_tool():
    one = "<|channel|>commentary to=functions.{}<|message|>{{}}"
    ids = special(f"{one.format('f')}<|end|><|start|>assistant{one.format('g')}")
    results = [{"role": "tool", "name": name, "content": name} for name in "gf"]
    between = harmony().text(harmony().observation(results, after=[*ids, CALL]))
    assert between.index("functions.g to=assistant<|channel|>commentary<|message|>g") < between.index("functions.f to=")
    assert harmony().text(harmony().observation(results)) == between, "names are enough"


# -- what is told, and what it says --------------------------------------------------------------------------------------


def test_the_answer_is_what_the_final_channel_says():
    text = "<|channel|>analysis<|message|>\\boxed{1}<|end|><|start|>assistant<|channel|>commentary<|message|>2<|end|>"
    answer = harmony().parse(special(f"{text}<|start|>assistant<|channel|>final<|message|> 3 <|return|>"))
    assert (answer.final, answer.calls, answer.malformed) == (" 3 ", [], None)
    assert harmony().parse_text("<|channel|>final <|constrain|>json<|message|>{}").final == "{}"
    assert harmony().parse(special("<|channel|>final<|message|>\\boxed{1")).final == "\\boxed{1", (
        "as far as it was said"
    )


def test_tokens_that_end_a_reply():
    assert harmony().stop_token_ids == [RETURN, CALL] == sorted(harmony()._encoding.stop_tokens_for_assistant_actions())
    assert harmony().reply("7")[-1] == RETURN and harmony().reply("7").count(END) == 0
    assert harmony().text(harmony().reply("7 <|end|>")) == "<|channel|>final<|message|>7 <|end|><|return|>"
    assert END not in harmony().reply("7 <|end|>"), "as text"


def test_the_prompt_is_the_same_every_day_and_options_are_lines_of_it():
    asked = [{"role": "system", "content": "be short"}, {"role": "user", "content": "hi"}]
    assert harmony().text(harmony().prompt(asked)) == (
        "<|start|>system<|message|>You are ChatGPT, a large language model trained by OpenAI.\nKnowledge cutoff: 2024-06\n\n"
        "Reasoning: medium\n\n# Valid channels: analysis, commentary, final. Channel must be included for every message.<|end|>"
        "<|start|>developer<|message|># Instructions\n\nbe short<|end|><|start|>user<|message|>hi<|end|><|start|>assistant"
    )
    small = harmony_calls_tokenizer(64)
    for effort in ("low", "high", None):
        form = dialect("harmony", small, reasoning_effort=effort, model_identity=None, knowledge_cutoff=None)
        told = form._encoding.render_conversation(Conversation(messages=[of_role(Role.SYSTEM, form._system)]))
        text = form._encoding.decode(told)
        assert text.startswith(f"<|start|>system<|message|>{f'Reasoning: {effort}' if effort else '# Valid'}")
    with pytest.raises(UserError, match="agent.dialect_options.reasoning_effort: highest is none of low, medium, high"):
        dialect("harmony", small, reasoning_effort="highest")
    with pytest.raises(UserError, match="agent.dialect_options: .*'effort'"):
        dialect("harmony", small, effort="high")
    with pytest.raises(UserError, match="agent.dialect_options: .*'reasoning_effort'"):
        dialect("qwen", small, reasoning_effort="high")
    dated = dialect("harmony", small, conversation_start_date=datetime.date(2026, 11, 25))  # as YAML reads it
    assert dated._system.conversation_start_date == "2026-11-25"
    with pytest.raises(UserError, match="needs a name for every function"):
        harmony().prompt(asked, [{"type": "custom", "custom": {"name": "f"}}])
    with pytest.raises(UserError, match="harmony has no role 'narrator'"):
        harmony().prompt([{"role": "narrator", "content": "hi"}])


def test_the_interpreter_is_told_of_and_called_as_the_models_know_it():
    tool = PythonTool()
    asked = [{"role": "user", "content": "hi"}]
    told = harmony().text(harmony().prompt(asked, [tool.schema]))
    assert f"# Tools\n\n## python\n\n{tool.description}\n\n# Valid channels" in told and "functions" not in told
    ids = special(
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>analysis to=python code<|message|>print(1)"
    )
    parsed = harmony().parse([*ids, CALL])
    assert parsed.calls == [Call("python", {"code": "print(1)"})]
    assert harmony().parse(ids).open and harmony().parse([*ids, END]).open is False, "a part of a program is none"
    between = harmony().text(harmony().observation(["1"], after=[*ids, CALL]))
    assert between == "<|start|>python to=assistant<|channel|>analysis<|message|>1<|end|><|start|>assistant"
    call = {"function": {"name": "python", "arguments": {"code": "<|end|>"}}}
    reply = harmony().reply_of({"role": "assistant", "content": "", "tool_calls": [call]})
    assert harmony().text(reply) == " to=python<|channel|>analysis code<|message|><|end|><|call|>" and END not in reply
    assert harmony().parse(reply).calls == [Call("python", {"code": "<|end|>"})]
    as_json = special('<|channel|>commentary to=python <|constrain|>json<|message|>{"code": "1"}')
    assert harmony().parse(as_json).calls == [Call("python", {"code": "1"})]
    other = {
        "name": "python",
        "description": "",
        "parameters": {"type": "object", "properties": {"file": {"type": "string"}}},
    }
    assert "type python = (_: {" in harmony().text(harmony().prompt(asked, [{"type": "function", "function": other}]))


def test_a_history_of_calls_is_rendered_as_the_library_does():
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": "ü"}}}
    history = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "I shall call f", "tool_calls": [call]},
        {"role": "tool", "name": "f", "content": "7"},
        {"role": "assistant", "content": "7"},
        {"role": "system", "content": "in words"},
        {"role": "user", "content": "again"},
    ]
    assert harmony().text(harmony().prompt(history)).partition("for every message.<|end|>")[2] == (
        "<|start|>user<|message|>hi<|end|><|start|>assistant<|channel|>commentary<|message|>I shall call f<|end|>"
        '<|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>{"a":"ü"}<|call|>'
        "<|start|>functions.f to=assistant<|channel|>commentary<|message|>7<|end|>"
        "<|start|>assistant<|channel|>final<|message|>7<|end|><|start|>developer<|message|># Instructions\n\nin words<|end|>"
        "<|start|>user<|message|>again<|end|><|start|>assistant"
    )
    shown = demonstration(harmony(), Prompt("a", "a", tokens=[1]), history[1:4])
    assert harmony().text(shown.tokens[1:]) == (
        "<|channel|>commentary<|message|>I shall call f<|end|><|start|>assistant to=functions.f<|channel|>commentary "
        '<|constrain|>json<|message|>{"a":"ü"}<|call|><|start|>functions.f to=assistant<|channel|>commentary<|message|>7<|end|>'
        "<|start|>assistant<|channel|>final<|message|>7<|return|>"
    )
    two = {"role": "assistant", "content": "", "tool_calls": [call, call]}
    assert harmony().parse(harmony().reply_of(two)).calls == [Call("f", {"a": "ü"})] * 2


def test_thinking_is_learned_on_the_analysis_channel():
    """And is a part of the history up to an answer, behind which the library drops it too."""
    rng = random.Random()
    thought, later, answer = (words(rng).replace("<|", "") or "so" for _ in range(3))
    call = {"function": {"name": "f", "arguments": {"x": 1}}}
    turns = [
        {"role": "assistant", "content": None, "thinking": thought, "tool_calls": [call]},
        {"role": "tool", "content": "3"},
        {"role": "assistant", "content": answer, "reasoning_content": later},
    ]
    asked = [{"role": "user", "content": "hi"}]
    found = demonstration(harmony(), Prompt("p", "hi", tokens=harmony().prompt(asked)), turns)
    said = found.tokens[found.prompt_length :][found["loss_mask"]].tolist()
    head = "<|channel|>analysis<|message|>"
    assert harmony().text(said) == (
        f"{head}{thought}<|end|><|start|>assistant to=functions.f<|channel|>commentary <|constrain|>json<|message|>"
        f'{{"x":1}}<|call|>{head}{later}<|end|><|start|>assistant<|channel|>final<|message|>{answer}<|return|>'
    )
    history, form = parse_messages(turns), harmony()
    for messages in ([*asked, *history[:2]], [*asked, *history], [*asked, *history, *asked]):
        told = [of_role(Role.SYSTEM, form._system), *(one for m in messages for one in form._told(m))]
        dropped = form._encoding.render_conversation_for_completion(Conversation(messages=told), Role.ASSISTANT)
        assert form.prompt(messages) == dropped
    bare = [{key: value for key, value in m.items() if key != "reasoning_content"} for m in history]
    assert form.prompt([*history, *asked, *history[:2]]) == form.prompt([*bare, *asked, *history[:2]])
    assert form.prompt([*history, *asked, *history[:2]]) != form.prompt([*bare, *asked, *bare[:2]])


# -- vocabularies --------------------------------------------------------------------------------------------------------


def test_the_tokenizer_is_the_released_one():
    """Its ids are those of the library, whose vocabulary has the hash that the library knows."""
    assert harmony()._ids._same and len(gpt_oss_tokenizer()) == 200019
    rng = random.Random()
    for _ in range(300):
        text = words(rng, 30) + "".join(
            map(chr, rng.choices([*range(32, 1000), *range(0x4E00, 0x4F00)], k=rng.randint(0, 30)))
        )
        ours = gpt_oss_tokenizer().encode(text, add_special_tokens=False, split_special_tokens=True)
        assert ours == harmony()._encoding.encode(text, disallowed_special=())
        ours = gpt_oss_tokenizer().encode(text, add_special_tokens=False)
        assert ours == special(text) and gpt_oss_tokenizer().decode(ours) == text


def test_the_vocabulary_needs_no_network_and_no_package(monkeypatch):
    before = dict(os.environ)
    _load_from.cache_clear()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    for way in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.setenv(way, "http://127.0.0.1:1")
    assert HarmonyIds(gpt_oss_tokenizer())._same, "gpt-oss's tokenizer has it in it"
    with pytest.raises(UserError, match="needs the package bpe-openai"):
        HarmonyIds(harmony_calls_tokenizer(64))
    monkeypatch.undo()
    assert dict(os.environ) == before


def test_a_tokenizer_with_the_special_tokens_alone():
    """A tiny model's: short prompts, and the same messages in its own ids."""
    tokenizer = harmony_calls_tokenizer(64)
    form = dialect("harmony", tokenizer)
    asked, tools = [{"role": "user", "content": "12+34="}], [Calculator().schema]
    prompt = form.prompt(asked, tools)
    assert len(prompt) == 22 and form.text(prompt).endswith("<|start|>user<|message|>12+34=<|end|><|start|>assistant")
    call = {"function": {"name": "calculator", "arguments": {"expression": "12+34"}}}
    reply = form.reply_of({"role": "assistant", "content": "", "tool_calls": [call]})
    assert form.parse(reply).calls == [Call("calculator", {"expression": "12+34"})]
    assert form.text(reply) == harmony().text(
        harmony().reply_of({"role": "assistant", "content": "", "tool_calls": [call]})
    )
    assert form.text(form.observation(["46"], after=reply)) == harmony().text(
        harmony().observation(["46"], after=special(form.text(reply)))
    )
    assert (
        form.text(form.reply("46")) == harmony().text(harmony().reply("46"))
        and form.parse(form.reply("46")).final == "46"
    )
    assert tokenizer.convert_ids_to_tokens(form.stop_token_ids) == ["<|call|>", "<|return|>"]
    marks = [form.observation(["<|end|> 7 <|call|>"]).count(token) for token in tokenizer.added_tokens_decoder]
    assert marks == [form.observation(["7"]).count(token) for token in tokenizer.added_tokens_decoder]


# -- who uses it ---------------------------------------------------------------------------------------------------------


def test_a_model_with_channels_is_not_asked_without_them():
    program = SingleTurn(Config(), harmony_calls_tokenizer(64), SimpleNamespace(program=None), None)
    assert program.encode(Prompt("a", "1+1=")).tokens
    with pytest.raises(UserError, match=r"agent\.dialect: harmony and agent\.max_turns: 1"):
        program.encode(Prompt("a", "1+1=", messages=[{"role": "user", "content": "1+1="}]))


def test_the_endpoint_gives_the_final_channel_and_calls():
    said = [
        '<|channel|>analysis<|message|><|end|><|start|>assistant to=functions.f<|channel|>commentary<|message|>{"a":1}<|call|>',
        "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>7<|return|>",
    ]

    async def ask(talk, sampling):
        tokens = np.asarray(special(said[len(talk.replies)]), np.int32)
        fields = {"loss_mask": np.ones(len(tokens), bool), "rollout_log_probs": np.zeros(len(tokens), np.float32)}
        return Reply(tokens, fields, "stop", [WeightSpan("0", 0, len(tokens))])

    session = Session(harmony(), ask, 1000, 1000, stop_token_ids=[RETURN, 199999, CALL])
    asked, tools = [{"role": "user", "content": "hi"}], [{"type": "function", "function": {"name": "f"}}]

    async def work():
        choice = (await session.complete({"messages": asked, "tools": tools}))["choices"][0]
        call = choice["message"]["tool_calls"][0]
        assert choice["finish_reason"] == "tool_calls" and choice["message"]["content"] is None
        assert call["function"]["name"] == "f" and json.loads(call["function"]["arguments"]) == {"a": 1}
        more = [*asked, choice["message"], {"role": "tool", "tool_call_id": call["id"], "content": "7"}]
        choice = (await session.complete({"messages": more, "tools": tools}))["choices"][0]
        assert choice["message"]["content"] == "7" and choice["finish_reason"] == "stop" and session.last.final == "7"

    asyncio.run(work())
    [branch] = session.branches
    result = "<|start|>functions.f to=assistant<|channel|>commentary<|message|>7<|end|><|start|>assistant"
    assert harmony().text(branch.talk.tokens) == f"{said[0]}{result}{said[1]}"
    assert "type f = () => any;" in harmony().text(branch.talk.prompt)


# -- a user who goes on after an answer ----------------------------------------------------------------------------------


def further(talk: Talk, rng: random.Random) -> tuple[list[Message], tuple[list[int], list[dict]]]:
    """A reply and what it is answered, by tools or by a user: the library's messages, and what the dialect is given."""
    said, calls, _ = talk.reply()
    if calls:
        texts, told = talk.results(said)
        return [*said, *told], (written(said, rng), [{"role": "tool", "content": text} for text in texts])
    user = talk.user()
    return [*said, talk.messages[-1]], (written(said, rng), [user])


def test_a_history_is_what_the_library_renders():
    """Token for token: its own rendering up to the first answer; later without the thinking of all answers before.

    The library itself drops thinking before the first answer of a conversation alone, since who uses it has dropped the rest by
    then, and an API of messages never had it.
    """
    rng, answered = random.Random(), 0
    for _ in range(80):
        talk = Talk(rng, "medium")
        prompt, whole, turns, answers = list(talk.asked), list(talk.messages), [], 0
        for _ in range(rng.randint(1, 6)):
            more, turn = further(talk, rng)
            whole += more
            turns.append(turn)
            if turn[1][0]["role"] != "user":
                continue
            answers += 1
            found = harmony().history(prompt, talk.tools, turns)
            visible = [message for message in whole if message.channel != "analysis"]
            assert found == rendered(visible)
            if answers == 1:
                own = Conversation(messages=whole)
                assert found == harmony()._encoding.render_conversation_for_completion(own, Role.ASSISTANT)
            assert RETURN not in found and found[-len(rendered([])) :] == rendered([])
        answered += answers > 1
    assert answered > 20


def test_a_history_with_a_reply_that_nobody_can_read_stays():
    turns = [
        (
            special("I must refuse<|end|><|start|>assistant<|channel|>final<|message|>No<|return|>"),
            [{"role": "user", "content": "again"}],
        )
    ]
    assert harmony().history([{"role": "user", "content": "a"}], (), turns) is None


class Scripted:
    """In the place of the engine: what is asked is kept, and each conversation says its lines."""

    aborted = False

    def __init__(self, lines: list[str]) -> None:
        self.lines, self.asked, self.room, self.retried = lines, [], [], 0

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        pass

    def pushed(self):
        return None

    async def call(self, prompts, sampling, **_):
        self.asked.append(list(prompts[0]))
        self.room.append(sampling["max_new_tokens"])
        tokens = np.asarray(special(self.lines[len(self.asked) - 1]), np.int32)
        fields = {"loss_mask": np.ones(len(tokens), bool), "rollout_log_probs": np.full(len(tokens), -0.5, np.float32)}
        return [Reply(tokens, fields, "stop", [WeightSpan("0", 0, len(tokens))])]


class Going(Environment):
    """A user who asks three times, and a calculator's result between."""

    async def respond(self, turn):
        if turn.calls:
            return [{"role": "tool", "content": "4"}]
        self.answers = getattr(self, "answers", 0) + 1
        return [{"role": "user", "content": f"and {self.answers}?"}] if self.answers < 3 else None

    def reward_parts(self):
        return {"correct": 0.5}


MULTI_IF = {"task": "verify_if", "options": {"turns": 3, "size": 20}}
SAID = [
    "<|channel|>analysis<|message|><|end|><|start|>assistant to=functions.calculator<|channel|>commentary<|message|>{}<|call|>",
    "<|channel|>analysis<|message|>so<|end|><|start|>assistant<|channel|>final<|message|>four<|return|>",
    "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>five<|return|>",
    "<|channel|>final<|message|>six<|return|>",
]


@pytest.mark.parametrize(("history", "evaluates"), [("sampled", False), ("sampled", True), ("rendered", False)])
def test_a_conversation_with_several_questions(history, evaluates):
    """Sampled, it is one sequence, exact to the token; rendered, each question begins one behind the history as it is used."""
    settings = {"dialect": "harmony", "max_turns": 8, "history": history}
    tree = {"rollout": {"program": "agent", "max_new_tokens": 400, "context_length": 2000}, "agent": settings}
    task = SimpleNamespace(
        name="asking", program=None, parts=("correct",), tools=lambda: [Calculator()], environment=lambda p, t: Going(t)
    )
    agents = Agents(build_config(tree), gpt_oss_tokenizer(), task, ONE_PROCESS)
    try:
        own = copy.deepcopy(agents.schemas)
        own[0]["function"]["description"] = "The row's own words."
        prompt = agents.encode(Prompt("a", "2+2?", tools=own))
        asked = agents.collect(
            prompts=[prompt],
            support=SamplingSupport(),
            samples_per_prompt=1,
            max_new_tokens=400,
            stop_token_ids=[RETURN, CALL],
            evaluates=evaluates,
        )
        client = Scripted(SAID)
        asked.run(client)
        found = asked.trajectories()
    finally:
        agents.close()
    result = "<|start|>functions.calculator to=assistant<|channel|>commentary<|message|>4<|end|><|start|>assistant"
    users = [f"<|start|>user<|message|>and {n}?<|end|><|start|>assistant" for n in (1, 2)]
    whole = SAID[0] + result + SAID[1]
    text = harmony().text
    opening = text(prompt.tokens)
    assert "The row's own words." in opening
    if history == "sampled" and not evaluates:
        [t] = found
        assert t.tokens[: t.prompt_length].tolist() == prompt.tokens
        assert text(t.tokens[t.prompt_length :].tolist()) == whole + users[0] + SAID[2] + users[1] + SAID[3]
        assert text(np.asarray(t.tokens[t.prompt_length :])[t["loss_mask"]].tolist()) == "".join(SAID)
        return
    call = SAID[0].partition("<|end|>")[2]
    answers = [f"<|start|>assistant<|channel|>final<|message|>{answer}<|end|>" for answer in ("four", "five")]
    begin = "<|start|>assistant"
    first = opening + call.removeprefix(begin) + result.removesuffix(begin) + answers[0] + users[0]
    histories = [first, first.removesuffix(begin) + answers[1] + users[1]]
    assert [t.part for t in found] == [0, 1, 2] and {t.reward_parts["correct"] for t in found} == {0.5}
    assert [text(t.tokens[: t.prompt_length].tolist()) for t in found] == [opening, *histories]
    assert [text(t.tokens[t.prompt_length :].tolist()) for t in found] == [whole, SAID[2], SAID[3]]
    said = [text(t.tokens[t.prompt_length :][t["loss_mask"]].tolist()) for t in found]
    assert said == [SAID[0] + SAID[1], SAID[2], SAID[3]], "each token that was sampled trains once, as it was sampled"
    lengths = np.cumsum([0, *(t.response_length for t in found)]).tolist()
    assert client.room[-2:] == [400 - lengths[1], 400 - lengths[2]], "all sequences share the room of a conversation"
    assert asked._features_of(0) is None and {t.finish_reason for t in found} == {"stop"}


def test_instructions_that_add_up_are_evaluated_as_the_model_is_used():
    """Multi-IF's turns, as the recipes evaluate them: each question stands behind the library's history of those before."""
    tree = {"rollout": {"program": "agent", "max_new_tokens": 400, "context_length": 2000}}
    config = build_config(tree | {"agent": {"dialect": "harmony", "max_turns": 3}, "data": MULTI_IF})
    task = build_task(config.data, more_parts=Agents.parts)
    agents = Agents(config, gpt_oss_tokenizer(), task, ONE_PROCESS)
    try:
        prompt = agents.encode(random.choice(task.prompts("train")))
        settings = {"samples_per_prompt": 1, "max_new_tokens": 400, "stop_token_ids": [RETURN], "evaluates": True}
        asked = agents.collect(prompts=[prompt], support=SamplingSupport(), **settings)
        client = Scripted(SAID[1:])
        asked.run(client)
        found = asked.trajectories()
    finally:
        agents.close()
        task.close()
    questions = [prompt.text, *(text for text, _ in prompt.metadata["further_turns"])]
    system = of_role(Role.SYSTEM, SystemContent(reasoning_effort=ReasoningEffort.MEDIUM))
    talk, expected = [system], []
    for question, answer in zip(questions, ("four", "five", "six"), strict=True):
        talk.append(of_role(Role.USER, question))
        expected.append(rendered(talk))
        talk.append(of_role(Role.ASSISTANT, answer).with_channel("final"))
    assert client.asked == expected and [t.tokens[: t.prompt_length].tolist() for t in found] == expected
    assert {"correct", "followed", "content"} <= found[0].reward_parts.keys() and len(found) == 3


def test_what_has_no_history_of_its_own_is_told():
    tree = {"rollout": {"program": "agent"}, "agent": {"history": "rendered"}}
    task = SimpleNamespace(name="asking", program=None, parts=("correct",), tools=list)
    with pytest.raises(
        UserError, match=r"^config: agent\.history: rendered with agent\.dialect: qwen.*set history: sampled"
    ):
        Agents(build_config(tree), text_tokenizer(512), task, ONE_PROCESS)


@pytest.mark.parametrize("renders", [False, True])
def test_the_endpoint_begins_a_sequence_where_the_user_goes_on(renders):
    lines = [SAID[1], SAID[2], SAID[3]]
    asked: list[list[int]] = []

    async def ask(talk, sampling):
        asked.append(talk.context)
        tokens = np.asarray(special(lines[len(asked) - 1]), np.int32)
        fields = {"loss_mask": np.ones(len(tokens), bool), "rollout_log_probs": np.zeros(len(tokens), np.float32)}
        return Reply(tokens, fields, "stop", [WeightSpan("0", 0, len(tokens))])

    session = Session(harmony(), ask, 1000, 2000, stop_token_ids=[RETURN, CALL], renders=renders)

    async def work():
        messages = [{"role": "user", "content": "2+2?"}]
        for question in ("and 1?", "and 2?", ""):
            messages.append((await session.complete({"messages": messages}))["choices"][0]["message"])
            messages.append({"role": "user", "content": question})

    asyncio.run(work())
    assert len(session.branches) == (3 if renders else 1)
    opening = harmony().prompt([{"role": "user", "content": "2+2?"}])
    turns = [(special(line), [{"role": "user", "content": f"and {n}?"}]) for n, line in enumerate(lines[:2], 1)]
    if renders:
        history = [harmony().history([{"role": "user", "content": "2+2?"}], (), turns[:n]) for n in (1, 2)]
        assert asked == [opening, *history]
    else:
        assert all(a[: len(b)] == b for b, a in pairwise(asked)) and asked[2].count(RETURN) == 2
