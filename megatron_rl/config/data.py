"""Keys of data, batches, rewards and evaluation."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_rl.config.conditions import only_with, read_by
from megatron_rl.config.section import (
    Count,
    Fraction,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Secret,
    SetName,
    section,
)


@section
class DataConfig:
    """Prompts, their rewards and the order in which they come."""

    task: str = "file"
    """file | hub | gsm8k | retool | verify_if | reasoning_gym:NAME | number_sorting | number_zigzag | sums | openenv |
    verifiers:NAME, or your own task as module:name or path/to/file.py:name."""
    path: str | None = None
    """file: a .jsonl or .parquet file; hub: a Hugging Face data set name or folder; gsm8k, retool and verify_if: either, or
    without it rows that they generate."""
    eval_path: str | None = None
    """Like path, for the held-out prompts; without it they are split off from path by hash, disjoint from training. gsm8k and
    retool: also aime24 and aime25."""
    prompt_key: str = "prompt"
    answer_key: str = "answer"
    response_key: str = "response"
    """Column of demonstrations, for `megatron-rl sft`, and of responses with a score or a label."""
    text_key: str = "text"
    """Column of texts to learn whole, for `megatron-rl sft` (continued pretraining), in rows without response_key. What is
    longer than rollout.context_length is cut into pieces."""
    tokens_key: str | None = "response_tokens"
    """Column of a response's tokens, beside prompt_tokens, loss_mask and tokenizer, in the rows that rollout.demonstrations
    writes: `megatron-rl sft` learns them as they are. null: the texts are learned, as by another tokenizer."""
    tools_key: str | None = "tools"
    """Column of the tools that a prompt tells of, beside those of agent.tools: their schemas in OpenAI's form, as a list or as
    JSON. null: the column is left aside."""
    chosen_key: Annotated[str, read_by("reward", "dpo")] = "chosen"
    """Preferences: column of the better response, beside rejected_key."""
    rejected_key: Annotated[str, read_by("reward", "dpo")] = "rejected"
    margin_key: Annotated[str, read_by("reward", "dpo")] = "margin"
    """Preferences: column with by how much the chosen one is better; it may be missing."""
    responses_key: Annotated[str, read_by("reward", "dpo")] = "responses"
    """Preferences: column of several responses to one prompt; without scores_key they stand in order, the best first."""
    scores_key: Annotated[str, read_by("reward", "dpo")] = "scores"
    """Preferences: column of a number for each of the responses."""
    score_key: Annotated[str, read_by("reward", "dpo")] = "score"
    """Preferences: column of the number that response_key has."""
    label_key: Annotated[str, read_by("reward", "dpo")] = "label"
    """Preferences: column of whether response_key is good: true or false, or 1 or 0."""
    steps_key: Annotated[str, read_by("reward", "dpo")] = "steps"
    """Preferences: column of a response as a list of its steps, beside labels_key."""
    labels_key: Annotated[str, read_by("reward", "dpo")] = "labels"
    """Preferences: column of a number, or true or false, for each of the steps."""
    step_separator: Annotated[str, read_by("reward", "dpo")] = "\n"
    """Preferences: what each step ends with; it is added where it is missing."""
    template: str = "{prompt}"
    """Text around a prompt; {prompt} is replaced."""
    chat: bool = False
    """Apply the tokenizer's chat template, the prompt being the user's message."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the task itself (for reasoning_gym: those of the data set)."""
    verifier: str | None = None
    """exact | math | number_list | code (tests in the answer's column, run in the sandbox) | instructions (IFEval's and
    IFBench's) | none (prompts without answers, for rewards.models), or a function (response, answer) of your own as
    module:name or path/to/file.py:name; by default exact for file and hub, else the task's own."""
    prepare: str | None = None
    """A function of your own, as module:name or path/to/file.py:name, that is given each row of a file or a data set and
    returns it with the columns wanted here, or None to leave it out."""
    rewards: Annotated[dict[str, float], read_by("train", "sample")] = dataclasses.field(default_factory=dict)
    """Weights of the named reward parts; by default 1.0 for each part that the task lists as its main one."""
    seed: int = 0
    """Order of the prompts, and the procedural tasks' generator."""


@section
class BatchConfig:
    """Sizes of a step."""

    prompts_per_step: Positive = 32
    """Different prompts asked in one step, over all data-parallel ranks."""
    samples_per_prompt: Annotated[Positive, read_by("train", "sample")] = 8
    """Responses to each prompt: the group of the group-relative baselines."""
    updates_per_step: Annotated[Positive, read_by("train")] = 1
    """Optimizer updates that one pass over a rollout batch is (1 = on-policy; n = the papers' off-n)."""
    epochs: Positive = 1
    """Passes over a rollout batch (PPO's epochs), each in updates_per_step updates of the same parts: a step has
    updates_per_step x epochs. Old log-probs, values, advantages, weights of the correction and routes are those from before
    the first."""
    tokens_per_micro_batch: Positive = 8192
    """Token budget of one packed forward-backward, per data-parallel rank."""

    @property
    def responses(self) -> int:
        """Responses of a step."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def updates(self) -> int:
        """Optimizer updates of a step."""
        return self.updates_per_step * self.epochs


@section
class ScorerConfig:
    """A reward model that scores the responses of reinforcement learning, one of rewards.models."""

    path: str | None = None
    """Hugging Face folder of a classifier with one label, such as `megatron-rl reward` writes. Without an address the trainer's
    processes score by it, on their own layout, and it has the policy's tokenizer."""
    address: str | None = None
    """An SGLang server (http://host:port) that serves it (--is-embedding). With a path that folder's tokenizer and chat
    template make what it is sent, else the policy's tokens are."""
    api_key: Secret | None = None
    """Where the key of that server is: env:NAME or file:PATH."""
    shift: float = 0.0
    """Subtracted from a score; then it is divided by scale."""
    scale: PositiveFloat = 1.0
    normalize: bool = False
    """Subtract the mean of all scores of the run so far, and divide by their standard deviation; not in evaluations."""
    clip: PositiveFloat | None = None
    """Largest absolute value of a score, after all that; not in evaluations."""
    sigmoid: bool = False
    """Take the logistic function of a score before all that: of a model that has learned by cross_entropy, a probability."""
    steps: bool = False
    """Process rewards: the model, which has learned from data.steps_key, scores each step of a response by the value behind its
    last token. Steps end with the separator that the model has learned with."""
    step_separator: Annotated[Annotated[str, Field(min_length=1)] | None, only_with(".steps")] = None
    """steps: what ends a step, where the model's folder does not say so itself (reward_step_separator in its config.json)."""
    step_placement: Annotated[Literal["tokens", "response"], only_with(".steps")] = "tokens"
    """steps: tokens: rewards lie where steps end. gae and reinforce_plus_plus get each at its step's last token; grpo adds to a
    token's advantage the sum of the scores of its step and of those behind it, each normalized over all steps of the responses
    to the prompt (dr_grpo: without the division). response: one number is a part of the response's reward, as of any model."""
    step_aggregation: Annotated[Literal["min", "mean", "last", "product"], only_with(".steps")] = "min"
    """steps: that number; with tokens it is logged, and evaluations have it. 0 where there is no step."""


@section
class JudgeConfig:
    """A language model that says how good a response is, one of rewards.judges. What it gives no verdict on does not train."""

    address: str = ""
    """An OpenAI-compatible server, as its clients take it (base_url): http://host:port/v1 or https://host/v1."""
    model: str = ""
    """The model's name there."""
    api_key: Secret | None = None
    """Key of that server, as env:NAME or file:PATH."""
    prompt: str = (
        "How good is the response to the prompt? Is it correct, complete and to the point?\n{prompt}{response}"
    )
    """The question. {response} is replaced by the response, {prompt} by the prompt, {answer} by the expected answer, each
    fenced off as data. How the judge has to write its verdict is added."""
    scale: tuple[float, float] = (0.0, 10.0)
    """The worst and the best verdict, which become 0 and 1. Another number is none."""
    pattern: str | None = None
    """A regular expression that has to match the whole verdict, with one group: the number. null: the verdict is a number."""
    json_key: str | None = None
    """Instead: the verdict is a JSON object with the number under this key."""
    thinking: bool = False
    """Show the judge the response's thinking too, and not only what stands behind </think>."""
    temperature: NonNegativeFloat = 0.0
    max_tokens: Positive = 1024
    """Most tokens of its reply, its own thinking included; one that is cut off has no verdict."""
    votes: Positive = 1
    """Replies whose verdicts are averaged; with a temperature above 0 they differ."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """More keys of the request, such as {reasoning_effort: low}; null takes one of the others out."""
    cache: Count = 100_000
    """Scores that are kept, in memory and in the run's folder: the same response to the same prompt is judged once."""
    concurrency: Positive = 32
    """Requests in flight per data-parallel leader."""
    timeout_s: PositiveFloat = 120.0
    """Longest wait for a reply."""
    retries: Count = 2
    """Attempts after the first, with a growing pause, where the server does not answer or its reply has no verdict."""
    max_failures: Fraction = 0.5
    """Largest share of a leader's responses of a step, or of an evaluation, without a verdict; above it the run stops."""


@section
class RewardsConfig:
    """Reward parts beside the task's own. They weigh 1.0 unless data.rewards says otherwise."""

    models: dict[str, ScorerConfig] = dataclasses.field(default_factory=dict)
    """Reward models by the names of their parts: {helpful: {path: runs/reward/hf}}."""
    judges: dict[str, JudgeConfig] = dataclasses.field(default_factory=dict)
    """Judges by the names of their parts: {polite: {address: "http://host:30000/v1", model: NAME}}."""
    overlong_buffer: Count = 0
    """Part `overlong` (DAPO, eq. 13): from 0 down to -1 over the last so many of rollout.max_new_tokens. 0: there is none."""
    clip: PositiveFloat | None = None
    """Largest absolute value of a response's whole reward, as advantages see it."""
    whiten: bool = False
    """Advantages see rewards of mean 0 and deviation 1 over the step's responses."""
    timeout_s: PositiveFloat = 120.0
    """Longest wait for a server's answer; it is asked three times."""


@section
class EvalSetConfig:
    """One of eval.sets. What is not given is as in the section data; of another task, as that section is by default."""

    path: str | None = None
    """Like data.eval_path: all of its rows are held out. null: the held-out prompts of the section data, or of the task."""
    task: str | None = None
    """null: data.task."""
    verifier: str | None = None
    prompt_key: str | None = None
    answer_key: str | None = None
    response_key: str | None = None
    template: str | None = None
    chat: bool | None = None
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the task; of data.task beside those of data.options, which they come before."""
    rewards: dict[str, float] | None = None
    """Like data.rewards."""
    prompts: Positive | None = None
    """Most prompts of the set; by default eval.prompts."""
    samples: Positive | None = None
    """null: eval.samples. eval.pass_at counts as far as it is not above it."""
    greedy: bool | None = None
    """null: eval.greedy."""


@section
class EvalConfig:
    """Evaluation on held-out prompts; in SFT, the likelihood of their demonstrations, or of held-out texts."""

    every: Count = 0
    """Steps between evaluations; 0 evaluates before the first step and after the last."""
    prompts: Count = 200
    likelihood: bool = False
    """`megatron-rl eval` prints loss, perplexity and bits per byte of held-out demonstrations or texts, as SFT's evaluations
    do, from the trainer's own passes: no engine is started, and nothing is sampled."""
    samples: Annotated[Positive, read_by("train", "sample")] = 4
    """Responses to each prompt at the sampling temperature, for avg@n and pass@n."""
    pass_at: Annotated[list[Positive], read_by("train", "sample")] = dataclasses.field(default_factory=list)
    """Also pass@k for these k, each below samples."""
    greedy: Annotated[bool, read_by("train", "sample")] = True
    """Also one greedy response to each prompt."""
    sets: dict[SetName, EvalSetConfig] = dataclasses.field(default_factory=dict)
    """Several sets of held-out prompts by name, such as {aime24: {path: aime24, samples: 32}}: each has metrics of its own,
    eval/NAME/score and so on, and none of its prompts is trained on. The held-out prompts of the section data are evaluated
    beside them where data.eval_path is set; else eval/score (in SFT eval/loss) is the mean over the sets."""
    unpruned: Annotated[bool, read_by("train", "sample")] = False
    """With pruning.enabled: also the scores of the whole, unpruned policy (eval/score_unpruned), so that runs with and without
    pruning compare by one sampler. It samples everything a second time."""

    @property
    def most_samples(self) -> int:
        """Responses to a prompt of the set that has most."""
        return max(self.samples, *(one.samples or 0 for one in self.sets.values()), 0)
