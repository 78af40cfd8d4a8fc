"""Demonstrations from sampled responses: the choice of samples, and their rows in the file that `megatron-rl sft` reads.

A sample is the result of one request: one sequence, or the several sequences of an agent (`Trajectory.part`). All sequences of
a sample are kept or left out together.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from transformers import PreTrainedTokenizerBase

from megatron_rl.config import DemonstrationsConfig
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.tasks import Prompt
from megatron_rl.tasks.sampled_demonstrations import Recorded

FILE = "demonstrations.jsonl"
"""File name in the run's rollouts/ folder."""
Sample = list[Trajectory]


def samples_of(trajectories: Iterable[Trajectory]) -> list[Sample]:
    """Group trajectories into samples; further sequences of a sample follow its first sequence."""
    found: list[Sample] = []
    for trajectory in trajectories:
        if trajectory.part and found:
            found[-1].append(trajectory)
        else:
            found.append([trajectory])
    return found


def problem_of(sample: Sample, settings: DemonstrationsConfig) -> str:
    """Return the reason to leave out a sample, judged on its own; '' if there is none. `best_of` compares samples."""
    length = _length(sample)
    if any(t.masked for t in sample):
        return "masked"
    if any(t.finish_reason != "stop" for t in sample):
        return "cut off"
    if settings.min_reward is not None and sample[0].reward < settings.min_reward:
        return "below min_reward"
    if length < settings.min_tokens:
        return "below min_tokens"
    if settings.max_tokens is not None and length > settings.max_tokens:
        return "above max_tokens"
    return "" if all(t["loss_mask"].any() for t in sample) else "without a token to learn"


def best_of(samples: Sequence[Sample], settings: DemonstrationsConfig) -> tuple[list[Sample], Counter[str]]:
    """Return the best samples in their given order, and the number of samples left out for each reason.

    Samples are ranked by reward (highest first), then by length (shortest first), then by position. Repeated samples
    (`unique`) and samples beyond `per_prompt` are left out.
    """
    seen: set[tuple[Any, ...]] = set()
    kept, of_prompt, left_out = list[int](), Counter[str](), Counter[str]()
    for place in sorted(range(len(samples)), key=lambda i: (-samples[i][0].reward, _length(samples[i]), i)):
        sample = samples[place]
        prompt = sample[0].prompt_id
        same = (prompt, *(t.tokens.tobytes() for t in sample))
        if settings.unique and same in seen:
            left_out["the same as another"] += 1
        elif settings.per_prompt is not None and of_prompt[prompt] == settings.per_prompt:
            left_out["beyond per_prompt"] += 1
        else:
            seen.add(same)
            of_prompt[prompt] += 1
            kept.append(place)
    return [samples[place] for place in sorted(kept)], left_out


def light(sample: Sample) -> Sample:
    """Return the sample without routes, gates, router features and sets of kept tokens, which a row does not store."""
    return [replace(t, routes=None, gates=None, features=None, kept=None) for t in sample]


def row_of(
    trajectory: Trajectory, prompt: Prompt, tokenizer: PreTrainedTokenizerBase, vocabulary: str
) -> dict[str, Any]:
    """Return the row of a trajectory. prompt: the prompt of the request; vocabulary: the tokenizer's digest.

    The row holds the prompt as messages or text, before the chat template and the tokenizer are applied. If an agent outside
    the package sent another prompt, the row holds the decoded tokens of that prompt. The response is its text, or the messages
    of a conversation.
    """
    t = trajectory
    asked, response = t.tokens[: t.prompt_length], t.tokens[t.prompt_length :]
    same = asked.tolist() == list(prompt.tokens)
    recorded = Recorded(
        asked,
        response,
        t["loss_mask"],
        vocabulary,
        None if t.top is None else t.top.token_ids,
        None if t.top is None else t.top.log_probs,
    )
    return {
        "prompt_id": t.prompt_id,
        "prompt": (prompt.messages or prompt.text) if same else str(tokenizer.decode(asked.tolist())),
        **({"tools": prompt.tools} if same and prompt.tools else {}),
        "response": [message for turn in t.turns for message in turn.messages] if t.turns else t.text,
        "reward": t.reward,
        **({"part": t.part} if t.part else {}),
        **recorded.columns(),
    }


def summary(kept: int, left_out: Counter[str]) -> str:
    """Return a line that says how many samples were kept, out of how many, and why the others were left out."""
    reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.most_common())
    total = kept + left_out.total()
    return f"demonstrations: {kept} of {total} responses are kept" + (f"; left out: {reasons}" if reasons else "")


def _length(sample: Sample) -> int:
    return sum(t.response_length for t in sample)
