"""What the recording endpoint accepts and records, without an engine."""

from __future__ import annotations

import asyncio
import json
import threading

import numpy as np
import pytest

from megatron_rl.agents.recorder import BadRequest, Session, plain
from megatron_rl.data.trajectory import WeightSpan
from megatron_rl.dialects import Call, Qwen
from megatron_rl.servers.reply import Reply
from tools.make_tiny_model import text_tokenizer

FORM = Qwen(text_tokenizer(512))
USER = [{"role": "user", "content": "hi"}]
CALL = Call("f", {"a": "</tool_call> <tool_call> </think>"})


def sampled(text: str, *more: int) -> Reply:
    tokens = np.asarray([*FORM.tokenizer.encode(text, add_special_tokens=False), *more], np.int32)
    fields = {"loss_mask": np.ones(len(tokens), bool), "rollout_log_probs": np.zeros(len(tokens), np.float32)}
    return Reply(tokens, fields, "stop", [WeightSpan("0", 0, len(tokens))])


def session(reply: Reply, asked: list, stop_token_ids=()) -> Session:
    async def ask(talk, sampling):
        asked.append(sampling)
        return reply

    return Session(FORM, ask, 100, 1000, stop_token_ids=stop_token_ids)


def test_a_reply_that_comes_after_the_end_is_no_part_of_the_record():
    async def work():
        asked, arrived = asyncio.Event(), asyncio.Event()

        async def ask(talk, sampling):
            if talk.replies:
                asked.set()
                await arrived.wait()
            return sampled("hello")

        one = Session(FORM, ask, 100, 1000)
        first = (await one.complete({"messages": USER}))["choices"][0]["message"]
        more = [*USER, first, {"role": "user", "content": "and now?"}]
        late = asyncio.create_task(one.complete({"messages": more}))
        await asyncio.wait_for(asked.wait(), 60)
        one.close("time")
        recorded = list(one.branches[0].talk.tokens)
        arrived.set()
        with pytest.raises(BadRequest, match="this session has ended"):
            await late
        assert one.branches[0].talk.tokens == recorded == sampled("hello").tokens.tolist()
        assert len(one.branches) == 1 and len(one.branches[0].talk.replies) == 1

    asyncio.run(work())


@pytest.mark.parametrize(("given", "most"), [({}, 100), ({"max_tokens": -1}, 100), ({"max_tokens": 7.0}, 7)])
def test_a_number_of_tokens_that_is_none_is_not_heeded(given, most):
    asked = []
    asyncio.run(session(sampled("a"), asked).complete({"messages": USER, "n": None} | given))
    assert asked == [{"max_new_tokens": most}]


def test_requests_in_an_odd_form():
    one = session(sampled("a"), [])
    for odd in ({"max_tokens": "many"}, {"max_tokens": 1.5}, {"max_tokens": float("inf")}, {"stop": 5}, {"stop": [5]}):
        with pytest.raises(BadRequest, match=f"^{next(iter(odd))}"):
            asyncio.run(one.complete({"messages": USER} | odd))
    assert not one.branches, "what is refused begins no sequence"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": ""}}
    [checked] = plain([{"role": "assistant", "tool_calls": [call]}])
    assert checked["tool_calls"][0]["function"] == {"name": "f", "arguments": {}}
    for arguments, problem in (("{", "arguments that are JSON"), ("[1]", "arguments of f are no JSON object")):
        call["function"]["arguments"] = arguments
        with pytest.raises(BadRequest, match=problem):
            plain([{"role": "assistant", "tool_calls": [call]}])
    with pytest.raises(BadRequest, match="a function with a name"):
        plain([{"role": "assistant", "tool_calls": [{"id": "1"}]}])


@pytest.mark.parametrize("thought", ["", "<think>\nhm </tool_call>\n</think>\n\n"])
@pytest.mark.parametrize(
    ("before", "after", "content"),
    [("I look it up.", "", "I look it up."), ("", "", None), ("\n a", "b\n", "a\nb"), ("", " b", "b")],
)
def test_a_message_has_the_text_beside_its_calls_and_no_thoughts(thought, before, after, content):
    """And a conversation that goes on from it is one sequence, to the token."""

    async def work():
        one = session(sampled(f"{thought}{before}{FORM.call_text(CALL)}{after}"), [])
        one.max_new_tokens = one.context_length = 9000
        message = (await one.complete({"messages": USER}))["choices"][0]["message"]
        assert message["content"] == content and message["tool_calls"][0]["function"]["name"] == "f"
        result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "3"}
        for again in (message, message | {"content": [{"type": "text", "text": content}]} if content else message):
            await one.complete({"messages": [*USER, again, result]})
        tokens = sampled(f"{thought}{before}{FORM.call_text(CALL)}{after}").tokens.tolist()
        between = FORM.observation([result], after=tokens)
        assert one.branches[0].talk.tokens == [*tokens, *between, *tokens] and len(one.branches) == 2
        assert len(one.branches[1].talk.replies) == 1 and one.branches[1].talk.prompt[-len(between) :] == between

    asyncio.run(work())


def test_results_have_the_names_of_the_tools_that_gave_them():
    calls = [{"id": number, "function": {"name": name, "arguments": "{}"}} for number, name in ("1f", "2g", "3h")]
    asked = {"role": "assistant", "content": None, "tool_calls": calls}
    results = [{"role": "tool", "tool_call_id": number, "content": number} for number in "213"]
    assert [message["name"] for message in plain([asked, *results])[1:]] == ["g", "f", "h"]
    unnumbered = [{"role": "tool", "content": "7"}] * 3
    assert [message["name"] for message in plain([asked, *unnumbered])[1:]] == ["f", "g", "h"], "in order"
    lost = {"role": "tool", "tool_call_id": "9", "content": "7"}
    assert "name" not in plain([asked, lost])[1] and plain([lost | {"name": "k"}])[0]["name"] == "k"


def test_every_token_that_ends_a_reply_is_no_part_of_what_it_says():
    other = FORM.tokenizer.encode("<|im_start|>", add_special_tokens=False)
    assert len(other) == 1
    for ends, said in ((other, "871"), ((), "871<|im_start|>")):
        one = session(sampled("871", *other), [], stop_token_ids=ends)
        answer = asyncio.run(one.complete({"messages": USER}))["choices"][0]["message"]["content"]
        assert (answer, one.last.final) == (said, said)
        assert one.branches[0].talk.tokens == sampled("871", *other).tokens.tolist(), "but it is sampled, and trains"


def test_what_a_client_gets_can_be_sent_back():
    text = '<tool_call>\n{"name": "f", "arguments": {"x": "\\ud83d"}}\n</tool_call>'
    answer = asyncio.run(session(sampled(text), []).complete({"messages": USER}))
    json.dumps(answer, ensure_ascii=False).encode()  # as httpx does; a lone surrogate would raise


@pytest.mark.parametrize("stop", [[""], ["", "lo"], "", None, "lo"])
def test_an_empty_stop_text_says_nothing(stop):
    one = session(sampled("hello"), [])
    answer = asyncio.run(one.complete({"messages": USER, "stop": stop}))["choices"][0]["message"]["content"]
    stopped = stop and "lo" in stop
    assert answer == ("hel" if stopped else "hello")
    assert one.branches[0].talk.tokens == sampled("hello").tokens.tolist()[: 5 if stopped else None]


def test_a_text_that_cannot_have_room_is_not_read():
    """The context has 1,000 tokens, of 64 characters at most on average."""

    class Form(Qwen):
        def prompt(self, messages, tools=()):
            assert sum(len(m["content"]) for m in messages) <= 64_000
            return super().prompt(messages, tools)

    async def ask(talk, sampling):
        return sampled("a")

    for content in ("x" * 64_001, "x " * 10_000_000):
        one = Session(Form(FORM.tokenizer), ask, 100, 1000)
        with pytest.raises(BadRequest, match="context_length_exceeded"):
            asyncio.run(one.complete({"messages": [{"role": "user", "content": content}]}))
        assert one.full and not one.branches


LONG_TEXT = [{"role": "user", "content": "long " * 20_000}]


def test_other_agents_go_on_while_a_text_becomes_tokens():
    """The other one is answered first: if the long text held the loop, it would wait for ever."""
    passed, tokenizers = threading.Event(), []

    class Form(Qwen):
        def prompt(self, messages, tools=()):
            tokenizers.append(self.tokenizer)
            if messages[0]["content"] == LONG_TEXT[0]["content"]:
                assert passed.wait(60)
            return super().prompt(messages, tools)

    async def ask(talk, sampling):
        return sampled("a")

    async def work():
        form = Form(FORM.tokenizer)
        one, two = (Session(form, ask, 200_000, 200_000) for _ in range(2))
        long = asyncio.create_task(one.complete({"messages": LONG_TEXT}))
        await asyncio.sleep(0)
        await two.complete({"messages": USER})
        passed.set()
        await long
        assert list(one.branches[0].talk.prompt) == FORM.prompt(LONG_TEXT)

    asyncio.run(work())
    assert len({id(one) for one in tokenizers}) == 2, "a tokenizer is for one thread at a time"


def test_a_session_that_ends_while_a_text_becomes_tokens_records_nothing():
    async def work():
        one = session(sampled("a"), [])
        one.context_length = 200_000
        late = asyncio.create_task(one.complete({"messages": LONG_TEXT}))
        await asyncio.sleep(0)
        one.close("time")
        with pytest.raises(BadRequest, match="this session has ended"):
            await late
        assert not one.branches

    asyncio.run(work())


def test_what_a_template_does_not_take_is_the_clients_mistake():
    class Form(Qwen):
        def prompt(self, messages, tools=()):
            raise ZeroDivisionError("of the template\nin two lines")

    one = session(sampled("a"), [])
    one.form = Form(FORM.tokenizer)
    with pytest.raises(BadRequest, match=r"chat template.*\(ZeroDivisionError: of the template in two lines\)"):
        asyncio.run(one.complete({"messages": USER}))
    assert not one.branches
