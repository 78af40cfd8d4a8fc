"""Keys of sampling: servers, agents, and the push of weights."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, Literal

from pydantic import Field

from megatron_rl.config.conditions import LEARNING, only_with, read_by
from megatron_rl.config.section import Count, Fraction, NonNegativeFloat, Positive, PositiveFloat, Secret, section


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
    dynamic_sampling: Annotated[DynamicSamplingConfig, only_with("rollout.dynamic_sampling.max_rounds", example=10)] = (
        DynamicSamplingConfig()
    )
    over_sample_rate: NonNegativeFloat = 0.0
    """A step asks for 1 + so much times its prompts, takes the first groups whose responses have all come, and aborts the rest
    (verl's over_sample_rate; Pr2's recipe: 0.1), so that it does not wait for stragglers. What is learned from is shorter by
    that than what the policy says: rollout/aborted, dropped and aborted_length say by how much."""
    max_new_tokens: Annotated[Positive, read_by(*LEARNING, "sample")] = 1024
    context_length: Annotated[int, Field(ge=2), read_by(*LEARNING, "sample")] = 4096
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
    demonstrations: Annotated[
        DemonstrationsConfig, read_by("sample"), only_with("rollout.demonstrations.min_reward", example=1.0)
    ] = DemonstrationsConfig()
    load: str | None = None
    """A rollouts/ folder to train from instead of asking an engine; evaluation has to be off."""
    program: Annotated[str, read_by(*LEARNING, "sample")] = "single_turn"
    """How responses are asked for: single_turn; agent: conversations of several turns with tools, as the section agent says;
    openai_agent: by an agent of your own that speaks the OpenAI API (agent.function); or your own class, module:name
    (CONTRIBUTING.md says which)."""

    @property
    def external(self) -> bool:
        """True if others start the servers."""
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

    transport: str = "distributed"
    """distributed: NCCL or gloo broadcast; tensor: shared memory on one machine; disk: a safetensors folder; or one of your
    own, `module:name` or `path/to/file.py:name`: a subclass of `Transport` (megatron_rl/sync/transport.py)."""
    bucket_mb: PositiveFloat = 256.0
    adapters: Annotated[Literal["merged", "unmerged"], only_with("lora.rank", example=16)] = "merged"
    """With lora.rank: merged: all weights go out, the adapters in them; unmerged: the adapters alone, which servers started
    with SGLang's --enable-lora compute beside the model. SGLang serves no unmerged ones of experts and routers."""
    timeout_s: PositiveFloat = 300.0
    refresh: Annotated[RefreshConfig, only_with("sync.refresh.when", "drift")] = RefreshConfig()
