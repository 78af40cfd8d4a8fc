"""Chat templates: what ends a turn is found, and what one raises, drops, changes or lacks is told in one line."""

from __future__ import annotations

import copy
import json
import random
import string
from types import SimpleNamespace

import pytest

from megatron_rl.agents.agent import Agents, demonstration
from megatron_rl.config import Config, DataConfig
from megatron_rl.config.load import build_config
from megatron_rl.dialects import DIALECTS, dialect
from megatron_rl.errors import UserError
from megatron_rl.rollout.program import SingleTurn
from megatron_rl.run.run import Run
from megatron_rl.tasks import Prompt, build_task, encode_text
from megatron_rl.tasks.chat import end_of_turn
from megatron_rl.tasks.stream import check_forms
from tests.tasks.scripted import ONE_PROCESS
from tools.make_tiny_model import text_tokenizer

BASE = text_tokenizer(300)
EOS, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
TURNS = "{% for m in messages %}" + START + "{{ m.role }}\n{{ m.content }}" + END + "\n{% endfor %}"
ASKS = "{% if add_generation_prompt %}" + START + "assistant\n{% endif %}"
MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]{% elif m.role == 'assistant' %}"
    "{% if loop.index0 % 2 == 0 %}{{ raise_exception('roles must alternate user/assistant') }}{% endif %}"
    " {{ m.content | trim }}" + EOS + "{% else %}{{ raise_exception('Only user and assistant roles are supported!') }}"
    "{% endif %}{% endfor %}"
)
"""Without a generation prompt, and without the need for one."""
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}" + TURNS + ASKS
)


def tokenizer(template=None, eos=EOS, *special):
    made = copy.deepcopy(BASE)
    if special:
        made.add_special_tokens({"additional_special_tokens": list(special)})
    made.eos_token = eos
    made.chat_template = template or TURNS + ASKS
    return made


def user(text):
    return {"role": "user", "content": text}


def system(text):
    return {"role": "system", "content": text}


def words():
    return " ".join("".join(random.choices(string.ascii_letters, k=5)) for _ in range(random.randint(1, 5)))


@pytest.mark.parametrize(
    ("behind", "wanted"),
    [
        ("{end}", "{end}"),
        ("{end}\n", "{end}"),
        (" {end}", "{end}"),
        ("\n\n{end}\n" + EOS, "{end}"),
        (EOS, EOS),
        ("", EOS),
        ("\n", EOS),
        ("\n### next{end}", EOS),
    ],
)
def test_the_end_of_a_turn_is_the_special_token_behind_it(behind, wanted):
    """Whatever its name. Text behind a turn is no end."""
    end = f"<{''.join(random.choices(string.ascii_lowercase, k=6))}>"
    form = tokenizer(
        "{% for m in messages %}" + START + "{{ m.role }}: {{ m.content }}" + behind.format(end=end) + "{% endfor %}",
        EOS,
        end,
    )
    assert [form.decode([t]) for t in end_of_turn(form)] == [wanted.format(end=end)]


def test_without_a_template_or_an_end_of_sequence_nothing_is_found():
    form = tokenizer()
    form.chat_template = None
    assert end_of_turn(form) == [form.eos_token_id]
    form.eos_token = None
    assert end_of_turn(form) == []
    broken = tokenizer("{% for m in messages %}{{ m.content }")
    assert end_of_turn(broken) == [broken.eos_token_id], "which is told where a prompt is rendered"


def single(path, form, **data):
    config = build_config({"data": {"path": str(path)} | data})
    return SingleTurn(config, form, build_task(config.data, demonstrations=True), ONE_PROCESS)


def test_sft_learns_the_end_of_a_turn_of_conversations_and_of_texts_the_end_of_sequence(tmp_path):
    """To the token what the template makes of the whole conversation."""
    rows = [{"prompt": f"{i} {words()}", "response": words()} for i in range(20)]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for chat in (True, False):
        form = tokenizer()
        program = single(path, form, chat=chat)
        for prompt in program.task.prompts("train"):
            tokens = program.demonstration(program.encode(prompt), random.Random()).tokens.tolist()
            answered = [user(prompt.text), {"role": "assistant", "content": prompt.response}]
            whole = str(form.apply_chat_template(answered, tokenize=False)).rstrip("\n")
            assert form.decode(tokens) == (whole if chat else prompt.text + prompt.response + EOS)
        assert program.stop_token_ids == ([form.convert_tokens_to_ids(END)] if chat else [])
        assert program.document("abc").tokens[-1] == form.eos_token_id


def test_steps_of_a_conversation_end_as_a_response_does():
    form = tokenizer()
    program = SingleTurn(Config(), form, SimpleNamespace(program=None), None)
    end = form.convert_tokens_to_ids(END)
    for messages, last in (([user("q")], end), (None, form.eos_token_id)):
        prompt = Prompt("p", "q", messages=messages).encode(form)
        assert program.sequence(prompt, "a").tokens[-1] == last
        assert program.stepwise(prompt, [])[0].tokens[-1] == last


@pytest.mark.parametrize("eos", [EOS, END])
def test_a_run_stops_at_the_template_s_end_too(tmp_path, eos):
    """And at those of generation_config.json."""
    form = tokenizer(eos=eos)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [7, 5]}))
    model = SimpleNamespace(path=str(tmp_path))
    ends = {7, 5, form.eos_token_id}
    for more in ([], end_of_turn(form)):
        run = SimpleNamespace(
            config=SimpleNamespace(model=model),
            tokenizer=form,
            program=SimpleNamespace(stop_token_ids=more),
            _has_generation_config=lambda: True,
        )
        assert Run.stop_tokens(run) == sorted(ends | set(more))


@pytest.mark.parametrize("name", ["qwen", "react"])
@pytest.mark.parametrize("eos", [EOS, END])
def test_a_reply_of_an_agent_is_followed_by_one_end(name, eos):
    """It may end by either of the two; one that was cut off gets the template's."""
    form = dialect(name, tokenizer(eos=eos))
    end, of_sequence = (form.tokenizer.convert_tokens_to_ids(token) for token in (END, EOS))
    reply, said = form.reply("hello"), form.tokenizer.encode("hello")
    assert form.stop_token_ids == [end] and reply == [*said, end]
    between = form.observation(["3"], after=reply)
    assert form.text(between).startswith(f"\n{START}user") and form.observation(["3"]) == between
    assert form.observation(["3"], after=said) == [end, *between]
    by_other = form.observation(["3"], after=[*said, of_sequence])
    assert by_other == (between if eos == EOS else [end, *between])


PART = (
    "{% for m in messages %}"
    + START
    + "{{ m.role }}\n{% for p in m.content %}{{ p.text }}{% endfor %}"
    + END
    + "{% endfor %}"
)
BAD = {
    "raises": (GEMMA, [system("S"), user("hi")], "does not take it: System role not supported"),
    "roles": (MISTRAL, [user("a b"), user("c"), user("x")], None),
    "alternate": (
        MISTRAL,
        [user("a"), user("b"), {"role": "assistant", "content": "c"}, user("d")],
        "roles must alternate",
    ),
    "syntax": ("{% for m in messages %}{{ m.content }", [user("hi")], "does not take it: "),
    "parts": (PART + ASKS, [user("hi you")], r"leaves out or changes the content of message 1 \(role user\): 'hi you'"),
    "upper": (
        TURNS.replace("m.content", "m.content | upper") + ASKS,
        [user("hi you")],
        "changes the content of message 1",
    ),
    "dropped": (
        TURNS.replace("{{ m.content }}", "{% if m.role != 'system' %}{{ m.content }}{% endif %}") + ASKS,
        [system("be short"), user("hi you")],
        r"content of message 1 \(role system\): 'be short'",
    ),
    "no prompt": (TURNS, [user("hi you")], r"no generation prompt: a reply begins with '<\|im_start\|>assistant'"),
    "none needed": (MISTRAL, [user("hi you")], None),
    "trimmed": (TURNS.replace("m.content", "m.content | trim") + ASKS, [user(" hi\nyou \n")], None),
    "as JSON": (TURNS.replace("m.content", "m.content | tojson") + ASKS, [user('say "hé"\n')], None),
    "thinking": (
        TURNS + ASKS,
        [user("a"), {"role": "assistant", "content": "b", "reasoning_content": "c"}, user("d")],
        "has no place for earlier thinking",
    ),
    "call": (
        TURNS + ASKS,
        [
            user("a"),
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]},
        ],
        "leaves out the call of look in message 2",
    ),
}


@pytest.mark.parametrize("kind", BAD)
def test_what_a_template_does_not_take_or_hides_is_told_in_one_line(kind):
    template, messages, problem = BAD[kind]
    prompt, form = Prompt("a.jsonl:7", messages[-1]["content"], messages=messages), tokenizer(template)
    if problem is None:
        assert prompt.encode(form).tokens
        return
    with pytest.raises(UserError, match=rf"^data: prompt a\.jsonl:7: .*{problem}") as error:
        prompt.encode(form)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["raises", "syntax", "parts", "upper", "dropped", "no prompt"])
@pytest.mark.parametrize("name", ["qwen", "react"])
def test_a_dialect_tells_the_same(kind, name):
    template, messages, problem = BAD[kind]
    with pytest.raises(UserError, match=problem):
        dialect(name, tokenizer(template)).prompt(messages)


@pytest.mark.parametrize("name", ["qwen", "react"])
def test_results_are_not_lost_between_turns(name):
    """They are the user's where a template knows no tools, and told where it shows them or the reply not as they are."""
    for template in (PART + ASKS, TURNS.replace("m.content", "m.content | upper") + ASKS):
        with pytest.raises(UserError, match="leaves out or changes the content of message 1"):
            dialect(name, tokenizer(template)).observation(["three"])
    with pytest.raises(UserError, match="has no generation prompt"):
        dialect(name, tokenizer(TURNS)).observation(["three"])
    hides = TURNS.replace("{{ m.content }}", "{% if m.role == 'assistant' %}{{ m.content }}{% endif %}") + ASKS
    with pytest.raises(UserError, match="leaves out or changes the content of message 2"):
        dialect(name, tokenizer(hides)).observation(["three"])
    for template in (MISTRAL, GEMMA):
        form = dialect(name, tokenizer(template))
        assert "three" in form.text(form.observation(["three"])) and form.prompt([user("hi")])


def test_the_first_of_each_form_is_looked_at_when_a_run_starts(tmp_path):
    """A conversation of a rare form is found wherever it stands; rows of one form cost one rendering."""
    rows = [{"prompt": [user(f"{i}?")], "response": "yes"} for i in range(50)]
    place = random.randrange(50)
    rows[place]["prompt"] = [system("S"), *rows[place]["prompt"]]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    form = single(path, tokenizer(GEMMA))
    prompts = [prompt for split in ("train", "eval") for prompt in form.task.prompts(split)]
    for learned in (None, form.demonstration):
        with pytest.raises(UserError, match=rf"prompt .*a\.jsonl:{place + 1}: .*System role not supported"):
            check_forms(prompts, form, learned)
        check_forms([prompt for prompt in prompts if len(prompt.messages) == 1], form, learned)
    seen = []
    form.encode = lambda prompt: seen.append(prompt) or prompt
    check_forms(prompts, form)
    assert len(seen) == 2


def test_responses_that_the_program_cannot_learn_are_found_when_a_run_starts(tmp_path):
    turns = [{"role": "assistant", "content": "yes", "reasoning_content": "so it is"}]
    rows = [{"prompt": f"{i}?", "response": "yes"} for i in range(30)] + [
        {"prompt": f"{i}!", "response": turns} for i in range(30)
    ]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    form = single(path, tokenizer())
    with pytest.raises(UserError, match="is a conversation; set rollout.program: agent"):
        check_forms(form.task.prompts("train"), form, form.demonstration)
    for name, problem in (("qwen", None), ("react", "ReAct has no form for thinking")):
        config = build_config(
            {"data": {"path": str(path)}, "rollout": {"program": "agent"}, "agent": {"dialect": name}}
        )
        agents = Agents(config, tokenizer(), form.task, ONE_PROCESS)
        try:
            if problem:
                with pytest.raises(UserError, match=rf"data: the demonstration of .*a\.jsonl:\d+: .*{problem}"):
                    check_forms(form.task.prompts("train"), agents, agents.demonstration)
            else:
                check_forms(form.task.prompts("train"), agents, agents.demonstration)
        finally:
            agents.close()


# -- demonstrations ---------------------------------------------------------------------------------------------------


def learned(form, turns, asked=None):
    """Text that counts, and all of it, behind the prompt."""
    prompt = Prompt("p", "2 + 2", tokens=form.prompt(asked or [user("2 + 2")]))
    found = demonstration(form, prompt, turns)
    tokens = found.tokens[found.prompt_length :]
    return form.text(tokens[found["loss_mask"]].tolist()), form.text(tokens.tolist())


def assistant(text, **more):
    return {"role": "assistant", "content": text} | more


@pytest.mark.parametrize("key", ["reasoning_content", "reasoning", "thinking"])
def test_thinking_is_learned_as_the_model_writes_it(key):
    thought, answer = words(), words()
    text = f"<think>\n{thought}\n</think>\n\n{answer}{END}"
    assert learned(dialect("qwen", tokenizer()), [assistant(answer, **{key: thought})]) == (text, text)
    with pytest.raises(UserError, match="the demonstration of p: .*ReAct has no form for thinking"):
        learned(dialect("react", tokenizer()), [assistant(answer, **{key: thought})])
    form = dialect("qwen", tokenizer())
    call = {"function": {"name": "f", "arguments": {}}}
    told, _ = learned(
        form, [assistant(None, tool_calls=[call], **{key: thought}), {"role": "tool", "content": "3"}, assistant("4")]
    )
    assert told.startswith(f"<think>\n{thought}\n</think>\n\n<tool_call>\n")


@pytest.mark.parametrize(
    ("message", "text"),
    [
        (assistant("4", reasoning="so"), "so\n</think>\n\n4"),
        (assistant("<think>\nso\n</think>\n\n4"), "so\n</think>\n\n4"),
        (assistant("<think>so</think>4"), "so</think>4"),
        (assistant("4"), "\n</think>\n\n4"),
    ],
)
def test_thinking_that_the_generation_prompt_has_begun_is_not_begun_again(message, text):
    form = dialect("qwen", tokenizer(TURNS + ASKS.replace("assistant\n", "assistant\n<think>\n")))
    assert form.text(form.prompt([user("?")])).endswith("assistant\n<think>\n")
    assert learned(form, [message])[0] == text + END


def test_a_reply_of_weight_0_is_context():
    """In any place of a conversation; with all other weights each reply counts, as without one."""
    form = dialect("qwen", tokenizer())
    texts = [words() for _ in range(random.randint(2, 6))]
    weights = [random.choice([0, 0.0, False, 1, 1.0, True, None]) for _ in texts]
    weights[random.randrange(len(texts))] = 1
    turns = []
    for text, weight in zip(texts, weights, strict=True):
        turns += [assistant(text, weight=weight), user("go on")]
    counted, whole = learned(form, turns[:-1])
    assert counted == "".join(text + END for text, weight in zip(texts, weights, strict=True) if weight in (1, None))
    assert whole == learned(form, [{k: v for k, v in turn.items() if k != "weight"} for turn in turns[:-1]])[1]


def test_replies_that_follow_each_other_begin_turns_of_their_own():
    form = dialect("qwen", tokenizer())
    counted, whole = learned(form, [assistant("one"), assistant("two")])
    assert whole == f"one{END}\n{START}assistant\ntwo{END}" and counted == f"one{END}two{END}"


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (assistant("4", weight=0.5), "the weight of a message is 0.5, neither 0 nor 1"),
        (assistant("4", weight="1"), "the weight of a message is '1'"),
        (assistant("4", reasoning=["a"]), "'reasoning' of a message is not text"),
        (assistant("4", reasoning="a", thinking="b"), "'thinking' and 'reasoning' of a message differ"),
        (assistant("4", refusal="no"), "a message of role assistant has 'refusal', which the model would not be shown"),
        (assistant("4", audio={"id": "1"}), "has 'audio'"),
        (assistant("4", annotations=[{"type": "url"}]), "has 'annotations'"),
        (assistant("4", name="Ada"), "has 'name'"),
        (
            assistant("", function_call={"name": "f"}, tool_calls=[{"function": {"name": "f"}}]),
            "both function_call and",
        ),
        (user("4") | {"images": ["a.png"]}, "a message of role user has 'images'"),
        (user("4") | {"weight": 1}, "a message of role user has 'weight'"),
        (user([{"type": "image_url", "image_url": {"url": "x"}}]), "has a part of type 'image_url': only text"),
        (user([{"type": "text", "text": 3}]), "has a part of type 'text'"),
        (assistant(None, function_call={"name": "f", "arguments": "{"}), "arguments that are JSON"),
        (assistant(None, tool_calls=[{"function": {"name": None, "arguments": {}}}]), "a function with a name"),
        (
            assistant(None, tool_calls=[{"function": {"name": "f", "arguments": "[" * 100_000}}]),
            "arguments that are JSON",
        ),
    ],
)
def test_nothing_of_a_message_is_lost_without_a_word(message, problem):
    with pytest.raises(UserError, match=f"the demonstration of p: .*{problem}"):
        learned(dialect("qwen", tokenizer()), [message, assistant("4")])


def test_other_forms_of_messages_are_heeded():
    """The API's older calls, other names of roles, text in parts, and fields that say nothing."""
    form = dialect("qwen", tokenizer())
    call = {"name": "look", "arguments": '{"x": 1}'}
    nothing = {"refusal": None, "audio": None, "annotations": [], "name": "", "tool_calls": None, "weight": None}
    older = [
        assistant(None, function_call=call) | {k: v for k, v in nothing.items() if k != "tool_calls"},
        {
            "role": random.choice(["function", "ipython"]),
            "name": "look",
            "content": "3",
            "function_call": {"name": None},
        },
        assistant([{"type": "text", "text": "It is "}, {"type": "text", "text": "3."}], **nothing),
    ]
    newer = [
        assistant(None, tool_calls=[{"id": "1", "type": "function", "function": call}]),
        {"role": "tool", "tool_call_id": "1", "content": "3"},
        assistant("It is 3."),
    ]
    assert learned(form, older) == learned(form, newer)
    assert dialect("qwen", tokenizer()).prompt([system("S"), user("hi")]) is not None


def test_a_text_to_learn_has_no_half_a_surrogate_pair():
    form = tokenizer()
    with pytest.raises(ValueError, match="surrogates not allowed"):
        encode_text(form, "a \ud83d")
    for prompt in (Prompt("own:3", "a \ud83d"), Prompt("own:3", "q", messages=[system("\udc00"), user("q")])):
        with pytest.raises(UserError, match="data: prompt own:3: half a surrogate pair"):
            prompt.encode(form)
    for name in set(DIALECTS) - {"harmony"}:
        with pytest.raises(UserError, match="the demonstration of p: half a surrogate pair"):
            learned(dialect(name, form), [assistant("\ud83d")])
    assert DataConfig().tools_key == "tools"
