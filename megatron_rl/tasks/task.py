"""Tasks: prompts, rewards for responses, and optionally demonstrations and preferences."""

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
"""Rewards of one response: {name of a reward part: value}."""


@dataclass(frozen=True)
class Prompt:
    """A prompt with the data that its verifier needs."""

    prompt_id: str
    """Id that is unique in the data set and stable over runs, for example `number_sorting:17` or `train.jsonl:3`."""
    text: str
    """Text of the prompt that the model sees. For a conversation, its last message."""
    answer: Any = None
    response: str | list[dict[str, Any]] | None = None
    """Demonstration for the prompt: a text, or the messages of a conversation."""
    messages: list[dict[str, Any]] | None = None
    """Messages of a conversation, which the tokenizer's chat template renders."""
    metadata: dict[str, Any] = field(default_factory=dict)
    preference: Preference | None = None
    """Responses to the prompt with their scores, for training on preferences."""
    document: bool = False
    """True if the text is not a prompt, but a document to learn as a whole."""
    recorded: Recorded | None = field(default=None, compare=False)
    """Demonstration recorded as tokens. The trainer learns these tokens; the texts are only for readers."""
    tokens: list[int] = field(default_factory=list)
    """Tokens of the prompt, set by `encode`."""
    tools: list[dict[str, Any]] = field(default_factory=list)
    """Schemas of the tools that only this prompt offers, if it has its own tools."""

    @property
    def identity(self) -> str:
        """Key that only equal prompts share: the text, or the conversation and its tools if the prompt has them."""
        if not self.tools and self.messages in (None, [{"role": "user", "content": self.text}]):
            return self.text
        asked = self.messages if self.messages is not None else self.text
        return json.dumps([asked, self.tools], sort_keys=True, default=repr)

    def encode(self, tokenizer: PreTrainedTokenizerBase) -> Prompt:
        """Return a copy of the prompt with its tokens, including the special tokens that the tokenizer puts before a response.

        Errors: UserError naming the prompt, if the tokenizer or its chat template does not accept it or changes it.
        """
        what = f"data: prompt {self.prompt_id}"
        try:
            check_text([self.text, self.messages])
        except ValueError as error:
            raise UserError(f"{what}: {error}") from None
        if self.messages is None:
            if self.tools:
                raise UserError(
                    f"{what} is a text, which cannot show its tools; set data.chat: true, rollout.program: agent, or"
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
    """Base class of all tasks. A subclass implements `prompts` and `score`, and optionally `demonstration` or `comparison`."""

    name: str = ""
    parts: tuple[str, ...] = ("correct",)
    """Names of the reward parts that `score` returns for each response."""
    main_parts: tuple[str, ...] = ("correct",)
    """Names of the parts that have weight 1 unless the config sets another weight. All other parts have weight 0."""
    verifier: str | None = None
    """Name of the task's own verifier, if it has one. data.verifier must then have the same name or be unset."""
    later_parts: tuple[str, ...] = ()
    """Names of parts that are computed after the response is complete, by reward models or from its length
    (`rollout.later_rewards`)."""
    program: str | None = None
    """The only rollout program that works with the task; None if there are several."""
    weights: dict[str, float]
    """{name of a part: weight}, set by `build_task` from data.rewards."""

    def __init__(self, data: DataConfig, demonstrations: bool = False):
        """demonstrations: True if the prompts are for SFT. Errors: UserError for missing data or settings that do not fit."""
        self.data, self.demonstrations = data, demonstrations
        self.name = self.name or data.task

    def prompts(self, split: Split) -> Sequence[Prompt]:
        """Return the prompts of a split, without tokens, possibly as a lazy sequence. The splits share no prompt.

        Prompts with equal `Prompt.identity` are the same prompt.
        """
        raise NotImplementedError

    def score(self, prompts: Sequence[Prompt], texts: Sequence[str], truncated: Sequence[bool] = ()) -> list[Parts]:
        """Return the reward parts of each texts[i] as a response to prompts[i]. A text never makes it raise an exception.

        truncated[i]: True if the response was cut off at the length limit. Empty: no response was cut off.
        """
        raise NotImplementedError

    def rewards(self, prompt: Prompt, response_text: str) -> Parts:
        """Return the reward parts of one response."""
        return self.score([prompt], [response_text])[0]

    def extract(self, text: str) -> str:
        """Return a response's answer in a form in which equal answers are equal strings (for maj@n and distinct@n)."""
        return text.strip()

    def tools(self) -> Sequence[Tool]:
        """Return the task's own tools, which are added to agent.tools."""
        return ()

    def environment(self, prompt: Prompt, toolbox: Toolbox) -> Environment:
        """Return the environment for a conversation about the prompt (rollout.program: agent).

        The default answers tool calls.
        """
        return Environment(toolbox)

    def agent(self) -> Callable[[Prompt, str], Any] | None:
        """Return the task's agent for rollout.program: openai_agent, or None. It is used if agent.function is not set."""
        return None

    async def open(self) -> None:
        """Start what the task's agent needs. Called once, in the agent's event loop. Errors: ToolLost."""

    def demonstration(self, prompt: Prompt, rng: random.Random) -> str | list[dict[str, Any]]:
        """Return a response that SFT learns: a text, or messages in OpenAI's format (roles assistant and tool).

        Errors: UserError if the task has no demonstrations.
        """
        if prompt.response is None:
            raise UserError(f"data.task '{self.name}' has no demonstrations, so it cannot be used for SFT")
        return prompt.response

    def comparison(self, prompt: Prompt, rng: random.Random) -> Preference:
        """Return scored responses for preference training. Errors: UserError if the task has no preferences."""
        if prompt.preference is None:
            raise UserError(
                f"data.task '{self.name}' has no preferences, so it cannot be used for reward models or DPO"
            )
        return prompt.preference

    def close(self) -> None:
        """Stop the task's worker processes."""


def check_options(data: DataConfig, known: Iterable[str]) -> None:
    """Raise UserError for a key of data.options that the task does not know."""
    for name in data.options:
        if name not in known:
            raise UserError(f"config: unknown key 'data.options.{name}' of task '{data.task}'{nearest(name, known)}")


def read_options[T](data: DataConfig, kind: type[T]) -> T:
    """Read data.options as the fields of a pydantic dataclass. Errors: UserError naming the key."""
    check_options(data, [field.name for field in dataclasses.fields(kind)])  # pyright: ignore[reportArgumentType]
    try:
        return TypeAdapter(kind).validate_python(data.options)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"])) or "*"
        raise UserError(f"config: data.options.{key}: {first['msg']}") from None


def resolve_weights(task: Task, rewards: dict[str, float]) -> dict[str, float]:
    """Return {part: weight} for all parts of the task. Errors: UserError for a part that the task does not have."""
    for part in rewards:
        if part not in task.parts:
            raise UserError(
                f"config: data.rewards has '{part}', which task '{task.name}' does not give{nearest(part, task.parts)}"
            )
    return {part: float(rewards.get(part, part in task.main_parts)) for part in task.parts}


def combine(parts: Parts, weights: dict[str, float]) -> float:
    """Return the reward: the weighted sum of the parts."""
    return sum(weights[name] * value for name, value in parts.items())


def is_held_out(identity: str, share: float) -> bool:
    """Return True if a prompt belongs to the held-out split. Only its hash decides, so equal prompts are in the same split."""
    digest = hashlib.blake2b(identity.encode(errors="surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big") < share * 2**64


def split_by_hash(prompts: Iterable[Prompt]) -> dict[Split, list[Prompt]]:
    """Split prompts by the hash of their identity: one in ten is held out. Errors: UserError if none is left for training."""
    split: dict[Split, list[Prompt]] = {"train": [], "eval": []}
    for prompt in prompts:
        split["eval" if is_held_out(prompt.identity, HELD_OUT_SHARE) else "train"].append(prompt)
    if not split["train"]:
        raise UserError(
            f"data: all {len(split['eval'])} prompts fell to the held-out split; give more data, or data.eval_path"
        )
    return split
