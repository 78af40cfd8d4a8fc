"""Prompts, their encoding, their split, the stream and the rewards' weights."""

from __future__ import annotations

import logging
import random

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from megatron_rl.config import Config, DataConfig
from megatron_rl.errors import UserError
from megatron_rl.rollout.program import SingleTurn
from megatron_rl.tasks import PromptStream, build_task, combine, encode_text, fitting
from megatron_rl.tasks.procedural import GENERATED_HELD_OUT_SHARE, ProceduralPrompts
from megatron_rl.tasks.task import Prompt, is_held_out

WORDS = ["<bos>", "<eos>", "<unk>", "<", ">", ":", *map(str, range(20)), "user", "assistant", "hello"]


@pytest.fixture(scope="module")
def tokenizer():
    core = Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, unk_token="<unk>"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    core.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=core, bos_token="<bos>", eos_token="<eos>", unk_token="<unk>")


def sorting(**options):
    return build_task(DataConfig(task="number_sorting", options=options))


def plain(tokenizer, task=None):
    """The program that encodes prompts and demonstrations as they are."""
    return SingleTurn(Config(), tokenizer, task or sorting(), None)


def ids(prompts):
    return [p.prompt_id for p in prompts]


def test_number_sorting_prompts_follow_the_recipe():
    task = sorting(size=300)
    signs = set()
    for prompt in task.prompts("train"):
        sign, numbers = prompt.text[0], [int(n) for n in prompt.text[1:-1].split()]
        signs.add(sign)
        assert prompt.text[-1] == ":" and 4 <= len(numbers) <= 6 and all(0 <= n <= 19 for n in numbers)
        assert prompt.answer == sorted(numbers, reverse=sign == ">")
    assert signs == {"<", ">"}


def test_number_sorting_splits_share_no_text_over_seeds_and_sizes():
    train = {
        p.text
        for seed in (0, 1)
        for p in build_task(
            DataConfig(task="number_sorting", seed=seed, options={"size": 2000, "max_value": 5, "min_numbers": 3})
        ).prompts("train")
    }
    held_out = {p.text for p in sorting(size=500, max_value=5, min_numbers=3).prompts("eval")}
    assert train and held_out and not train & held_out


def test_number_sorting_is_deterministic_and_differs_between_seeds():
    def texts(seed):
        return [p.text for p in build_task(DataConfig(task="number_sorting", seed=seed)).prompts("train")[:50]]

    assert texts(3) == texts(3)
    assert len(set(texts(3)) & set(texts(4))) < 5


def test_demonstrations_are_wrong_as_often_as_asked():
    rng = random.Random(0)
    task = sorting(corrupt=0.5)
    prompts = task.prompts("train")[:600]
    right = [task.rewards(p, task.demonstration(p, rng))["correct"] for p in prompts]
    assert 0.42 < sum(right) / len(right) < 0.58
    clean = sorting()
    assert all(clean.rewards(p, clean.demonstration(p, rng))["correct"] == 1.0 for p in prompts[:50])


def test_a_list_that_is_to_be_written_several_times():
    task = sorting(times=3)
    prompt = task.prompts("train")[0]
    once = " ".join(map(str, prompt.answer))
    texts = [" ".join([once] * n) for n in (1, 2, 3, 4)]
    assert [parts["correct"] for parts in task.score([prompt] * 4, texts)] == [0, 0, 1, 0]
    assert task.demonstration(prompt, random.Random(0)) == texts[2]
    with pytest.raises(UserError, match="options.times"):
        build_task(DataConfig(task="number_zigzag", options={"times": 3}))


def test_numbers_that_add_up_have_answers_of_many_lengths():
    """examples/number_partition.py: half of the demonstrations are right, one token a number, and short ones as likely."""
    task = build_task(DataConfig(task="examples/number_partition.py:NumberPartition"))
    rng = random.Random()
    prompts = task.prompts("train")[:500]
    texts = [task.demonstration(prompt, rng) for prompt in prompts]
    assert all(1 <= int(number) <= 19 for text in texts for number in text.split())
    right = [parts["correct"] for parts in task.score(prompts, texts)]
    assert 0.35 < sum(right) / len(right) < 0.65  # of 500 halves: outside with a chance of 2e-11
    assert {len(text.split()) for text in texts} == set(range(1, 9))
    prompt = prompts[0]
    assert sum(map(int, prompt.text[1:-1].split("+"))) == int(prompt.answer)
    wrong = (f"{int(prompt.answer) + 1}", f"{prompt.answer} 0", "", "x")
    assert [parts["correct"] for parts in task.score([prompt] * 5, [prompt.answer, *wrong])] == [1, 0, 0, 0, 0]


def test_number_zigzag_has_prompts_with_several_right_answers():
    rng = random.Random(0)
    task = build_task(DataConfig(task="number_zigzag", options={"size": 300}))
    prompts = task.prompts("train")[:100]
    for prompt in prompts:
        numbers = prompt.text[1:-1].split()
        assert prompt.text[0] in "<>" and 4 <= len(set(numbers)) == len(numbers) <= 6
        answers = {task.demonstration(prompt, rng) for _ in range(40)}
        assert len(answers) >= 3 and all(task.rewards(prompt, answer)["correct"] == 1 for answer in answers)
    assert {prompt.text[0] for prompt in prompts} == {"<", ">"}
    same = {"6 15 3 12", " 6, 15,3 12\n", "[06 15 3.0 12]"}
    assert {task.extract(text) for text in same} == {"6 15 3 12"} and task.extract("six ") == "six"
    wrong = build_task(DataConfig(task="number_zigzag", options={"corrupt": 1}))
    assert not any(wrong.rewards(p, wrong.demonstration(p, rng))["correct"] for p in prompts)
    assert not {p.text for p in prompts} & {p.text for p in task.prompts("eval")[:300]}
    with pytest.raises(UserError, match="there are not 6 different numbers from 0 to 3; raise max_value"):
        build_task(DataConfig(task="number_zigzag", options={"max_value": 3}))


def test_too_few_different_questions_is_an_error():
    def generate(block, index):
        return Prompt(f"only:{block}:{index}", "the only question")

    other = "train" if is_held_out("the only question", GENERATED_HELD_OUT_SHARE) else "eval"
    with pytest.raises(UserError, match="too few different questions"):
        ProceduralPrompts(generate, other, 10)[0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_numbrs": 3}, "did you mean 'max_numbers'"),
        ({"corrupt": 2}, "data.options.corrupt"),
        ({"min_numbers": 9}, "min_numbers may not exceed"),
    ],
)
def test_bad_options_of_number_sorting_are_named(options, message):
    with pytest.raises(UserError, match=message):
        sorting(**options)


def test_held_out_share_is_about_what_was_asked():
    share = sum(is_held_out(f"text {i}", 0.25) for i in range(4000)) / 4000
    assert 0.22 < share < 0.28


def test_encoding_adds_bos_and_demonstrations_end_with_eos(tokenizer):
    prompt = Prompt("a", "<1 2:").encode(tokenizer)
    assert tokenizer.convert_ids_to_tokens(prompt.tokens) == ["<bos>", "<", "1", "2", ":"]
    assert tokenizer.convert_ids_to_tokens(encode_text(tokenizer, "1 2")[0]) == ["1", "2", "<eos>"]


def test_a_conversation_takes_the_chat_template(tokenizer):
    prompt = Prompt("a", "hello", messages=[{"role": "user", "content": "hello"}])
    with pytest.raises(UserError, match="no chat template"):
        prompt.encode(tokenizer)
    tokenizer.chat_template = (
        "{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
        "{% if add_generation_prompt %}assistant{% endif %}"
    )
    try:
        assert tokenizer.convert_ids_to_tokens(prompt.encode(tokenizer).tokens) == ["user", "hello", "assistant"]
    finally:
        tokenizer.chat_template = None


def test_stream_visits_every_prompt_once_an_epoch_in_new_orders(tokenizer):
    stream = PromptStream(sorting(size=40), plain(tokenizer), 64, 8, seed=1)
    first, second = ids(stream.next(40)), ids(stream.next(40))
    assert sorted(first) == sorted(second) and len(set(first)) == 40 and first != second


def test_stream_is_the_same_on_every_rank_and_differs_between_seeds(tokenizer):
    def draw(seed):
        return ids(PromptStream(sorting(size=40), plain(tokenizer), 64, 8, seed).next(20))

    assert draw(0) == draw(0) != draw(1)


@pytest.mark.parametrize("before", [0, 5, 40, 61])
def test_stream_resumes_exactly(tokenizer, before):
    stream = PromptStream(sorting(size=40), plain(tokenizer), 17, 8, seed=1)
    stream.next(before)
    state = stream.state_dict()
    expected = ids(stream.next(70))
    resumed = PromptStream(sorting(size=40), plain(tokenizer), 17, 8, seed=1)
    resumed.load_state_dict(state)
    assert ids(resumed.next(70)) == expected and resumed.skipped == stream.skipped


def test_stream_refuses_the_state_of_other_data(tokenizer):
    state = PromptStream(sorting(size=40), plain(tokenizer), 64, 8, seed=1).state_dict()
    with pytest.raises(UserError, match="had size 40, now it has 41"):
        PromptStream(sorting(size=41), plain(tokenizer), 64, 8, seed=1).load_state_dict(state)


def test_prompts_that_are_too_long_are_skipped_and_counted_and_the_first_are_logged(tokenizer, caplog):
    task = sorting(size=40)
    limit = 7 + 8  # bos, sign, colon and four numbers
    long = {p.prompt_id for p in task.prompts("train") if len(p.answer) > 4}
    stream = PromptStream(task, plain(tokenizer, task), limit, 8, seed=1)
    with caplog.at_level(logging.WARNING):
        got = stream.next(3 * (40 - len(long)))
    assert 0 < len(long) < 40 and stream.skipped == long and not long & set(ids(got))
    named = [r.getMessage() for r in caplog.records if "exceed" in r.getMessage()]
    assert len(set(named)) == len(named) == 5 and all(any(f"{i} skipped" in m for i in long) for m in named)
    caplog.clear()
    assert {p.prompt_id for p in fitting(task.prompts("train")[:40], plain(tokenizer), limit, 8)} == set(ids(got))
    [named] = [r.getMessage() for r in caplog.records]
    assert f"{len(long)} of 40 held-out prompts skipped" in named


def test_a_context_in_which_nothing_fits_is_an_error_not_an_endless_loop(tokenizer):
    with pytest.raises(UserError, match="none of the 40 prompts"):
        PromptStream(sorting(size=40), plain(tokenizer), 10, 8, seed=1).check_room()
    with pytest.raises(UserError, match="none of the 40 prompts"):
        PromptStream(sorting(size=40), plain(tokenizer), 10, 8, seed=1).next(1)
    with pytest.raises(UserError, match="none of the 40 held-out prompts"):
        fitting(sorting(size=40).prompts("train"), plain(tokenizer), 10, 8)


def test_reward_parts_are_weighted_and_misspelt_ones_refused():
    task = build_task(DataConfig(task="number_sorting", rewards={"answered": 0.1}))
    assert task.weights == {"correct": 1.0, "answered": 0.1}
    assert combine({"correct": 1.0, "answered": 1.0}, task.weights) == pytest.approx(1.1)
    with pytest.raises(UserError, match="'corect'.*did you mean 'correct'"):
        build_task(DataConfig(task="number_sorting", rewards={"corect": 1.0}))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"task": "number_sortin"}, "did you mean 'number_sorting'"),
        ({"task": "file"}, "needs data.path"),
        ({"task": "number_sorting", "verifier": "math"}, "has its own"),
        ({"template": "no place"}, "data.template"),
    ],
)
def test_tasks_that_cannot_be_built_say_why(data, message):
    with pytest.raises(UserError, match=message):
        build_task(DataConfig(**data))


def test_demonstrations_that_are_too_long_are_skipped_and_counted(tokenizer, caplog):
    """Prompt and response together; nothing is kept free for a response that would be sampled."""
    task = sorting(size=60)
    rng = random.Random(0)
    lengths = {
        p.prompt_id: len(p.encode(tokenizer).tokens) + len(encode_text(tokenizer, task.demonstration(p, rng))[0])
        for p in task.prompts("train")
    }
    limit = sorted(lengths.values())[30]
    long = {name for name, length in lengths.items() if length > limit}
    stream = PromptStream(task, plain(tokenizer, task), limit, 10_000, seed=1)
    with caplog.at_level("WARNING"):
        pairs = stream.next_demonstrations(2 * (60 - len(long)), random.Random(0))
    assert 0 < len(long) < 60 and stream.skipped == long
    assert sorted({len(one.tokens) for one in pairs}) == sorted({n for name, n in lengths.items() if name not in long})
    named = [m for m in caplog.messages if m.startswith("data: demonstration ")]
    assert len(named) == min(5, len(long)) and len(caplog.messages) <= 6
    assert f"included, exceed rollout.context_length {limit}" in caplog.messages[0]
    stream = PromptStream(task, plain(tokenizer, task), min(lengths.values()) - 1, 8, seed=1)
    with pytest.raises(UserError, match="none of the 60 demonstrations fits into rollout.context_length"):
        stream.next_demonstrations(1, random.Random(0))


def test_demonstrations_come_in_the_order_of_prompts(tokenizer):
    task = sorting(size=40)
    prompts, pairs = (PromptStream(task, plain(tokenizer, task), 64, 8, seed=1) for _ in range(2))
    rng = random.Random("7/3")
    expected = [[*p.tokens, *encode_text(tokenizer, task.demonstration(p, rng))[0]] for p in prompts.next(50)]
    assert [one.tokens.tolist() for one in pairs.next_demonstrations(50, random.Random("7/3"))] == expected
