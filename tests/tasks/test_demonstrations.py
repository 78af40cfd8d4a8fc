"""Demonstrations out of sampled responses: which are kept, and that SFT learns exactly the tokens that were sampled."""

from __future__ import annotations

import json
import random
from collections import Counter

import numpy as np
import pytest
from scripted import ONE_PROCESS, play

from megatron_rl.agents.agent import Agents
from megatron_rl.checks.preflight import check_demonstrations
from megatron_rl.config import DataConfig, DemonstrationsConfig
from megatron_rl.config.load import build_config
from megatron_rl.data.sequence import TopLogProbs
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.errors import UserError
from megatron_rl.models.hf_folder import vocabulary_digest
from megatron_rl.report.samples import write_responses
from megatron_rl.rollout.demonstrations import best_of, light, problem_of, row_of, samples_of, summary
from megatron_rl.rollout.program import SingleTurn
from megatron_rl.tasks import Prompt, PromptStream, build_task
from megatron_rl.tasks.stream import demonstrations, held_out_demonstrations
from tools.make_tiny_model import numbers_tokenizer, text_tokenizer

TOKENIZER = text_tokenizer(512)
OTHER = numbers_tokenizer(512)
DIGEST = vocabulary_digest(TOKENIZER)


def made(prompt: Prompt, *, k: int = 0, **settings) -> Trajectory:
    """Random tokens, none of them special, of which some do not count."""
    rng = np.random.default_rng()
    m = int(rng.integers(1, 30))
    found = Trajectory(
        tokens=np.asarray([*prompt.tokens, *rng.integers(4, 512, m)], np.int32),
        prompt_length=len(prompt.tokens),
        prompt_id=prompt.prompt_id,
        group_id=0,
        **settings,
    )
    found["loss_mask"] = rng.random(m) < 0.8
    found["loss_mask"][rng.integers(m)] = True
    found.text = str(TOKENIZER.decode(found.tokens[found.prompt_length :].tolist(), skip_special_tokens=True))
    if k:
        ids = rng.permuted(np.tile(np.arange(512), (m, 1)), axis=1)[:, :k].astype(np.int32)
        found.top = TopLogProbs(ids, np.log(rng.dirichlet(np.ones(k + 1), m)[:, :k]).astype(np.float32))
    return found


def asked(count: int) -> list[Prompt]:
    prompts = [Prompt(f"p:{i}", f"What is {i} + {random.randrange(99)}?") for i in range(count)]
    return [prompt.encode(TOKENIZER) for prompt in prompts]


def written(path, trajectories: list[Trajectory], prompts: dict[str, Prompt]) -> str:
    write_responses(path, [row_of(t, prompts[t.prompt_id], TOKENIZER, DIGEST) for t in trajectories])
    return str(path)


def program(path: str, tokenizer=TOKENIZER, kind: type[SingleTurn] = SingleTurn, **data) -> SingleTurn:
    """The rollout program of `megatron-rl sft` on the file."""
    config = build_config({"data": {"path": path} | data})
    task = build_task(config.data, demonstrations=True)
    return kind(config, tokenizer, task, ONE_PROCESS)


def learned(form: SingleTurn) -> list:
    """What SFT learns from the file, in its order."""
    prompts = [prompt for split in ("train", "eval") for prompt in form.task.prompts(split)]
    prompts.sort(key=lambda prompt: int(prompt.prompt_id.rpartition(":")[2]))
    return [one for prompt in prompts for one in demonstrations(prompt, form, random.Random(), 1 << 20)]


@pytest.mark.parametrize("k", [0, 5])
def test_rows_are_learned_to_the_token(k, tmp_path):
    """Prompt, response, mask and a teacher's log-probs; the text would have been other tokens."""
    prompts = {prompt.prompt_id: prompt for prompt in asked(random.randint(5, 20))}
    trajectories = [made(prompt, k=k) for prompt in prompts.values() for _ in range(2)]
    path = written(tmp_path / "rows.jsonl", trajectories, prompts)
    found = learned(program(path))
    assert len(found) == len(trajectories)
    for one, t in zip(found, trajectories, strict=True):
        assert np.array_equal(one.tokens, t.tokens) and one.prompt_length == t.prompt_length
        assert np.array_equal(one["loss_mask"], t["loss_mask"])
        assert (one.top is None) == (k == 0)
        if k:
            assert np.array_equal(one.top.token_ids, t.top.token_ids)
            # half of the sixth decimal, and fp32's own rounding of numbers below 2^5
            assert np.abs(one.top.log_probs - t.top.log_probs).max() <= 0.5e-6 + 2**-19
    texts = learned(program(path, tokens_key=None))
    assert [one.tokens.tolist() for one in texts] != [t.tokens.tolist() for t in trajectories]
    for one, t in zip(texts, trajectories, strict=True):
        prompt = prompts[t.prompt_id].tokens
        end = [*TOKENIZER.encode(t.text, add_special_tokens=False), TOKENIZER.eos_token_id]
        assert one.tokens.tolist() == [*prompt, *end]


def conversation(number: int) -> tuple[Trajectory, Prompt]:
    """With a calculator: a call, its result, and an answer."""
    task = build_task(DataConfig(task="sums"), more_parts=Agents.parts)
    call = json.dumps({"name": "calculator", "arguments": {"expression": f"{number} + 1"}})
    replies = [f"Let me see.\n<tool_call>\n{call}\n</tool_call>", f"It is {number + 1}."]
    prompt = task.prompts("train")[number]
    found, _ = play(task, prompt, replies, tools=["calculator"])
    return found, prompt


def test_a_conversation_is_learned_to_the_token(tmp_path):
    """By both programs; observations do not count. As messages it is the same, where the tokenizer is."""
    number = random.randrange(100)
    t, prompt = conversation(number)
    assert t.finish_reason == "stop" and [turn.role for turn in t.turns] == ["assistant", "tool", "assistant"]
    assert 0 < t["loss_mask"].sum() < t.response_length
    agent = {"rollout": {"program": "agent"}, "agent": {"tools": ["calculator"]}}
    same = Prompt(prompt.prompt_id, prompt.text, messages=prompt.messages, tokens=t.tokens[: t.prompt_length].tolist())
    path = tmp_path / "rows.jsonl"
    write_responses(path, [row_of(t, same, TOKENIZER, DIGEST)] * 40)
    row = json.loads(path.read_text().splitlines()[0])
    assert [message["role"] for message in row["response"]] == ["assistant", "tool", "assistant"]
    assert row["response"][1]["content"] == str(number + 1) and row["response"][2]["content"] == f"It is {number + 1}."
    for kind in (SingleTurn, Agents):
        for tokens_key in ("response_tokens", None)[: 1 + (kind is Agents)]:
            config = build_config(agent | {"data": {"path": str(path), "tokens_key": tokens_key}})
            form = kind(config, TOKENIZER, build_task(config.data, demonstrations=True), ONE_PROCESS)
            found = learned(form)
            form.close()
            assert len(found) == 40
            for one in found:
                assert np.array_equal(one.tokens, t.tokens) and one.prompt_length == t.prompt_length
                assert np.array_equal(one["loss_mask"], t["loss_mask"])
    with pytest.raises(UserError, match=r"is a conversation; set rollout\.program: agent"):
        learned(program(str(path), tokens_key=None))


def oracle(samples: list[list[Trajectory]], s: DemonstrationsConfig) -> tuple[set[int], Counter]:
    """By the definition, one prompt at a time."""
    reasons, fine = Counter(), {}
    for number, sample in enumerate(samples):
        length = sum(len(t.tokens) - t.prompt_length for t in sample)
        for reason, wrong in (
            ("masked", any(t.masked for t in sample)),
            ("cut off", any(t.finish_reason != "stop" for t in sample)),
            ("below min_reward", sample[0].reward < s.min_reward),
            ("below min_tokens", length < s.min_tokens),
            ("above max_tokens", s.max_tokens is not None and length > s.max_tokens),
        ):
            if wrong:
                reasons[reason] += 1
                break
        else:
            fine.setdefault(sample[0].prompt_id, []).append((-sample[0].reward, length, number))
    kept = set()
    for of_prompt in fine.values():
        chosen, seen = [], []
        for _, _, number in sorted(of_prompt):
            tokens = [t.tokens.tolist() for t in samples[number]]
            if s.unique and tokens in seen:
                reasons["the same as another"] += 1
            elif s.per_prompt is not None and len(chosen) >= s.per_prompt:
                reasons["beyond per_prompt"] += 1
            else:
                chosen.append(number)
                seen.append(tokens)
        kept |= set(chosen)
    return kept, reasons


@pytest.mark.parametrize(
    "settings",
    [
        {"min_reward": 0.5},
        {"min_reward": 0.0, "per_prompt": 2},
        {"min_reward": 0.0, "unique": False, "per_prompt": 3},
        {"min_reward": 0.0, "unique": False},
        {"min_reward": 0.0, "min_tokens": 9},
        {"min_reward": 0.0, "max_tokens": 12},
        {"min_reward": 0.5, "min_tokens": 3, "max_tokens": 25, "per_prompt": 1},
    ],
)
def test_filters_keep_what_they_say(settings):
    """Random rewards with ties, responses that are the same, cut off or masked, and samples of several sequences."""
    s, rng = DemonstrationsConfig(**settings), random.Random()
    trajectories = []
    for prompt in asked(12):
        pool = [made(prompt) for _ in range(4)]
        for _ in range(8):
            ended = rng.choice(["stop", "stop", "stop", "length", "tokens", "abort"])
            shared = {"reward": rng.choice([0.0, 0.5, 1.0]), "masked": rng.random() < 0.1, "finish_reason": ended}
            for part in range(rng.choice([1, 1, 1, 3])):
                one = made(prompt) if part else light([rng.choice(pool)])[0]
                for name, value in (shared | {"part": part}).items():
                    setattr(one, name, value)
                trajectories.append(one)
    samples = samples_of(trajectories)
    assert [t for sample in samples for t in sample] == trajectories and all(sample[0].part == 0 for sample in samples)
    problems = [problem_of(sample, s) for sample in samples]
    kept, left_out = best_of([x for x, problem in zip(samples, problems, strict=True) if not problem], s)
    left_out += Counter(filter(None, problems))
    numbers, reasons = oracle(samples, s)
    assert [id(x) for x in kept] == [id(samples[number]) for number in sorted(numbers)]
    assert left_out == reasons and len(kept) + left_out.total() == len(samples)
    assert f"{len(kept)} of {len(samples)} responses are kept; left out: " in summary(len(kept), left_out)


def test_tokens_of_another_tokenizer_are_refused(tmp_path):
    """At the start, whichever row it is, and at each use; by key the texts are learned."""
    prompts = {prompt.prompt_id: prompt for prompt in asked(20)}
    path = tmp_path / "rows.jsonl"
    written(path, [made(prompt) for prompt in prompts.values()], prompts)
    refused = (
        r"the tokens of .*rows\.jsonl:\d+ are of tokenizer [0-9a-f]{16}, and the model's is .*data\.tokens_key: null"
    )
    form = program(str(path), OTHER)
    with pytest.raises(UserError, match=refused):
        PromptStream(form.task, form, 99, 1, 0).check_demonstrations(taught=False)
    with pytest.raises(UserError, match=refused):
        held_out_demonstrations(form.task.prompts("train"), form, 99)
    lines = path.read_text().splitlines()
    wrong = random.randrange(len(lines))
    lines[wrong] = lines[wrong].replace(f'"tokenizer": "{DIGEST}"', '"tokenizer": ""')
    path.write_text("\n".join(lines))
    form = program(str(path))
    with pytest.raises(UserError, match=rf"rows\.jsonl:{wrong + 1} are of an unnamed tokenizer"):
        learned(form)
    assert len(learned(program(str(path), OTHER, tokens_key=None))) == 20


def test_rows_without_a_teacher_are_named_where_one_is_wanted(tmp_path):
    prompts = {prompt.prompt_id: prompt for prompt in asked(20)}
    trajectories = [made(prompt, k=3) for prompt in prompts.values()]
    form = program(written(tmp_path / "all.jsonl", trajectories, prompts))
    PromptStream(form.task, form, 99, 1, 0).check_demonstrations(taught=True)
    for t in trajectories[1:]:
        t.top = None
    form = program(written(tmp_path / "some.jsonl", trajectories, prompts))
    with pytest.raises(UserError, match=r"distillation\.recorded: .*some\.jsonl:\d+ has no log-probs of a teacher"):
        PromptStream(form.task, form, 99, 1, 0).check_demonstrations(taught=True)


BAD_ROWS = {
    r"'response_tokens' is empty": {"response_tokens": []},
    r"'prompt_tokens' is empty": {"prompt_tokens": []},
    r"it has tokens and no 'prompt_tokens'": {"prompt_tokens": ...},
    r"'loss_mask' has 1 values for 3 tokens": {"loss_mask": [1]},
    r"'loss_mask' leaves nothing to learn": {"loss_mask": [0, 0, 0]},
    r"'response_tokens' is not a table of numbers": {"response_tokens": ["x"]},
    r"'teacher_token_ids' and 'teacher_log_probs' are \[1, 2\] and \[1, 2\] for 3 tokens": {
        "teacher_token_ids": [[1, 2]],
        "teacher_log_probs": [[-1.0, -2.0]],
    },
    r"'teacher_log_probs' is not a table of numbers": {
        "teacher_token_ids": [[1]] * 3,
        "teacher_log_probs": [[None]] * 3,
    },
}


@pytest.mark.parametrize("problem", BAD_ROWS)
def test_rows_whose_tokens_do_not_fit_are_named(problem, tmp_path):
    row = {"prompt": "a", "response": "b", "prompt_tokens": [5], "response_tokens": [6, 7, 8], "tokenizer": DIGEST}
    row = {name: value for name, value in (row | BAD_ROWS[problem]).items() if value is not ...}
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row))
    with pytest.raises(UserError, match=rf"no usable line \(1 skipped; the first: {problem}"):
        program(str(path))


def test_a_number_of_tokens_is_no_list_of_them(tmp_path):
    """Data sets have columns of such names."""
    path = tmp_path / "rows.jsonl"
    path.write_text(
        "".join(json.dumps({"prompt": f"{i}?", "response": "b", "response_tokens": 1}) + "\n" for i in range(9))
    )
    assert all(prompt.recorded is None for prompt in program(str(path)).task.prompts("train"))


BAD = {
    r"per_prompt = 2 does nothing without rollout\S+min_reward; set .*min_reward: 1": {
        "demonstrations": {"per_prompt": 2}
    },
    r"max_tokens = 3 is below min_tokens = 4": {"demonstrations": {"min_reward": 0, "min_tokens": 4, "max_tokens": 3}},
    r"top_log_probs = 5 records the unchanged policy, but sampling changes it \(temperature\)": {
        "demonstrations": {"min_reward": 0, "top_log_probs": 5},
        "sampling": {"temperature": 0.7},
    },
    r"top_log_probs = 5 records the unchanged policy, but sampling changes it \(top_k\)": {
        "demonstrations": {"min_reward": 0, "top_log_probs": 5},
        "sampling": {"top_k": 9},
    },
    r"top_log_probs = 5: rollout\.load uses no SGLang server": {
        "demonstrations": {"min_reward": 0, "top_log_probs": 5},
        "load": "runs/x/rollouts",
    },
    r"top_log_probs = 513: the model has 512 tokens; lower it": {
        "demonstrations": {"min_reward": 0, "top_log_probs": 513}
    },
}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_kept_or_recorded_is_refused(message, tiny_model):
    model = {"path": str(tiny_model("qwen3"))}
    with pytest.raises(UserError, match=rf"rollout\.demonstrations\.{message}"):
        check_demonstrations(build_config({"model": model, "rollout": BAD[message]}), vocabulary=512)
    pruned = {"demonstrations": {"min_reward": 0, "top_log_probs": 512}}
    with pytest.raises(UserError, match=r"sampling changes it \(min_p, engine_min_p\)"):
        check_demonstrations(
            build_config({"model": model, "rollout": pruned, "pruning": {"enabled": True, "engine_rho": 1}})
        )
    check_demonstrations(build_config({"model": model, "rollout": pruned}))


def test_chat_and_template_do_nothing_with_tokens(tmp_path):
    prompts = {prompt.prompt_id: prompt for prompt in asked(9)}
    path = written(tmp_path / "rows.jsonl", [made(prompt) for prompt in prompts.values()], prompts)
    with pytest.raises(UserError, match=r"data\.chat does nothing with tokens \('response_tokens'\)"):
        program(path, chat=True)
