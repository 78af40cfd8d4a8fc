"""Every knob of megatron_rl: one tree of frozen dataclasses. `megatron_rl.config_file` reads it.

Sizes are given once, in prompts and samples (`batch`); everything else is derived from them in `megatron_rl.launch.plan` and
printed at the start of a run.
"""

from __future__ import annotations

import dataclasses
import math
import re
import unicodedata
from pathlib import Path
from typing import Annotated, Any, Literal, cast, dataclass_transform

from pydantic import AfterValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError


@dataclass_transform(frozen_default=True, kw_only_default=True)
def section[T](cls: type[T]) -> type[T]:
    """A part of the tree: a frozen dataclass whose values are checked. Its numbers are finite."""
    made = dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid", allow_inf_nan=False))(cls)
    return cast("type[T]", made)  # pydantic names a type of its own


Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Secret = Annotated[str, Field(pattern=r"^(env|file):.+")]
"""Where a secret is: env:NAME or file:PATH (credentials.py)."""


def _run_name(name: str) -> str:
    """It becomes a folder below runs_dir. Whatever else it becomes a part of has to quote it."""
    parts = name.split("/")
    odd = any(unicodedata.category(sign) in ("Cc", "Cs") for sign in name)  # controls, and halves of surrogate pairs
    if odd or len(name.encode()) > 200 or any(not p or p != p.strip() or p.startswith((".", "-")) for p in parts):
        raise PydanticCustomError(
            "run_name",
            "a run's name has at most 200 bytes and no control characters; / makes folders of runs, and no part between them is"
            " empty, begins with . or -, or has a blank at an end",
        )
    return name


def job_name(name: str) -> str:
    """A run's name as that of a job and of its logs: SLURM has an own meaning for some signs, whoever quotes them."""
    return re.sub(r"[^\w .()+=,@-]", "-", name)


RunName = Annotated[str, AfterValidator(_run_name)]


def _set_name(name: str) -> str:
    """It stands between eval/ and the names of metrics, and between dots on the command line."""
    if not re.fullmatch(r"\w[\w+-]*", name) or name in ("agent", "reward"):
        raise PydanticCustomError(
            "set_name",
            "a set's name has letters, digits and any of _-+, begins with a letter, a digit or _, and is not agent or reward,"
            " whose metrics are other things'",
        )
    return name


SetName = Annotated[str, AfterValidator(_set_name)]


@section
class ModelConfig:
    """The policy model, its kernels and its memory."""

    path: str = ""
    """Hugging Face folder: config.json, safetensors, tokenizer. It is read at the start and never written. Or an id of the hub:
    owner/name, or owner/name@revision (branch, tag or commit), which is downloaded; the run keeps to the commit it meant. So
    can other models be given."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Activation recomputation (Megatron's recompute_granularity; full recomputes every layer)."""
    flash_attention: Literal["torch", "auto", "FA3", "FA4"] = "torch"
    """The attention kernel on GPUs, in bf16. torch: its own, FlashAttention 2. auto: FlashAttention 4 (the package
    flash-attn-4) where it is installed and takes the model's heads on this GPU, else torch's. FA4: FlashAttention 4 or no
    run. FA3: FlashAttention 3, which torch then takes in the place of its own."""
    kernels: Literal["compiled", "any"] = "compiled"
    """On GPUs: compiled refuses to start where our CUDA kernels cannot run; any takes plain torch there, which is slower."""
    head_chunk_tokens: Positive = 2048
    """Tokens whose logits exist at a time: the head's memory is this times the vocabulary."""
    moe_dispatcher: Literal["alltoall", "allgather", "flex"] = "alltoall"
    """How tokens reach their experts; flex needs DeepEP."""
    moe_router_fusion: bool = False
    """Transformer Engine's fused router (GPUs); it knows no replay, so it goes with routing.source = none alone."""
    moe_aux_loss: NonNegativeFloat = 0.0
    """Coefficient of the load-balancing loss of each MoE layer; RL usually keeps it at 0, SFT of a fresh router does not. It is
    a mean over all tokens, prompts included; docs/how-it-works.md has the formula, and how Hugging Face's differs."""
    moe_z_loss: NonNegativeFloat = 0.0
    """Coefficient of the routers' z-loss, the mean over all tokens of logsumexp(logits)^2 in each MoE layer (ST-MoE: 1e-3)."""
    moe_bias_update_rate: NonNegativeFloat = 0.0
    """Balance without a loss, of models whose routers have a bias for each expert (DeepSeek-V3: 1e-3): after each update the
    biases of experts with more than the mean load fall by so much, and the others rise. Not in RL."""
    freeze: list[str] = dataclasses.field(default_factory=list)
    """Weights that are not trained: glob patterns over the names of Megatron's parameters (of its layers without Transformer
    Engine), such as *.self_attention.*, *.mlp.router.*, *.softmax_offset, decoder.layers.0.*, embedding.*. They have no
    gradient and no optimizer state, and are pushed and saved like the others."""
    keep_zeros: bool | list[str] = False
    """Weights that are zero when training starts stay zero, as those that `megatron-rl prune` has removed: in all linear layers
    of attention, MLPs and experts, or in those whose names match these patterns (as of freeze). Not those of a critic."""
    attention_sinks: Literal["exact", "ignored"] = "exact"
    """For experiments. ignored: the trainer's attention leaves the model's sinks out, as a kernel that knows none does; they
    stay in the model as they are, without a gradient, and the engine goes on using them."""


@section
class LoRAConfig:
    """Low-rank adapters, which are trained in the place of the model's weights: by SFT, DPO, reward models and RL alike."""

    rank: Count = 0
    """Rank r of each adapter, B A with A [r, in] and B [out, r]; 0: there are none, and all weights are trained."""
    alpha: PositiveFloat = 32.0
    """What an adapter adds to a layer is alpha / rank x B A x."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share of an adapter's inputs that an update leaves out. In RL the policy that samples has none: keep it at 0 there."""
    targets: list[str] = dataclasses.field(
        default_factory=lambda: ["*.self_attention.linear_*", "*.mlp.linear_fc*", "*.mlp.*experts.*linear_fc*"]
    )
    """Linear layers that get an adapter: glob patterns over the names of their weights, as those of model.freeze. By default
    all of attention and experts; *.mlp.router.* adds the routers."""
    kind: Literal["lora", "dora"] = "lora"
    """lora (Hu et al. 2021), or dora (Liu et al. 2024): the length of each row of the weights is trained by itself."""
    path: str | None = None
    """Folder in PEFT's format whose adapters these start as. By default B is zero: the policy starts as the model itself."""


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
    chosen_key: str = "chosen"
    """Preferences: column of the better response, beside rejected_key."""
    rejected_key: str = "rejected"
    margin_key: str = "margin"
    """Preferences: column with by how much the chosen one is better; it may be missing."""
    responses_key: str = "responses"
    """Preferences: column of several responses to one prompt; without scores_key they stand in order, the best first."""
    scores_key: str = "scores"
    """Preferences: column of a number for each of the responses."""
    score_key: str = "score"
    """Preferences: column of the number that response_key has."""
    label_key: str = "label"
    """Preferences: column of whether response_key is good: true or false, or 1 or 0."""
    steps_key: str = "steps"
    """Preferences: column of a response as a list of its steps, beside labels_key."""
    labels_key: str = "labels"
    """Preferences: column of a number, or true or false, for each of the steps."""
    step_separator: str = "\n"
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
    rewards: dict[str, float] = dataclasses.field(default_factory=dict)
    """Weights of the named reward parts; by default 1.0 for each part that the task lists as its main one."""
    seed: int = 0
    """Order of the prompts, and the procedural tasks' generator."""


@section
class BatchConfig:
    """Sizes of a step."""

    prompts_per_step: Positive = 32
    """Different prompts asked in one step, over all data-parallel ranks."""
    samples_per_prompt: Positive = 8
    """Responses to each prompt: the group of the group-relative baselines."""
    updates_per_step: Positive = 1
    """Optimizer updates that one pass over a rollout batch is (1 = on-policy; n = the papers' off-n)."""
    epochs: Positive = 1
    """Passes over a rollout batch (PPO's epochs), each in updates_per_step updates of the same parts: a step has
    updates_per_step x epochs. Old log-probs, values, advantages, weights of the correction and routes are those from before
    the first."""
    tokens_per_micro_batch: Positive = 8192
    """Token budget of one packed forward-backward, per data-parallel rank."""

    @property
    def updates(self) -> int:
        """Optimizer updates of a step."""
        return self.updates_per_step * self.epochs


@section
class KLConfig:
    """The penalty on the distance to a reference model."""

    coefficient: NonNegativeFloat = 0.0
    """Weight of the KL to the reference; 0 keeps no reference model."""
    estimator: Literal["k1", "k2", "k3"] = "k3"
    """What the KL of a token is estimated by in the loss; in the reward it is k1, log policy - log reference."""
    placement: Literal["loss", "reward"] = "loss"
    """loss: a term beside the policy's; reward: taken off the reward, at each token for advantages that go from token to token
    (gae, reinforce_plus_plus), else from the response's."""
    target: PositiveFloat | None = None
    """KL to the reference, nats per token, that the coefficient is moved to keep (Ziegler et al. 2019): after each step by up
    to 20 % of it times responses / horizon. It is that of the policy that sampled, on its own samples (kl/sampled). null: the
    coefficient is fixed."""
    horizon: Positive = 10_000
    """Responses in which the controller may move the coefficient by 20 %."""
    reference: str | None = None
    """Hugging Face folder of the reference; by default model.path."""


@section
class OptimizerConfig:
    """Adam, its schedule and where its state lies."""

    lr: PositiveFloat = 1e-6
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: PositiveFloat = 1e-8
    weight_decay: NonNegativeFloat = 0.0
    clip_grad: NonNegativeFloat = 1.0
    """Norm to which gradients are clipped; 0 does not clip."""
    warmup_steps: Count = 0
    """Optimizer updates over which the learning rate rises."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    min_lr_ratio: Fraction = 0.0
    """Learning rate at the end of the decay, as a share of lr."""
    decay_steps: Positive | None = None
    """Optimizer updates until the end of the decay; by default all updates of the run."""
    cpu_offload: Fraction = 0.0
    """Share of the optimizer's state (fp32 weights and moments, 12 bytes a parameter) that is kept in host memory and stepped
    by the CPU: 16 bytes a parameter there, none on the GPU. The rest of the model must train in 16 bits."""
    precision_aware: bool = False
    """Transformer Engine's Adam keeps only the 16 bits of the fp32 weights that the bf16 weights lack: the same numbers in 10
    bytes a parameter instead of 12."""
    moments: Literal["fp32", "bf16"] = "fp32"
    """Format of both moments of Adam; bf16 needs precision_aware, and makes 6 bytes a parameter of its 10."""


OF_TOKENS = ("gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
"""Advantages (algorithm.advantage) that go from token to token."""


@section
class AlgorithmConfig:
    """Advantages and the policy loss."""

    advantage: str = "grpo"
    """Of whole responses: grpo: (r - mean) / std over the responses to a prompt; dr_grpo: r - mean; rloo: r - mean of the
    others; tilt: group size x softmax of r / tilt_temperature (with loss: reinforce); or your own function by module:name. Of
    tokens: gae: PPO's, by the values of a critic (section critic); reinforce_plus_plus: rewards to come, whitened over the
    step; reinforce_plus_plus_baseline: the same of r - mean over the responses to a prompt."""
    gamma: Fraction = 1.0
    """Advantages of tokens: discount of a reward that comes one token later."""
    lam: Fraction = 0.95
    """gae: lambda, from 0 (one token and the next one's value) to 1 (all rewards to come)."""
    bootstrap_truncated: bool = True
    """gae: a response that a limit has ended would have gone on. true: in place of a score the value behind its last token
    stands for what would have come (part `overlong` counts); false: it is scored as it is, as a verifier scores it 0."""
    whiten: bool | None = None
    """Whether advantages are brought to mean 0 and deviation 1 over all tokens of a step; null: those of tokens are."""
    advantage_clip: PositiveFloat | None = None
    """Largest absolute value of an advantage, after all else that makes it. null: no limit."""
    tilt_temperature: PositiveFloat = 1.0
    """tilt: the beta of exp(r / beta): the smaller, the more counts the best response alone."""
    loss: str = "ppo"
    """ppo: PPO and GRPO's clipped token ratio; gspo: the sequence ratio; reinforce: no ratio; cispo: a clipped ratio as a
    weight, without gradient; sapo: a soft gate in the place of the clip; or your own by module:name."""
    clip_low: NonNegativeFloat | None = 0.2
    """The ratio is clipped below 1 - clip_low; null: it is not. GSPO's own are 3e-4 and 4e-4, of its ratio of sequences."""
    clip_high: NonNegativeFloat | None = 0.2
    """The ratio is clipped above 1 + clip_high; null: it is not. DAPO's clip-higher: a clip_high above clip_low."""
    tau_pos: PositiveFloat = 1.0
    """sapo: temperature of the gate where the advantage is above 0; the higher, the sooner a token counts less."""
    tau_neg: PositiveFloat = 1.05
    """sapo: temperature of the gate elsewhere."""
    aggregation: Literal["token_mean", "sequence_mean", "sequence_sum"] = "token_mean"
    """Mean over all tokens of the update; over sequences of each one's token mean; or over sequences of each one's token sum /
    rollout.max_new_tokens, a constant (Dr. GRPO, with advantage: dr_grpo; verl's seq-mean-token-sum-norm)."""
    target_kl: PositiveFloat | None = None
    """Early stopping: an update whose pass finds the policy further than this from the one that the step began with
    (loss/old_kl, nats per token) is left out, and with it the step's later ones. null: all are done. (kl.target is another
    thing.)"""
    entropy_coefficient: float = 0.0
    """Weight of the policy's entropy in the loss."""
    entropy_reward: NonNegativeFloat = 0.0
    """Maximum-entropy RL: each token's reward is larger by so much times -log of its probability, so that states from which
    many ways lead are worth more too; entropy_coefficient looks at each token by itself."""
    on_policy: bool = False
    """Claim that each update is of the very policy that sampled. The run stops before an update where a response, a server or
    the trainer has other weights than those that were pushed last, or where the loss's ratio is not exactly 1."""
    kl: KLConfig = KLConfig()


@section
class SFTConfig:
    """Supervised fine-tuning (`megatron-rl sft`)."""

    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Share e of each label that is spread evenly over the vocabulary: (1 - e) x the negative log-likelihood + e x the mean
    over all tokens of theirs, which keeps the model from certainty."""


@section
class RewardModelConfig:
    """Training of a reward model (`megatron-rl reward`): what is learned from the preferences of data.path."""

    loss: Literal["bradley_terry", "hinge", "squared_gap", "plackett_luce", "squared_error", "cross_entropy"] = (
        "bradley_terry"
    )
    """Of pairs and lists: bradley_terry: -log sigmoid of the difference; hinge: what the difference lacks of a margin;
    squared_gap: the squared error of the difference to a margin; plackett_luce: minus the log-likelihood of a list's order. Of
    single responses, and of steps (process rewards): squared_error to the score; cross_entropy to a label from 0 to 1, of
    which the model's number is the logit."""
    pooling: Literal["last", "mean"] = "last"
    """The response's score. last: the value behind its last token, as Hugging Face's classifiers have it; mean: the mean of
    the values behind each of its tokens."""
    margin: NonNegativeFloat | None = None
    """What the difference should be (hinge, squared_gap; by default 1), or what Bradley-Terry subtracts from it (by default 0).
    A pair's own column, data.margin_key, comes first."""
    center: NonNegativeFloat = 0.0
    """Weight of the mean of (chosen + rejected)^2, which keeps scores around 0."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """bradley_terry: conservative labels, as of conservative DPO: with this probability the rejected one is the better one."""
    top: Positive | None = None
    """plackett_luce: only the first so many places of a list count; 1: which response is the best."""


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
    step_separator: Annotated[str, Field(min_length=1)] | None = None
    """steps: what ends a step, where the model's folder does not say so itself (reward_step_separator in its config.json)."""
    step_placement: Literal["tokens", "response"] = "tokens"
    """steps: tokens: rewards lie where steps end. gae and reinforce_plus_plus get each at its step's last token; grpo adds to a
    token's advantage the sum of the scores of its step and of those behind it, each normalized over all steps of the responses
    to the prompt (dr_grpo: without the division). response: one number is a part of the response's reward, as of any model."""
    step_aggregation: Literal["min", "mean", "last", "product"] = "min"
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
class DPOConfig:
    """Direct preference optimization (`megatron-rl dpo`): what is learned from the preferences of data.path."""

    loss: Literal["sigmoid", "ipo", "hinge", "robust", "kto"] = "sigmoid"
    """sigmoid: DPO's own; ipo: the squared error of the difference to 1 / (2 beta); hinge: SLiC's; robust: sigmoid, unbiased
    where a share label_smoothing of the labels is wrong; kto: of single responses with a label, or of the two of a pair."""
    beta: PositiveFloat = 0.1
    """Weight of the KL to the reference that the loss stands for: a larger one keeps the policy nearer."""
    label_smoothing: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    """Share of the pairs that are taken to be labeled the wrong way round: with sigmoid conservative DPO."""
    length_normalized: bool = False
    """Mean log-ratio of a response's tokens instead of their sum."""
    sft_coefficient: NonNegativeFloat = 0.0
    """Weight of the chosen responses' negative log-likelihood, mean over their tokens, beside the loss."""
    desirable_weight: PositiveFloat = 1.0
    """kto: weight of the responses labeled as good."""
    undesirable_weight: PositiveFloat = 1.0
    reference: str | None = None
    """Hugging Face folder of the reference; by default model.path."""
    precompute_reference: bool = False
    """Score all responses by the reference before the first step, and keep it in memory no longer."""


@section
class CriticConfig:
    """The critic of PPO (algorithm.advantage: gae): a model of its own with a value head, on the trainer's ranks."""

    path: str | None = None
    """Hugging Face folder that it starts as: a reward model's, or a language model's; by default model.path. It has the
    policy's tokenizer."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """As the section optimizer, for the critic."""
    freeze: list[str] = dataclasses.field(default_factory=list)
    """As model.freeze, for the critic."""
    clip: PositiveFloat | None = 0.2
    """A value that is further than this from the one before the step's updates, and has gone there towards its return, has no
    gradient (PPO); null: no limit."""
    warmup_steps: Count = 0
    """First steps, in which the critic learns and the policy does not."""


@section
class DistillationConfig:
    """A teacher: of `megatron-rl sft` on demonstrations, and of `megatron-rl train` on what the model itself samples."""

    teacher: str | None = None
    """Hugging Face folder of the teacher, of any size and family, with the model's tokenizer. The trainer's processes run it,
    on their own layout. null: there is none."""
    address: str | None = None
    """In its place an SGLang server of the teacher (http://host:port), which tells the log-probs of what was sampled
    (placement: advantage)."""
    api_key: Secret | None = None
    """Where the key of that server is: env:NAME or file:PATH."""
    recorded: bool = False
    """In its place the log-probs that the demonstrations' rows have of it (rollout.demonstrations.top_log_probs): the loss is
    the divergence between the recorded tokens and one class for all others (sft; forward or reverse)."""
    placement: Literal["loss", "advantage"] = "loss"
    """loss: the divergence of both whole distributions at each token, computed in chunks. advantage (train): log teacher - log
    policy of the sampled token is added to its advantage, so that updates lower the reverse KL."""
    direction: Literal["forward", "reverse", "jensen_shannon"] = "forward"
    """loss: forward is KL(teacher || model); reverse is KL(model || teacher); jensen_shannon is both to their mixture (GKD)."""
    mix: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """jensen_shannon: the teacher's weight in the mixture."""
    temperature: PositiveFloat = 1.0
    """loss: what the logits of both are divided by. The divergence counts times its square (Hinton et al. 2015)."""
    coefficient: NonNegativeFloat = 1.0
    """Weight of what the teacher says."""
    feature_layers: list[tuple[Count, Count]] = dataclasses.field(default_factory=list)
    """Pairs of decoder layers, of the model and of the teacher, from 0, whose outputs are drawn together at the counted tokens;
    both models have to have the same hidden size."""
    feature_loss: Literal["mse", "cosine"] = "mse"
    """feature_layers: mean squared difference of the outputs, or 1 - cosine."""
    feature_coefficient: NonNegativeFloat = 1.0
    """Weight of the features' loss, a sum over the pairs of layers."""
    task_coefficient: NonNegativeFloat = 0.0
    """Weight of the rest: the likelihood of the demonstrations (sft), the advantages of the rewards (train); 0: the teacher
    alone is learned from, and rewards are measured."""


@section
class PruningConfig:
    """Dynamic vocabulary pruning, which leaves the vocabulary's tail out of the policy."""

    enabled: bool = False
    """Engine and trainer both take as the policy the tokens that are within rho of the likeliest one, renormalized, so that
    the vocabulary's tail is neither sampled nor learned from. The paper's veto is a key of its own: correction.veto: 1e-4."""
    rho: Annotated[float, Field(gt=0, le=1)] = math.exp(-13)
    """A token stays while its probability is at least rho times that of the likeliest; by default e^-13 = 2.26e-6."""
    engine_rho: Annotated[float, Field(gt=0, le=1)] | None = None
    """The engine's rho; null: the same. A larger one keeps the engine away from tokens outside the trainer's set."""
    measure: bool = False
    """Without enabled: log mismatch/kl_safe, of the sampled tokens that rho would leave in the trainer's set."""


@section
class CorrectionConfig:
    """The correction of the mismatch between the engine's log-probs and the trainer's."""

    mode: Literal["none", "truncate", "mask", "clip"] = "none"
    """Weight of a token in the loss, from its ratio r = trainer / engine. truncate (TIS): min(r, high); mask (MIS): r
    where low <= r <= high, else 0; clip: r clamped to [low, high]."""
    level: Literal["token", "sequence", "geometric"] = "token"
    """Which ratio counts: the token's, the whole response's, or the geometric mean over the response."""
    low: NonNegativeFloat | None = None
    """Lower bound of the ratio itself, so below 1: 0.8 for a threshold of 0.2."""
    high: PositiveFloat | None = None
    """Upper bound of the ratio itself, so above 1."""
    veto: Annotated[float, Field(gt=0, lt=1)] | None = None
    """A response with a token whose ratio is below this leaves the update; the paper's is 1e-4."""
    reject: Literal["none", "abs_log_ratio", "k2", "k3"] = "none"
    """Drop what is further from the engine than reject_above: abs_log_ratio = |log r|,
    k2 = (log r)^2 / 2, k3 = r - 1 - log r."""
    reject_level: Literal["token", "sequence", "geometric"] = "geometric"
    """Drop a token by its own statistic, or a response by the sum or the mean over its tokens."""
    reject_above: PositiveFloat | None = None
    """The largest value of the statistic that stays."""
    denominator: Literal["sampled", "kept_sequences", "kept_tokens", "weights"] = "kept_tokens"
    """What the loss is a mean over. sampled: all tokens of the responses, those without a term too (they shrink the
    gradient); kept_sequences: the tokens of the responses that neither veto nor reject dropped whole (the paper's);
    kept_tokens: those whose weight is not 0; weights: by the sum of the weights (self-normalized), KL and entropy too."""
    bypass: bool = False
    """The loss's ratio starts from the engine's log-probs instead of the trainer's: one ratio for mismatch and drift."""


PREDICTING: tuple[Literal["pr2", "pr3"], ...] = ("pr2", "pr3")
"""Sources of routes (routing.source) that have predictors."""
FROM_ENGINE: tuple[Literal["r3", "pr3"], ...] = ("r3", "pr3")
"""Sources of routes that the engine sends along."""


@section
class RoutingConfig:
    """Replay of expert choices, and the predictors that anticipate them."""

    source: Literal["none", "r2", "r3", "pr2", "pr3"] = "none"
    """The experts of a token while the trainer learns from it. none: the router's choice, anew in each pass; r2: those of
    the log-prob pass before the first update; r3: those of the engine; pr2: as r2, recorded by routers that
    anticipate how updates will move them; pr3: as pr2, recorded in the engine."""
    predictor_loss: Literal["kl", "delta"] = "kl"
    """Loss of the predictors: KL from the current router, or the squared error of the change of its logits."""
    predictor_horizon: Literal["constant", "scaled"] = "scaled"
    """How far predictors look ahead. constant (the paper's): one bias for all mini-batches of a rollout batch; scaled: in
    proportion to the updates that come before a mini-batch's own, so 0 for the first, and on average as far. An engine that
    predicts (pr3) looks ahead by the average."""
    predictor_lr_multiplier: PositiveFloat = 0.1
    """Learning rate of the predictors, as a multiple of the optimizer's."""
    predictor_decay: Fraction = 0.01
    """Share of itself that a predictor forgets at each of its updates, because no drift goes on forever; for the same reason
    its Adam has no momentum. 0 (the paper's): it forgets nothing and has the optimizer's momentum. Predictors reach no
    further than multiplier / decay updates of a router; (updates_per_step - 1) / 2 is what they have to."""
    cached_tokens: Positive = 1024
    """Tokens of each response, evenly spaced, whose router inputs and logits are kept for predictors and metrics."""
    replay_gates: bool = False
    """With r3: the experts' weights are the engine's too, as values; their gradient is that of the trainer's own weights."""
    give_up_below: Fraction = 0.0
    """With r3: an expert that the engine chose is not replayed where the trainer's router gives it less than this times what it
    gives the weakest of its own choice; the trainer's next own choice takes its place. 0: all are replayed."""
    features: Literal["trainer", "engine"] = "trainer"
    """Data that Pr3's predictors learn from: the trainer's log-prob pass over the replayed routes, or what the engine saw."""


@section
class VP2OConfig:
    """Stein variational updates over the experts of each MoE layer (arXiv:2606.08032)."""

    enabled: bool = False
    """Measure co-activation and prototypes, and replace expert gradients by the transformed ones."""
    coactivation: Literal["hard", "soft"] = "hard"
    """What two experts have in common (Eq. 6). hard: tokens that go to both; soft: their shares in the router's distribution
    over all experts, multiplied, so that experts that never meet differ too."""
    neighbors: Positive | None = None
    """Attraction: an expert follows the gradients of this many experts: itself and those most often active on the same tokens.
    1: its own alone. By default a quarter of the experts, 2 to 4 (below 4 experts 1)."""
    attract_above: Annotated[float, Field(gt=0, le=1)] | None = None
    """Instead of neighbors: all experts that share at least this part of the tokens with it."""
    attraction: Literal["kernel", "mean"] = "kernel"
    """kernel: gradients are weighted by kernel / neighbors, as in the paper, which scales them with 1 / temperature. mean: a
    weighted mean, by the positive kernels over their sum; the temperature has no part in it."""
    inactive_neighbors: Positive | None = None
    """Repulsion: an expert's prototype is pushed from those of this many experts, its inactive neighbors: those most rarely
    active on the same tokens. By default a quarter of the experts, 1 to 4."""
    repel_below: Fraction | None = None
    """Instead of inactive_neighbors: all experts that share at most this part of the tokens with it."""
    repulsion: NonNegativeFloat = 0.1
    """Weight of the repulsion (lambda_rep); 0: none."""
    repulsion_scale: Literal["absolute", "relative"] = "relative"
    """relative: in each layer its norm is `repulsion` times that of the output projections' attraction. absolute: as in the
    paper; its weight beside the policy's gradient depends on the size of weights and losses, and may be many times that."""
    temperature: PositiveFloat | None = None
    """T0: the kernel's temperature is T0 / experts; by default T0 is the number of experts, so that an expert's kernel with
    itself is 1. It scales attraction by the kernel, and absolute repulsion, both alike."""
    power_iterations: Positive = 32
    """Power iterations that find a prototype."""
    orthogonality: NonNegativeFloat = 0.01
    """Weight of the loss that keeps apart what the experts of one token put out, mean over tokens, sum over layers; 0: none."""
    orthogonality_form: Literal["cosine", "projection"] = "cosine"
    """cosine: mean over the pairs of a token's experts of cos^2, at most 1. projection: as in the paper, a sum over pairs;
    it has no bound, and can outweigh the policy's loss many times where many experts are active."""
    orthogonality_tokens: Positive = 128
    """Tokens of one micro-batch, evenly spaced, that stand for all in it: each layer keeps the outputs of their experts."""
    trust_region: PositiveFloat | None = None
    """kappa: no update may move the router-weighted prototypes of a layer further than this from those of the weights that the
    engine has (0 to 2). null: no limit."""
    on_violation: Literal["reject", "backtrack"] = "reject"
    """Treatment of an update beyond the trust region. reject: nothing of it is done; backtrack: its learning rate is halved
    until it fits."""
    probe_tokens: Positive = 256
    """Tokens of a rollout batch on each process, evenly spaced, on which the trust region compares routers."""


@section
class ParallelConfig:
    """Parallel layout of the trainer."""

    tensor: Positive = 1
    """Tensor parallelism; above 1 it always brings sequence parallelism."""
    pipeline: Positive = 1
    virtual_pipeline: Positive = 1
    """Model chunks per pipeline stage (interleaved schedule when above 1)."""
    expert: Positive = 1
    expert_tensor: Positive | None = None
    """Tensor parallelism inside an expert; by default that of the rest of the model when expert = 1, else 1."""
    context: Positive = 1
    cp_comm_type: Literal["a2a", "all_gather"] = "a2a"
    """How attention reaches the tokens of other context-parallel ranks: a2a exchanges heads for tokens (less traffic; the ranks
    must divide the heads), all_gather gathers keys and values (any number of heads)."""
    distributed_optimizer: bool = True
    """Shard the optimizer's state over the data-parallel ranks."""
    overlap_param_gather: bool = False
    """Gather the sharded weights during the next forward, layer by layer, instead of after the optimizer's step."""
    timeout_s: PositiveFloat = 600.0
    """Longest wait in a collective before the run stops."""


@section
class PrecisionConfig:
    """Number formats of trainer and engine."""

    train: Literal["bf16", "fp32", "fp8_delayed", "fp8_tensorwise", "fp8_blockwise", "mxfp8"] = "bf16"
    """Matrix products of the trainer. fp8_* and mxfp8 are Transformer Engine's recipes on a GPU, and fake quantization
    by ModelOpt without one (fp8_tensorwise, fp8_blockwise); `megatron-rl doctor` says which can run here."""
    gradients: Literal["fp32", "bf16"] = "fp32"
    """Format in which gradients are summed and reduced; bf16 takes 2 bytes a parameter, not 4, and rounds each micro-batch."""
    rollout: Literal["bf16", "fp32", "fp8"] = "bf16"
    """Format of the engine's weights and products. fp8: weights are quantized in blocks of 128 x 128 when they are pushed."""
    fp32_lm_head: bool = False
    """Logits in fp32 on both sides, from hidden states and head weights as they are: bf16 logits of 16 to 32 are 0.125
    apart."""
    identical: bool = False
    """Engine and trainer compute with the same batch-invariant operators, so that log-probs of the same weights and tokens
    are equal to the last bit. `megatron-rl certify` proves it for a model and a layout."""


@section
class SamplingConfig:
    """How the engine samples."""

    temperature: PositiveFloat = 1.0
    """Temperature of the policy itself: logits are divided by it on both sides."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample from the likeliest tokens that together have this probability; a value below 1 needs top_k too."""
    top_k: int = -1
    """-1: all tokens; 2 to 4096 where the vocabulary is truncated, as the engine names at most 4,096 kept tokens."""
    tail_floor: Annotated[float, Field(gt=0, lt=1)] | None = None
    """For experiments: a fault in the engine, where no token has a smaller share of the likeliest one's probability than this,
    however unlikely the policy finds it. e^-13.3 = 1.67e-6 is a floor that pruning at its default removes."""


@section
class ServerConfig:
    """The SGLang servers that the trainer starts as its children when rollout.addresses is empty."""

    python: str | None = None
    """Python of SGLang's environment; by default .venv-rollout beside the package."""
    start_timeout_s: PositiveFloat = 300.0
    """Longest wait for a server that starts, falls asleep or wakes."""
    count: Positive | None = None
    """Servers that are started; by default one for every `tensor` GPUs that the servers have, and one without a GPU."""
    tensor: Positive = 1
    """GPUs of one server. Servers have the GPUs of this machine that the trainer's processes leave, or share theirs
    (rollout.colocate)."""
    expert: Positive = 1
    """Expert parallelism of the same GPUs: it divides tensor."""
    memory_fraction: Fraction = 0.5
    """Share of the memory that is free when the server starts, for its weights and cache. A server that shares its GPUs with
    the trainer starts first: the share is of the whole GPU, and 0.8 leaves room for what the trainer keeps."""
    max_total_tokens: Positive | None = None
    """Size of the key-value cache in tokens; by default SGLang chooses on a GPU, and 65,536 without one."""
    threads: Positive | None = None
    """OMP_NUM_THREADS of the server where there is no GPU; by default all cores."""
    extra_args: list[str] = dataclasses.field(default_factory=list)
    """More flags of sglang.launch_server, as they are."""


@section
class DemonstrationsConfig:
    """Responses of `megatron-rl rollout` that are kept for `megatron-rl sft`, as rollouts/demonstrations.jsonl."""

    min_reward: float | None = None
    """Least reward of a response that is kept. What a limit cut off, or is masked, never is. null: no file is written."""
    per_prompt: Positive | None = None
    """Most responses of one prompt: the best paid, and of equally paid ones the shortest. null: all."""
    unique: bool = True
    """Keep one of several responses to a prompt that are the same tokens."""
    min_tokens: Count = 0
    """Least tokens of a response; of a conversation what was answered counts too."""
    max_tokens: Positive | None = None
    """Most tokens of a response."""
    top_log_probs: Count = 0
    """Record the log-probs of the engine's so many likeliest tokens at each token of a response, for distillation.recorded.
    Sampling has to be the plain policy's: temperature 1, nothing truncated or pruned."""


@section
class DynamicSamplingConfig:
    """Learn from groups alone whose rewards differ (DAPO): further prompts take the place of others.

    Differences by rewards.overlong_buffer alone do not count.
    """

    max_rounds: Count = 0
    """How often a step asks for prompts; behind that it takes groups without spread, too, so that it has
    batch.prompts_per_step of them. 0: no group is left out; DAPO's recipe: 10."""
    over_sampling: Annotated[float, Field(ge=1)] = 1.0
    """How many prompts are asked for, as a multiple of those that a step still misses; what is above is dropped. More of them
    save rounds."""


@section
class RolloutConfig:
    """The engine: its servers, its limits and what it is asked for."""

    addresses: list[str] = dataclasses.field(default_factory=list)
    """External SGLang servers (http://host:port), all up at the start, or SGLang's router for its workers; empty: the trainer
    starts its own on this machine."""
    address_folder: str | None = None
    """Folder with a file *.address for each external SGLang server, as tools/serve.py writes them: servers may come and go
    while the run goes on. At the start it waits for rollout.server.count of them (default 1)."""
    api_key: Secret | None = None
    """Where the key of external servers is, and of their router (SGLang's --api-key and --admin-api-key): env:NAME or
    file:PATH. tools/serve.py gives it to a server. By default it is the file server.key in rollout.address_folder, which is
    made there; servers that the trainer starts have a random one in each run."""
    health_check_interval_s: PositiveFloat = 10.0
    """Time between two looks at each server while it is asked; what one that is gone, or hangs, has not answered is asked
    elsewhere."""
    health_check_timeout_s: PositiveFloat = 30.0
    """Longest wait for a sign of life of a server."""
    colocate: bool = False
    """Servers that the trainer starts share its GPUs: they sleep while it trains, and it sleeps while they generate."""
    server: ServerConfig = ServerConfig()
    sampling: SamplingConfig = SamplingConfig()
    dynamic_sampling: DynamicSamplingConfig = DynamicSamplingConfig()
    over_sample_rate: NonNegativeFloat = 0.0
    """A step asks for 1 + so much times its prompts, takes the first groups whose responses have all come, and aborts the rest
    (verl's over_sample_rate; Pr2's recipe: 0.1), so that it does not wait for stragglers. What is learned from is shorter by
    that than what the policy says: rollout/aborted, dropped and aborted_length say by how much."""
    max_new_tokens: Positive = 1024
    context_length: Annotated[int, Field(ge=2)] = 4096
    """Longest prompt + response; a prompt that leaves no room for max_new_tokens is skipped, counted and logged. Of a text
    (data.text_key) the longest piece."""
    concurrency: Positive = 512
    """Requests in flight per data-parallel leader."""
    request_timeout_s: PositiveFloat = 600.0
    retries: Count = 3
    """Attempts after the first, with a growing pause; a dead child server is restarted in between."""
    seed_requests: bool = True
    """Give every request a seed of its own: the same config samples the same responses, in whatever order they arrive."""
    max_staleness: Count = 0
    """Steps that the servers may be ahead of the trainer. 0: they wait for each other; 1: the next step's responses are
    sampled while the trainer learns (one-step-off); more: fully asynchronous. So many steps older are the weights that have
    sampled a response, at most; sync.refresh adds its own delay."""
    partial_rollout: bool = True
    """With max_staleness: a push of weights interrupts responses, which go on with the new ones. false: it waits for them."""
    durable: bool = True
    """Keep the samples of a step on disk as they finish (in the run's pending/), until a checkpoint comes behind it: a run that
    was ended in the step asks for none of them again. With routes they are large."""
    routes: bool = False
    """Ask the engine for the experts of every token, also where routing.source does not need them: for the metrics."""
    gates: bool = False
    """Ask for the weights of these experts too, also without routing.replay_gates: for the attribution of a mismatch."""
    agreement_floor: Annotated[float, Field(gt=0, lt=1)] | None = 0.5
    """Least share, before each update, of the sampled tokens whose probabilities the two sides have within a factor of two, and
    in each layer of the engine's experts that the trainer chooses too. Below it the run stops; null: never."""
    record: bool = False
    """Keep every step's trajectories under the run's rollouts/ folder."""
    demonstrations: DemonstrationsConfig = DemonstrationsConfig()
    load: str | None = None
    """A rollouts/ folder to train from instead of asking an engine; evaluation has to be off."""
    program: str = "single_turn"
    """How responses are asked for: single_turn; agent: conversations of several turns with tools, as the section agent says;
    openai_agent: by an agent of your own that speaks the OpenAI API (agent.function); or your own class, module:name
    (CONTRIBUTING.md says which)."""

    @property
    def external(self) -> bool:
        """Whether others start the servers."""
        return bool(self.addresses or self.address_folder)


@section
class AgentConfig:
    """Conversations of several turns with tools (rollout.program: agent). rollout.max_new_tokens bounds a whole one."""

    dialect: str = "qwen"
    """How calls are written: qwen (also of the Hermes models): JSON in <tool_call>; react: Action and Action Input;
    harmony: the channels of gpt-oss; or your own class, module:name."""
    dialect_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the dialect. Of harmony: reasoning_effort (low | medium | high), model_identity, knowledge_cutoff and
    conversation_start_date, each a line of the system message, which null leaves out. The others have none."""
    function: str | None = None
    """An agent of your own, module:name or path/to/file.py:name, for rollout.program: openai_agent: a function
    (prompt, base_url) -> reward that talks to the policy with any OpenAI client; with a parameter reward_url it may post it."""
    tools: list[str] = dataclasses.field(default_factory=list)
    """calculator | python (a contained interpreter, stateful within a conversation) | search (over a folder), or a function or
    class of your own as module:name or path/to/file.py:name."""
    tool_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the tools by their names, such as {search: {folder: documents}, python: {timeout_s: 5}}."""
    mcp_servers: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Model Context Protocol servers whose tools are offered: {NAME: {command: ..., args: [...], env: {...}}} (stdio) or
    {NAME: {url: ..., headers: {...}}} (streamable HTTP)."""
    max_turns: Positive = 8
    """Most replies of a conversation."""
    max_turn_tokens: Positive | None = None
    """Most tokens of one reply; by default what is left of rollout.max_new_tokens, which observations count for too."""
    time_limit_s: PositiveFloat = 600.0
    """Longest time of a conversation, without what it waits for the engine; with an agent of your own, sampling counts."""
    tool_timeout_s: PositiveFloat = 60.0
    """Longest time of one call; a tool that takes longer has failed, and its conversation does not train."""
    tool_concurrency: Positive = 64
    """Calls under way per data-parallel leader, apart from rollout.concurrency."""
    max_tool_response: Positive = 4096
    """Characters of a result that the policy sees; of a longer one the first and the last."""
    history: Literal["sampled", "rendered"] = "sampled"
    """In training, earlier turns of a conversation in which the user goes on after an answer (dialect harmony). sampled: the
    tokens as they were sampled, thinking and end marks too, in one sequence. rendered: as the format has a history, without
    them; each such turn begins a sequence of its own, and all have the conversation's reward. Evaluations always are."""
    on_truncation: Literal["score", "zero", "mask"] = "score"
    """Treatment of a conversation that a limit ended (turns, tokens, time). score: by its last reply, where that is an answer;
    zero: its reward is 0; mask: it does not train, and its group's baseline leaves it out."""


@section
class RefreshConfig:
    """When the engine gets the trainer's weights. It always gets them at the start and before an evaluation."""

    when: Literal["always", "drift"] = "always"
    """always: after every step. drift: when the policy has moved away from the engine's by more than kl or ess below."""
    kl: PositiveFloat = 0.01
    """Refresh above this mean KL(engine || policy), nats per token."""
    ess: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """Refresh below this effective sample size of the ratios policy / engine, as a share of the tokens."""
    alpha: PositiveFloat = 1.0
    """Power to which the ratios are taken for the effective sample size; below 1 it sees less of single large ratios."""
    hysteresis: Fraction = 0.5
    """Once begun, refreshing goes on after every step until the drift (kl, and 1 - ess) is below this share of its limit."""
    max_staleness: Positive = 8
    """Largest number of steps for which the engine keeps its weights."""
    tokens: Positive = 1024
    """Tokens of each data-parallel rank, in evenly spaced sequences, on which the drift is measured after a step."""
    sequences: Positive = 8
    """Fewest sequences of each data-parallel rank on which it is measured, however long they are."""


@section
class SyncConfig:
    """How weights reach the engine."""

    transport: Literal["distributed", "tensor", "disk"] = "distributed"
    """distributed: NCCL or gloo broadcast; tensor: shared memory on one machine; disk: a safetensors folder."""
    bucket_mb: PositiveFloat = 256.0
    adapters: Literal["merged", "unmerged"] = "merged"
    """With lora.rank: merged: all weights go out, the adapters in them; unmerged: the adapters alone, which servers started
    with SGLang's --enable-lora compute beside the model. SGLang serves no unmerged ones of experts and routers."""
    timeout_s: PositiveFloat = 300.0
    refresh: RefreshConfig = RefreshConfig()


@section
class CheckpointConfig:
    """When checkpoints are written, and which stay."""

    every: Count = 0
    """Steps between checkpoints; 0 saves at the end alone."""
    keep: Positive = 2
    """Newest complete checkpoints that stay."""
    keep_best: Count = 0
    """Checkpoints of the best eval/score (in SFT: the lowest eval/loss) that stay beside them, of steps with both an evaluation
    and a checkpoint."""
    async_save: bool = False
    """Write in the background while training goes on, from a copy on the host of a rank's share of what its GPU holds."""
    timeout_s: PositiveFloat = 1800.0
    """Longest time in seconds that the next save, or the end of the run, waits for a save in the background."""
    load: str | None = None
    """Checkpoint folder of another run to start from (weights alone)."""


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
    samples: Positive = 4
    """Responses to each prompt at the sampling temperature, for avg@n and pass@n."""
    pass_at: list[Positive] = dataclasses.field(default_factory=list)
    """Also pass@k for these k, each below samples."""
    greedy: bool = True
    """Also one greedy response to each prompt."""
    sets: dict[SetName, EvalSetConfig] = dataclasses.field(default_factory=dict)
    """Several sets of held-out prompts by name, such as {aime24: {path: aime24, samples: 32}}: each has metrics of its own,
    eval/NAME/score and so on, and none of its prompts is trained on. The held-out prompts of the section data are evaluated
    beside them where data.eval_path is set; else eval/score (in SFT eval/loss) is the mean over the sets."""
    unpruned: bool = False
    """With pruning.enabled: also the scores of the whole, unpruned policy (eval/score_unpruned), so that runs with and without
    pruning compare by one sampler. It samples everything a second time."""


@section
class PruneConfig:
    """What `megatron-rl prune` removes from a model; the section pruning is another thing: of a policy's vocabulary, in RL."""

    layers: Positive | None = None
    """Layers that stay: those that turn their input the most (block influence)."""
    heads: Positive | None = None
    """Query heads of a layer that stay, in whole groups with their key-value heads: those that add the most to the output."""
    width: Positive | None = None
    """Inner channels that stay in each dense MLP."""
    experts: Positive | None = None
    """Experts that stay in each MoE layer."""
    expert_width: Positive | None = None
    """Inner channels that stay in each expert, and in shared experts as many times as they are wider."""
    expert_importance: Literal["reap", "frequency"] = "reap"
    """reap: mean of gate x norm of the output over the tokens that are sent to an expert; frequency: how many are sent."""
    channel_importance: Literal["activation", "wanda"] = "activation"
    """Of inner channels: mean |activation|; or wanda: root mean square of the activation x norm of the weights behind it."""
    calibration_samples: Positive = 128
    """Demonstrations, or pieces of texts, on which importance is measured."""
    sparsity: Annotated[str, Field(pattern=r"^(none|unstructured|[1-9]\d*:[1-9]\d*)$")] = "none"
    """Zeros among the weights that stay: unstructured: a share ratio of each row; N:M such as 2:4: all but N of every M
    neighbors along a layer's input."""
    method: Literal["magnitude", "wanda", "sparsegpt"] = "wanda"
    """Which weights become zero. magnitude: the smallest; wanda: those of the smallest |W| x norm of their input; sparsegpt:
    those whose loss the others can make up for best, and these then do."""
    ratio: Annotated[float, Field(gt=0, lt=1)] = 0.5
    """unstructured: share of the weights that become zero."""
    targets: list[str] = dataclasses.field(default_factory=list)
    """Weights that get zeros: patterns as of model.freeze; empty: all linear layers of attention, MLPs and experts."""


@section
class QuantizeConfig:
    """Post-training quantization for serving (`megatron-rl quantize`) of the model at model.path, calibrated on data."""

    format: Literal["fp8_tensor", "int4"] = "fp8_tensor"
    """fp8_tensor: weights and inputs in e4m3, one scale for each matrix and one for each layer's inputs, from calibration.
    int4: weights alone, one scale for 128 inputs of an output, with the least error on the calibration data."""
    calibration_samples: Positive = 128
    """Demonstrations, or pieces of texts, of the training data by which scales are chosen."""
    keep_layers: list[Count] = dataclasses.field(default_factory=list)
    """Decoder layers that stay as they are; 0 is the first."""


@section
class LoggingConfig:
    """Logs and the report."""

    progress: bool = True
    tensorboard: bool = True
    wandb_project: str | None = None
    prometheus_port: Annotated[int, Field(ge=1, le=65535)] | None = None
    """Port of rank 0's machine at which Prometheus finds the newest values, as megatron_rl_metric{run, metric}."""
    prometheus_address: str = "127.0.0.1"
    """Address of rank 0's machine on which that port listens; 0.0.0.0: all of its addresses. Another than this machine's own
    needs logging.prometheus_api_key."""
    prometheus_api_key: Secret | None = None
    """Where the key is that Prometheus has to send (authorization.credentials in its configuration)."""
    samples: Count = 8
    """Rollouts of each step that are kept for the report: best-paid, most frequent, and others from prompt to prompt."""
    profile_steps: list[Positive] = dataclasses.field(default_factory=list)
    """Steps of which rank 0 writes a trace of torch's profiler, as profile/step_N.json.gz in the run's folder."""


@section
class Config:
    """The whole tree of a run."""

    name: RunName = "run"
    """The run's folder under runs_dir; a/b is a folder in a folder. No part begins with . or -, or has a blank at an end."""
    runs_dir: str = "runs"
    seed: int = 0
    steps: Positive = 100
    model: ModelConfig = ModelConfig()
    lora: LoRAConfig = LoRAConfig()
    data: DataConfig = DataConfig()
    batch: BatchConfig = BatchConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    rewards: RewardsConfig = RewardsConfig()
    sft: SFTConfig = SFTConfig()
    reward_model: RewardModelConfig = RewardModelConfig()
    dpo: DPOConfig = DPOConfig()
    distillation: DistillationConfig = DistillationConfig()
    pruning: PruningConfig = PruningConfig()
    prune: PruneConfig = PruneConfig()
    correction: CorrectionConfig = CorrectionConfig()
    routing: RoutingConfig = RoutingConfig()
    vp2o: VP2OConfig = VP2OConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    parallel: ParallelConfig = ParallelConfig()
    precision: PrecisionConfig = PrecisionConfig()
    rollout: RolloutConfig = RolloutConfig()
    agent: AgentConfig = AgentConfig()
    sync: SyncConfig = SyncConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    eval: EvalConfig = EvalConfig()
    quantize: QuantizeConfig = QuantizeConfig()
    logging: LoggingConfig = LoggingConfig()
    hooks: list[str] = dataclasses.field(default_factory=list)
    """What else takes part in updates, after what the config turns on: functions or classes of your own, module:name or
    path/to/file.py:name, that make an UpdateHook of the config (CONTRIBUTING.md)."""

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return Path(self.runs_dir) / self.name

    @property
    def zero_truncated(self) -> bool:
        """Whether a response that a limit has ended has a reward of 0, whatever is in it."""
        return self.rollout.program != "single_turn" and self.agent.on_truncation == "zero"

    @property
    def teaches(self) -> bool:
        """Whether there is a teacher."""
        teacher = self.distillation
        return teacher.teacher is not None or teacher.address is not None or teacher.recorded

    @property
    def process_rewards(self) -> str | None:
        """Name of the reward model whose scores are rewards at the ends of steps; None where there is none."""
        found = (n for n, model in self.rewards.models.items() if model.steps and model.step_placement == "tokens")
        return next(found, None)

    @property
    def policy_reference(self) -> str | None:
        """Folder of the reference of reinforcement learning; None where nothing asks for one."""
        kl = self.algorithm.kl
        return (kl.reference or self.model.path) if kl.coefficient > 0 else None
