"""Tasks: prompts, the rewards of responses to them, and optionally demonstrations and preferences."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from pydantic import TypeAdapter, ValidationError

from megatron_rl.config import DataConfig
from megatron_rl.config.registry import nearest
from megatron_rl.errors import UserError
from megatron_rl.tasks.chat import check_text, render_prompt
from megatron_rl.tasks.preferences import Preference
from megatron_rl.tasks.sampled_demonstrations import Recorded
from megatron_rl.tools.toolbox import Environment

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from megatron_rl.tools.tool import Tool
    from megatron_rl.tools.toolbox import Toolbox

Split = Literal["train", "eval"]
HELD_OUT_SHARE = 0.1
Parts = dict[str, float]
"""Named parts of a reward."""


@dataclass(frozen=True)
class Prompt:
    """One question, with what its verifier needs to know."""

    prompt_id: str
    """Unique in its data set and stable over runs: `number_sorting:17`, `train.jsonl:3`."""
    text: str
    """The prompt as it is given to the model; of a conversation, its last message."""
    answer: Any = None
    response: str | list[dict[str, Any]] | None = None
    """A demonstration that came with the prompt: text, or the messages of a conversation."""
    messages: list[dict[str, Any]] | None = None
    """A conversation; the tokenizer's chat template is applied to it."""
    metadata: dict[str, Any] = field(default_factory=dict)
    preference: Preference | None = None
    """Responses that came with the prompt, and what was said of them."""
    document: bool = False
    """The text is no prompt: all of it is learned from."""
    recorded: Recorded | None = field(default=None, compare=False)
    """A demonstration that came as tokens: it is learned as it is, and the texts are for readers."""
    tokens: list[int] = field(default_factory=list)
    """Filled by `encode`."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Schemas of the tools that the prompt tells of, where it brings its own."""

    @property
    def identity(self) -> str:
        """Equal for equal prompts alone: the text, where that is all that is asked, or the conversation with its tools."""
        if not self.tools and self.messages in (None, [{"role": "user", "content": self.text}]):
            return self.text
        asked = self.messages if self.messages is not None else self.text
        return json.dumps([asked, self.tools], sort_keys=True, default=repr)

    def encode(self, tokenizer: PreTrainedTokenizerBase) -> Prompt:
        """A copy with tokens, special tokens included as the tokenizer wants them in front of a response.

        Errors: UserError naming the prompt, for what the tokenizer or its chat template does not take, or not as it is.
        """
        what = f"data: prompt {self.prompt_id}"
        try:
            check_text([self.text, self.messages])
        except ValueError as error:
            raise UserError(f"{what}: {error}") from None
        if self.messages is None:
            if self.tools:
                raise UserError(
                    f"{what} is a text, which cannot tell of its tools; set data.chat: true, rollout.program: agent, or"
                    " data.tools_key: null to leave them out"
                )
            return replace(self, tokens=list(tokenizer.encode(self.text)))
        if not tokenizer.chat_template:
            raise UserError(
                f"{what} is a conversation, but the model's tokenizer has no chat template;"
                " set data.chat: false (and data.template), or give the tokenizer a chat_template"
            )
        text = render_prompt(tokenizer, self.messages, what, tools=self.tools)
        return replace(self, tokens=list(tokenizer.encode(text, add_special_tokens=False)))


class Task:
    """Base of all tasks. A subclass gives `prompts` and `score`; `demonstration` or `comparison` where these are wanted."""

    name: str = ""
    parts: tuple[str, ...] = ("correct",)
    """Names of the reward parts that `score` returns."""
    main_parts: tuple[str, ...] = ("correct",)
    """Parts that count with weight 1.0 unless the config says otherwise; the others count 0."""
    verifier: str | None = None
    """Name of the verifier, where it is the task's own; data.verifier may repeat it."""
    later_parts: tuple[str, ...] = ()
    """The parts that are scored once the response is there, by reward models or by its length
    (`rollout.later_rewards`).
    """
    program: str | None = None
    """The only rollout program with which it works, where there is one."""
    weights: dict[str, float]
    """part -> weight, set by `build_task` from data.rewards."""

    def __init__(self, data: DataConfig, demonstrations: bool = False):
        """demonstrations: the prompts are for SFT. Errors: UserError for what is missing or does not fit."""
        self.data, self.demonstrations = data, demonstrations
        self.name = self.name or data.task

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Prompts of a split (not tokenized); train and eval share none (`Prompt.identity`). May be lazy."""
        raise NotImplementedError

    def score(self, prompts: Sequence[Prompt], texts: Sequence[str], truncated: Sequence[bool] = ()) -> list[Parts]:
        """Reward parts of texts[i] as a response to prompts[i]; never raises because of what a text says.

        truncated[i]: the response was cut off at the longest that was allowed. Empty: none was.
        """
        raise NotImplementedError

    def rewards(self, prompt: Prompt, response_text: str) -> Parts:
        """Reward parts of one response."""
        return self.score([prompt], [response_text])[0]

    def extract(self, text: str) -> str:
        """The answer inside a response, in a form in which equal answers are equal strings (for maj@n and distinct@n)."""
        return text.strip()

    def tools(self) -> Sequence[Tool]:
        """Tools that the task brings along, beside those of agent.tools."""
        return ()

    def environment(self, prompt: Prompt, toolbox: Toolbox) -> Environment:
        """The environment of a conversation about the prompt, under rollout.program: agent. By default the tools."""
        return Environment(toolbox)

    def agent(self) -> Callable[[Prompt, str], Any] | None:
        """An agent that the task brings along, for rollout.program: openai_agent where agent.function is not set."""
        return None

    async def open(self) -> None:
        """Begin what the task's agent needs, once, in the event loop in which it is called. Errors: ToolLost."""

    def demonstration(self, prompt: Prompt, rng: random.Random) -> str | list[dict[str, Any]]:
        """A response to learn from in SFT, or the messages of a conversation in OpenAI's form (assistant, tool).

        Errors: UserError where the task has none.
        """
        if prompt.response is None:
            raise UserError(f"data.task '{self.name}' has no demonstrations, so it cannot be used for SFT")
        return prompt.response

    def comparison(self, prompt: Prompt, rng: random.Random) -> Preference:
        """Responses to compare, to learn from preferences. Errors: UserError where the task has none."""
        if prompt.preference is None:
            raise UserError(
                f"data.task '{self.name}' has no preferences, so it cannot be used for reward models or DPO"
            )
        return prompt.preference

    def close(self) -> None:
        """End the task's worker processes."""


def check_options(data: DataConfig, known: Iterable[str]) -> None:
    """Errors: UserError for a key of data.options that the task does not know."""
    for name in data.options:
        if name not in known:
            raise UserError(f"config: unknown key 'data.options.{name}' of task '{data.task}'{nearest(name, known)}")


def read_options[T](data: DataConfig, kind: type[T]) -> T:
    """data.options as the fields of a pydantic dataclass. Errors: UserError naming the key."""
    check_options(data, [field.name for field in dataclasses.fields(kind)])  # pyright: ignore[reportArgumentType]
    try:
        return TypeAdapter(kind).validate_python(data.options)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "*"
        raise UserError(f"config: data.options.{key}: {first['msg']}") from None


def resolve_weights(task: Task, rewards: dict[str, float]) -> dict[str, float]:
    """Map part -> weight for all parts of the task. Errors: UserError for a part that the task does not have."""
    for part in rewards:
        if part not in task.parts:
            raise UserError(
                f"config: data.rewards has '{part}', which task '{task.name}' does not give{nearest(part, task.parts)}"
            )
    return {part: float(rewards.get(part, part in task.main_parts)) for part in task.parts}


def combine(parts: Parts, weights: dict[str, float]) -> float:
    """The reward: weighted sum of the parts."""
    return sum(weights[name] * value for name, value in parts.items())


def is_held_out(identity: str, share: float) -> bool:
    """True for a prompt of the held-out split: its hash alone decides, so that equal prompts never part."""
    digest = hashlib.blake2b(identity.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def split_by_hash(prompts: Iterable[Prompt]) -> dict[Split, list[Prompt]]:
    """One in ten prompts held out, by the hash of its identity. Errors: UserError where none is left to train on."""
    split: dict[Split, list[Prompt]] = {"train": [], "eval": []}
    for prompt in prompts:
        split["eval" if is_held_out(prompt.identity, HELD_OUT_SHARE) else "train"].append(prompt)
    if not split["train"]:
        raise UserError(
            f"data: all {len(split['eval'])} prompts fell to the held-out split; give more data, or data.eval_path"
        )
    return split
