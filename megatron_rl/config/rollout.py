"""Keys of sampling: servers, agents, and the push of weights."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_rl.config.conditions import LEARNING, only_with, read_by
from megatron_rl.config.section import Count, Fraction, NonNegativeFloat, Positive, PositiveFloat, Secret, section


@section
class SamplingConfig:
    """Sampling of tokens by SGLang."""

    temperature: PositiveFloat = 1.0
    """Temperature of the policy; SGLang and the trainer both divide logits by it."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: sample from the likeliest tokens that together have this probability. A value below 1 also
    needs top_k."""
    top_k: int = -1
    """Number of likeliest tokens to sample from, 2 to 4096 (SGLang reports at most 4,096 kept tokens). -1: all
    tokens."""
    tail_floor: Annotated[float, Field(gt=0, lt=1)] | None = None
    """For experiments: simulate an engine fault that gives each token at least this fraction of the likeliest token's
    probability. Vocabulary pruning with its default rho removes a floor of e^-13.3 = 1.67e-6."""


@section
class ServerConfig:
    """The SGLang servers that the trainer starts as child processes when rollout.addresses is empty."""

    python: str | None = None
    """Python interpreter of SGLang's environment. By default the one in .venv-rollout next to the package."""
    start_timeout_s: PositiveFloat = 300.0
    """Longest wait, in seconds, for a server to start, fall asleep or wake up."""
    count: Positive | None = None
    """Number of servers to start. By default the number of GPUs that are available to servers, divided by `tensor`. On a
    machine without a GPU, the default is one server."""
    tensor: Positive = 1
    """Number of GPUs of one server (tensor parallelism). Servers use the GPUs of this machine that the trainer's
    processes leave free, or share the trainer's GPUs (rollout.colocate)."""
    expert: Positive = 1
    """Expert-parallel size on the GPUs of a server; it must divide tensor."""
    memory_fraction: Fraction = 0.5
    """Share of the free GPU memory at a server's start that the server may use for weights and cache. With
    rollout.colocate the server starts first, so this is a share of the whole GPU; 0.8 leaves enough room for the memory
    that the trainer keeps."""
    max_total_tokens: Positive | None = None
    """Size of the key-value cache in tokens. By default SGLang chooses it on a GPU; without a GPU it is 65,536."""
    threads: Positive | None = None
    """OMP_NUM_THREADS (number of CPU threads) of a server without a GPU; by default the number of cores."""
    extra_args: list[str] = dataclasses.field(default_factory=list)
    """Further flags of sglang.launch_server, passed on unchanged."""


@section
class DemonstrationsConfig:
    """Responses of `megatron-rl rollout` that are kept for `megatron-rl sft`, in rollouts/demonstrations.jsonl."""

    min_reward: float | None = None
    """Smallest reward of a response that is kept. Responses that a limit cut off and masked responses are never kept.
    null: no file is written."""
    per_prompt: Positive | None = None
    """Largest number of responses kept per prompt: the responses with the highest rewards, and among equal rewards the
    shortest. null: all responses."""
    unique: bool = True
    """Keep only one of several responses to a prompt that have the same tokens."""
    min_tokens: Count = 0
    """Smallest number of tokens of a response that is kept. In a conversation, tool results count too."""
    max_tokens: Positive | None = None
    """Largest number of tokens of a response that is kept."""
    top_log_probs: Count = 0
    """Number of likeliest tokens whose SGLang log-probs are recorded at each position of a response, for
    distillation.recorded. Sampling must be unchanged: temperature 1, no top_p or top_k, no vocabulary pruning."""


@section
class DynamicSamplingConfig:
    """Train only on groups whose rewards differ (DAPO). Groups of further prompts replace groups with equal rewards.

    Differences that come from rewards.overlong_buffer alone do not count.
    """

    max_rounds: Count = 0
    """Largest number of sampling rounds of a step. After the last round, groups of equal rewards fill the step up to
    batch.prompts_per_step. 0: keep all groups, no dynamic sampling. DAPO's recipe: 10."""
    over_sampling: Annotated[float, Field(ge=1)] = 1.0
    """Number of prompts to sample in a round, as a multiple of the prompts that the step still needs. Surplus groups are
    dropped. A larger value saves rounds."""


@section
class RolloutConfig:
    """The SGLang servers, their limits, and the requests to them."""

    addresses: list[str] = dataclasses.field(default_factory=list)
    """Addresses (http://host:port) of external SGLang servers or of SGLang's router. All these servers must run at the
    start. Empty: the trainer starts its own servers on this machine."""
    address_folder: str | None = None
    """Folder with one *.address file per external SGLang server, as tools/serve.py writes them. Servers may join and
    leave during the run. At the start the run waits for rollout.server.count of them (default 1)."""
    api_key: Secret | None = None
    """Reference to the API key of external servers and their router (SGLang's --api-key and --admin-api-key): env:NAME
    or file:PATH. tools/serve.py passes the key to a server. By default the key is in the file server.key in
    rollout.address_folder; a missing file is created. Servers that the trainer starts get a new random key in each
    run."""
    health_check_interval_s: PositiveFloat = 10.0
    """Seconds between two health checks of each server during sampling. If a server is gone or hangs, its open requests
    go to other servers."""
    health_check_timeout_s: PositiveFloat = 30.0
    """Longest wait for a server's reply to a health check, in seconds."""
    colocate: bool = False
    """Let the servers that the trainer starts share the trainer's GPUs. The servers sleep while the trainer trains, and
    the trainer sleeps while the servers generate."""
    server: ServerConfig = ServerConfig()
    sampling: SamplingConfig = SamplingConfig()
    dynamic_sampling: Annotated[DynamicSamplingConfig, only_with("rollout.dynamic_sampling.max_rounds", example=10)] = (
        DynamicSamplingConfig()
    )
    over_sample_rate: NonNegativeFloat = 0.0
    """Share of additional prompts: a step samples (1 + over_sample_rate) times its prompts, uses the groups that complete
    first, and aborts all others. The step then does not wait for stragglers (verl's over_sample_rate; Pr2's recipe: 0.1). Short
    responses are favored; the metrics rollout/aborted, rollout/dropped and rollout/aborted_length show by how much."""
    max_new_tokens: Annotated[Positive, read_by(*LEARNING, "sample")] = 1024
    """Largest number of tokens of a response."""
    context_length: Annotated[int, Field(ge=2), read_by(*LEARNING, "sample")] = 4096
    """Largest number of tokens of prompt + response. A prompt that leaves no room for max_new_tokens is skipped,
    counted and logged. For texts (data.text_key): the length of the longest piece."""
    concurrency: Positive = 512
    """Number of requests in flight per data-parallel rank."""
    request_timeout_s: PositiveFloat = 600.0
    """Longest wait for the answer to a request, in seconds."""
    retries: Count = 3
    """Number of further attempts of a request, with growing pauses. If a server that the trainer started has died, the
    trainer restarts it between two attempts."""
    seed_requests: bool = True
    """Give each request its own seed, so that the same config samples the same responses in any order of arrival."""
    max_staleness: Count = 0
    """Number of steps that SGLang may sample ahead of the trainer. 0: sampling and training take turns; 1: the next
    step's responses are sampled while the trainer learns (one-step-off); above 1: fully asynchronous. The weights that
    sampled a response are at most this many steps old, plus the delay of sync.refresh."""
    partial_rollout: bool = True
    """With max_staleness above 0. true: a push of weights interrupts running responses, which continue with the new
    weights. false: the push waits until these responses are complete."""
    durable: bool = True
    """Keep finished samples of a step on disk (in the run's folder pending/) until a checkpoint includes the step. If a
    run stops during a step, the resumed run does not sample these responses again. Samples with routes are large."""
    routes: bool = False
    """Ask SGLang for the routes (chosen experts) of every token even if routing.source does not need them, for
    metrics."""
    gates: bool = False
    """Ask SGLang also for the gates of the chosen experts, even without routing.replay_gates. `megatron-rl report RUN
    --attribute` uses these gates to attribute the mismatch to its sources."""
    agreement_floor: Annotated[float, Field(gt=0, lt=1)] | None = 0.5
    """Smallest agreement between SGLang and the trainer, checked before each update. At least this share of the sampled
    tokens must have probabilities within a factor of two. In each layer, at least this share of SGLang's experts must
    be the trainer's choice too. If a share is smaller, the run stops. null: no check."""
    record: bool = False
    """Keep the trajectories of each step in the run's folder rollouts/."""
    demonstrations: Annotated[
        DemonstrationsConfig, read_by("sample"), only_with("rollout.demonstrations.min_reward", example=1.0)
    ] = DemonstrationsConfig()
    load: str | None = None
    """Folder rollouts/ of an earlier run: train on the trajectories in it without SGLang. Evaluation must be off."""
    program: Annotated[str, read_by(*LEARNING, "sample")] = "single_turn"
    """Program that samples responses. `single_turn`: one reply per prompt; `agent`: conversations of several turns with
    tools (section agent); `openai_agent`: your own agent that uses the OpenAI API (agent.function); `module:name`: a
    class of your own (see CONTRIBUTING.md)."""

    @property
    def external(self) -> bool:
        """True if the trainer does not start the servers."""
        return bool(self.addresses or self.address_folder)


@section
class AgentConfig:
    """Conversations of several turns with tools (rollout.program: agent).

    rollout.max_new_tokens limits a whole conversation.
    """

    dialect: str = "qwen"
    """Format of tool calls. `qwen` (also for Hermes models): JSON in <tool_call>; `react`: Action and Action Input;
    `harmony`: the channels of gpt-oss; `module:name`: a class of your own."""
    dialect_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the dialect. harmony has reasoning_effort (low | medium | high), model_identity, knowledge_cutoff and
    conversation_start_date. Each option is a line of the system message, and null removes the line. The other dialects
    have no options."""
    function: str | None = None
    """Your own agent for rollout.program: openai_agent, as module:name or path/to/file.py:name. The agent is a function
    (prompt, base_url) -> reward that calls the policy with any OpenAI client. If the function has a parameter
    reward_url, it may post the reward there instead."""
    tools: list[str] = dataclasses.field(default_factory=list)
    """Tools of the policy: calculator | python (a sandboxed interpreter that keeps its state within a conversation) |
    search (over a folder), or a function or class of your own as module:name or path/to/file.py:name."""
    tool_options: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Options of the tools by their names, such as {search: {folder: documents}, python: {timeout_s: 5}}."""
    mcp_servers: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Model Context Protocol servers whose tools are offered to the policy: {NAME: {command: ..., args: [...], env:
    {...}}} (stdio) or {NAME: {url: ..., headers: {...}}} (streamable HTTP)."""
    max_turns: Positive = 8
    """Largest number of policy replies in a conversation."""
    max_turn_tokens: Positive | None = None
    """Largest number of tokens of one reply. By default a reply may use all tokens of rollout.max_new_tokens that
    earlier replies and tool results have left."""
    time_limit_s: PositiveFloat = 600.0
    """Longest time of a conversation, in seconds. Waits for SGLang do not count, except with an agent of your own."""
    tool_timeout_s: PositiveFloat = 60.0
    """Longest time of one tool call, in seconds. A call that takes longer fails, and its conversation is not trained
    on."""
    tool_concurrency: Positive = 64
    """Number of tool calls in progress per data-parallel rank, in addition to rollout.concurrency."""
    max_tool_response: Positive = 4096
    """Largest number of characters of a tool result that the policy sees. The policy sees the beginning and the end of
    a longer result."""
    history: Literal["sampled", "rendered"] = "sampled"
    """Form in which training shows earlier turns after the user continues a conversation (dialect harmony). `sampled`:
    the tokens as sampled, with thinking and end marks, in one sequence. `rendered`: the history as the chat format
    renders it, without thinking and end marks. Each turn of the user after a reply then starts a new sequence. All
    sequences of a conversation have its reward. Evaluations always use `rendered`."""
    on_truncation: Literal["score", "zero", "mask"] = "score"
    """Treatment of a conversation that a limit ended (turns, tokens, time). `score`: score the last reply if it is an
    answer; `zero`: reward 0; `mask`: do not train on the conversation, and leave it out of the baseline of its
    group."""


@section
class RefreshConfig:
    """Timing of weight pushes to SGLang during training.

    SGLang always gets the weights at the start and before an evaluation.
    """

    when: Literal["always", "drift"] = "always"
    """`always`: push weights after every step. `drift`: push when the policy has moved away from SGLang's weights by
    more than kl or ess allow."""
    kl: PositiveFloat = 0.01
    """Limit for drift: push weights if the mean KL(SGLang || policy) is above this, in nats per token."""
    ess: Annotated[float, Field(gt=0, lt=1)] = 0.9
    """Limit for drift: push weights if the effective sample size of the ratios policy / SGLang is below this share of
    the tokens."""
    alpha: PositiveFloat = 1.0
    """Power to which the ratios are raised for the effective sample size. A power below 1 reduces the influence of
    single large ratios."""
    hysteresis: Fraction = 0.5
    """Share of the limits below which pushes end. After the drift has caused a push, weights are pushed after every
    step until the drift (kl, and 1 - ess) falls below this share of its limit."""
    max_staleness: Positive = 8
    """Largest number of steps without a push."""
    tokens: Positive = 1024
    """Number of tokens per data-parallel rank, in evenly spaced sequences, on which the drift is measured after a step."""
    sequences: Positive = 8
    """Smallest number of sequences per data-parallel rank on which the drift is measured, whatever their length."""


@section
class SyncConfig:
    """Push of the trainer's weights to SGLang."""

    transport: str = "distributed"
    """Weight transport. `distributed`: broadcast by NCCL or gloo; `tensor`: shared memory on one machine; `disk`: a
    folder of safetensors; `module:name` or `path/to/file.py:name`: your own subclass of `Transport`
    (megatron_rl/sync/transport.py)."""
    bucket_mb: PositiveFloat = 256.0
    """Size of the pieces (buckets) in which weights are sent, in MiB."""
    adapters: Annotated[Literal["merged", "unmerged"], only_with("lora.rank", example=16)] = "merged"
    """Content of a push with lora.rank. `merged`: all weights, with the adapters merged into them; `unmerged`: only the
    adapters, which servers started with SGLang's --enable-lora apply in addition to the model's weights. SGLang does
    not support unmerged adapters of experts and routers."""
    timeout_s: PositiveFloat = 300.0
    """Longest wait for a server during a push of weights, in seconds."""
    refresh: Annotated[RefreshConfig, only_with("sync.refresh.when", "drift")] = RefreshConfig()
