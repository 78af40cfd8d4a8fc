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
    """Prompts, their verifiers and the order of the prompts."""

    task: str = "file"
    """Task that supplies the prompts: file | hub | gsm8k | retool | verify_if | reasoning_gym:NAME | number_sorting |
    number_zigzag | sums | openenv | verifiers:NAME, or a task of your own as module:name or path/to/file.py:name."""
    path: str | None = None
    """Source of the rows. For task `file`: a .jsonl or .parquet file; for `hub`: the name or folder of a Hugging Face
    data set; for `gsm8k`, `retool` and `verify_if`: either of these, or null for rows that the task generates."""
    eval_path: str | None = None
    """Source of the held-out prompts, in the same form as path. null: a hash of each prompt of path decides whether the
    prompt is held out or trained on. gsm8k and retool also accept aime24 and aime25."""
    prompt_key: str = "prompt"
    """Column of the prompt."""
    answer_key: str = "answer"
    """Column of the expected answer."""
    response_key: str = "response"
    """Column of the demonstrated response (`megatron-rl sft`), or of the response that has a score or a label
    (`megatron-rl reward`, `megatron-rl dpo`)."""
    text_key: str = "text"
    """Column of texts that `megatron-rl sft` trains on as a whole (continued pretraining), for rows without
    response_key. Texts longer than rollout.context_length are cut into pieces."""
    tokens_key: str | None = "response_tokens"
    """Column of a response's token ids, in rows that rollout.demonstrations has written (with the columns
    prompt_tokens, loss_mask and tokenizer). `megatron-rl sft` trains on these tokens without tokenizing again. null:
    train on the texts, for example with another tokenizer."""
    tools_key: str | None = "tools"
    """Column of the tools that a row's prompt offers in addition to agent.tools: OpenAI tool schemas, as a list or as
    JSON. null: ignore the column."""
    chosen_key: Annotated[str, read_by("reward", "dpo")] = "chosen"
    """Preferences: column of the better response, used with rejected_key."""
    rejected_key: Annotated[str, read_by("reward", "dpo")] = "rejected"
    """Preferences: column of the worse response."""
    margin_key: Annotated[str, read_by("reward", "dpo")] = "margin"
    """Preferences: optional column of the margin by which the chosen response is better."""
    responses_key: Annotated[str, read_by("reward", "dpo")] = "responses"
    """Preferences: column of several responses to one prompt. Without scores_key, the list must be in order, the best
    first."""
    scores_key: Annotated[str, read_by("reward", "dpo")] = "scores"
    """Preferences: column of the scores of `responses_key`, one number per response."""
    score_key: Annotated[str, read_by("reward", "dpo")] = "score"
    """Preferences: column of a number, the score of the response in response_key."""
    label_key: Annotated[str, read_by("reward", "dpo")] = "label"
    """Preferences: column of the label of the response in response_key: true or 1 for a good response, false or 0 for a
    bad one."""
    steps_key: Annotated[str, read_by("reward", "dpo")] = "steps"
    """Preferences: column of a response as a list of steps, used with labels_key."""
    labels_key: Annotated[str, read_by("reward", "dpo")] = "labels"
    """Preferences: column of the labels of the steps. Each label is a number, true or false."""
    step_separator: Annotated[str, read_by("reward", "dpo")] = "\n"
    """Preferences: text at the end of each step; steps that lack this text get it."""
    template: str = "{prompt}"
    """Text around each prompt; {prompt} is replaced by the prompt."""
    chat: bool = False
    """Apply the tokenizer's chat template, with the prompt as the user's message."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the task; for reasoning_gym, options of its data set."""
    verifier: str | None = None
    """Verifier that scores responses: exact | math | number_list | code | instructions | none, or a function (response,
    answer) of your own as module:name or path/to/file.py:name. `code` runs the tests in the answer column in the
    sandbox; `instructions` checks the instructions of IFEval and IFBench; `none` is for prompts without answers, with
    rewards.models. null: exact for the tasks file and hub, and the task's own verifier for all others."""
    prepare: str | None = None
    """Function of your own, as module:name or path/to/file.py:name, that converts each row of a file or data set. The
    function returns the row with the columns described here, or None to drop the row."""
    rewards: Annotated[dict[str, float], read_by("train", "sample")] = dataclasses.field(default_factory=dict)
    """Weights of the reward parts, by name. By default each main part of the task has weight 1.0."""
    seed: int = 0
    """Seed of the order of the prompts, and of prompts that a task generates."""


@section
class BatchConfig:
    """Sizes of a step."""

    prompts_per_step: Positive = 32
    """Number of different prompts of a step, over all data-parallel ranks."""
    samples_per_prompt: Annotated[Positive, read_by("train", "sample")] = 8
    """Number of responses to each prompt. The responses to a prompt form a group, which group-relative advantages
    compare."""
    updates_per_step: Annotated[Positive, read_by("train")] = 1
    """Number of optimizer updates in one pass over a rollout batch (1 = on-policy; n = "off-n" in papers)."""
    epochs: Positive = 1
    """Number of passes over a rollout batch (PPO's epochs). Each pass makes updates_per_step updates with the same
    split of the batch, so a step has updates_per_step x epochs updates. Old log-probs, values, advantages, correction
    weights and routes are computed once, before the first update."""
    tokens_per_micro_batch: Positive = 8192
    """Token budget of one packed micro-batch, per data-parallel rank."""

    @property
    def responses(self) -> int:
        """Number of responses of a step."""
        return self.prompts_per_step * self.samples_per_prompt

    @property
    def updates(self) -> int:
        """Number of optimizer updates of a step."""
        return self.updates_per_step * self.epochs


@section
class ScorerConfig:
    """A reward model that scores responses in reinforcement learning; an entry of rewards.models."""

    path: str | None = None
    """Hugging Face folder of a classifier with one label, such as `megatron-rl reward` writes. Without `address` the
    trainer's processes run the model in their own parallel layout, and it must have the policy's tokenizer."""
    address: str | None = None
    """SGLang server of the reward model (http://host:port, started with --is-embedding). If `path` is set too, the
    requests use the tokenizer and chat template of that folder; otherwise the server gets the policy's tokens."""
    api_key: Secret | None = None
    """Reference to the API key of the server at `address`: env:NAME or file:PATH."""
    shift: float = 0.0
    """Number that is subtracted from a score before the division by `scale`."""
    scale: PositiveFloat = 1.0
    """Number by which a score is divided, after `shift`."""
    normalize: bool = False
    """Subtract from each score the mean of all scores of the run so far, and divide by their standard deviation.
    Evaluations do not normalize."""
    clip: PositiveFloat | None = None
    """Largest absolute value of a score after shift, scale and normalize. Evaluations do not clip. null: no limit."""
    sigmoid: bool = False
    """Apply the logistic function to a score before shift and scale. The score of a model trained with cross_entropy
    becomes a probability."""
    steps: bool = False
    """Use the model for process rewards: the score of each step of a response is the model's value after the step's
    last token. The model must be trained with data.steps_key; steps end with the separator that the model was trained
    with."""
    step_separator: Annotated[Annotated[str, Field(min_length=1)] | None, only_with(".steps")] = None
    """steps: text that ends a step, if the model's folder does not name it (reward_step_separator in config.json)."""
    step_placement: Annotated[Literal["tokens", "response"], only_with(".steps")] = "tokens"
    """steps: use of the step scores. `tokens`: gae and reinforce_plus_plus get each score as a reward of the last token
    of its step. grpo and dr_grpo add to the advantage of each token the normalized scores of its own step and of all
    later steps. Scores are normalized over all steps of the responses to the prompt (dr_grpo: without the division by
    the standard deviation). `response`: one number (step_aggregation) becomes part of the response's reward, as with
    any reward model."""
    step_aggregation: Annotated[Literal["min", "mean", "last", "product"], only_with(".steps")] = "min"
    """steps: function that reduces the step scores to one number, for placement `response`, for evaluations and for the
    log. A response without steps gets 0."""


@section
class JudgeConfig:
    """A language model that grades responses; an entry of rewards.judges. Each grade is called a verdict.

    Responses without a verdict are not trained on.
    """

    address: str = ""
    """Address of an OpenAI-compatible server, as OpenAI clients take it (base_url): http://host:port/v1 or
    https://host/v1."""
    model: str = ""
    """Name of the model on the server."""
    api_key: Secret | None = None
    """Reference to the API key of the server: env:NAME or file:PATH."""
    prompt: str = (
        "How good is the response to the prompt? Is it correct, complete and to the point?\n{prompt}{response}"
    )
    """Question to the judge. {response} is replaced by the response, {prompt} by the prompt and {answer} by the
    expected answer. Each of these texts is marked as data. Instructions for the format of the verdict (the judge's
    grade) are appended."""
    scale: tuple[float, float] = (0.0, 10.0)
    """Worst and best verdict, which are mapped to 0 and 1. A number outside of this range is no verdict."""
    pattern: str | None = None
    """Regular expression that must match the whole verdict. Its one group must be the number. null: the verdict is a
    number."""
    json_key: str | None = None
    """Instead of pattern: the verdict is a JSON object with the number under this key."""
    thinking: bool = False
    """Show the judge the response's thinking too, not only the text after </think>."""
    temperature: NonNegativeFloat = 0.0
    """Sampling temperature of the judge."""
    max_tokens: Positive = 1024
    """Largest number of tokens of the judge's reply, its thinking included. A reply that is cut off has no verdict."""
    votes: Positive = 1
    """Number of replies whose verdicts are averaged. Replies differ only if temperature is above 0."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further keys of the request, such as {reasoning_effort: low}. The value null removes a key that is sent by
    default."""
    cache: Count = 100_000
    """Number of verdicts kept in memory and in the run's folder. The same response to the same prompt is not judged
    again while its verdict is kept."""
    concurrency: Positive = 32
    """Number of requests in flight per data-parallel rank."""
    timeout_s: PositiveFloat = 120.0
    """Longest wait for a reply, in seconds."""
    retries: Count = 2
    """Number of further attempts, with growing pauses, if the server does not answer or its reply has no verdict."""
    max_failures: Fraction = 0.5
    """Largest share of responses without a verdict, among a data-parallel rank's responses of a step or an evaluation.
    If the share is larger, the run stops."""


@section
class RewardsConfig:
    """Reward parts in addition to the task's own. Their weight is 1.0 unless data.rewards sets another."""

    models: dict[str, ScorerConfig] = dataclasses.field(default_factory=dict)
    """Reward models by the names of their reward parts, such as {helpful: {path: runs/reward/hf}}."""
    judges: dict[str, JudgeConfig] = dataclasses.field(default_factory=dict)
    """Judges by the names of their reward parts, such as {polite: {address: "http://host:30000/v1", model: NAME}}."""
    overlong_buffer: Count = 0
    """Length penalty (DAPO, eq. 13): number of tokens at the end of rollout.max_new_tokens over which the penalty falls
    from 0 to -1. The penalty is logged as reward part `overlong`. 0: no penalty."""
    clip: PositiveFloat | None = None
    """Largest absolute value of a response's total reward when advantages are computed. null: no limit."""
    whiten: bool = False
    """Scale rewards to mean 0 and standard deviation 1 over the step's responses before advantages are computed."""
    timeout_s: PositiveFloat = 120.0
    """Longest wait for the answer of a reward model's server, in seconds; each request is tried three times."""


@section
class EvalSetConfig:
    """One entry of eval.sets. A key that is not set takes its value from the section data.

    If the set's task differs from data.task, such a key has the default of the section data instead.
    """

    path: str | None = None
    """Source of the set's rows, in the same form as data.eval_path. All rows are held out. null: the held-out prompts
    of the section data, or of the task."""
    task: str | None = None
    """Task of the set; null: data.task."""
    verifier: str | None = None
    """Verifier of the set; null: data.verifier (with another task: that task's default)."""
    prompt_key: str | None = None
    """Column of the prompt; null: data.prompt_key."""
    answer_key: str | None = None
    """Column of the expected answer; null: data.answer_key."""
    response_key: str | None = None
    """Column of the demonstrated response; null: data.response_key."""
    template: str | None = None
    """Text around each prompt; null: data.template."""
    chat: bool | None = None
    """Apply the tokenizer's chat template; null: data.chat."""
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the task. If the task is data.task, these options are added to data.options and override them."""
    rewards: dict[str, float] | None = None
    """Weights of the reward parts, as in data.rewards."""
    prompts: Positive | None = None
    """Largest number of prompts of the set; null: eval.prompts."""
    samples: Positive | None = None
    """Number of responses to each prompt; null: eval.samples. Values of eval.pass_at above this number are not reported
    for the set."""
    greedy: bool | None = None
    """Also sample one greedy response; null: eval.greedy."""


@section
class EvalConfig:
    """Evaluation on held-out prompts. In SFT: the likelihood of held-out demonstrations or texts."""

    every: Count = 0
    """Number of steps between evaluations. 0: evaluate only before the first step and after the last."""
    prompts: Count = 200
    """Largest number of held-out prompts; 0: no evaluation."""
    likelihood: bool = False
    """true: `megatron-rl eval` prints loss, perplexity and bits per byte of held-out demonstrations or texts, like the
    evaluations of SFT. The trainer computes these numbers; no SGLang server is started, and nothing is sampled."""
    samples: Annotated[Positive, read_by("train", "sample")] = 4
    """Number of responses to each prompt at the sampling temperature, for avg@n and pass@n."""
    pass_at: Annotated[list[Positive], read_by("train", "sample")] = dataclasses.field(default_factory=list)
    """Further values k for which pass@k is reported, each at most samples."""
    greedy: Annotated[bool, read_by("train", "sample")] = True
    """Also sample one greedy response to each prompt."""
    sets: dict[SetName, EvalSetConfig] = dataclasses.field(default_factory=dict)
    """Several sets of held-out prompts by name, such as {aime24: {path: aime24, samples: 32}}. Each set has its own
    metrics (eval/NAME/score and so on). The prompts of all sets are excluded from training. If data.eval_path is set,
    the held-out prompts of the section data are evaluated too; otherwise eval/score (in SFT eval/loss) is the mean over
    the sets."""
    unpruned: Annotated[bool, read_by("train", "sample")] = False
    """With pruning.enabled: also report the scores of the unpruned policy (eval/score_unpruned). Runs with and without
    vocabulary pruning can then be compared with the same sampler. Each evaluation samples everything a second time."""

    @property
    def most_samples(self) -> int:
        """Largest number of responses to a prompt over all sets."""
        return max(self.samples, *(one.samples or 0 for one in self.sets.values()), 0)
