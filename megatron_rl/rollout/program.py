"""Rollout programs (`rollout.program`): how prompts become tokens, and how responses are asked for."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from transformers import PreTrainedTokenizerBase

from megatron_rl.config import Config
from megatron_rl.data.sequence import Sequence, TopLogProbs
from megatron_rl.dialects.harmony_ids import speaks_harmony
from megatron_rl.errors import UserError
from megatron_rl.models.hf_folder import vocabulary_digest
from megatron_rl.rollout.collect import Collection
from megatron_rl.tasks import Prompt, Step, Task, encode_text
from megatron_rl.tasks.chat import end_of_sequence, end_of_turn
from megatron_rl.tasks.preferences import Comparison, Preference, Response, encode_steps

if TYPE_CHECKING:
    from megatron_rl.distributed.parallel import Ranks


class SingleTurn:
    """One response to each prompt. Other programs are subclasses; one object serves the whole run, on each process."""

    collection: type[Collection] = Collection
    """How the responses of a step are asked for."""
    parts: tuple[str, ...] = ()
    """Reward parts that the program adds to the task's; they weigh 0 unless data.rewards says otherwise."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase, task: Task, ranks: Ranks) -> None:
        """Every process makes one. Errors: UserError for what the config has wrong."""
        self.config, self.tokenizer, self.task, self.ranks = config, tokenizer, task, ranks
        self._harmony = speaks_harmony(tokenizer)
        self._check_task(task)

    def _check_task(self, task: Task) -> None:
        if task.program not in (None, self.config.rollout.program):
            raise UserError(f"config: data.task: {task.name} needs rollout.program: {task.program}")

    def with_task(self, task: Task) -> Self:
        """The same for prompts of another task, those of an evaluation set; what is open is shared.

        Errors: UserError where they cannot be asked in this way.
        """
        self._check_task(task)
        other = copy.copy(self)
        other.task = task
        return other

    @cached_property
    def vocabulary(self) -> str:
        """The tokenizer's digest, which goes with recorded tokens."""
        return vocabulary_digest(self.tokenizer)

    def encode(self, prompt: Prompt) -> Prompt:
        """The prompt with its tokens. Errors: UserError for a conversation that a model answers on several channels."""
        if prompt.messages is not None and self._harmony:
            raise UserError(
                "config: rollout.program: the model thinks and answers on channels (Harmony), and a single response would be"
                " judged with both in it; set rollout.program: agent, agent.dialect: harmony and agent.max_turns: 1"
            )
        return prompt.encode(self.tokenizer)

    def check_tools(self, prompt: Prompt) -> None:
        """Look at a prompt to ask. Errors: UserError where it tells of a tool of its own that nobody answers."""

    @cached_property
    def end_of_turn(self) -> list[int]:
        """The token [1] that ends a response to a conversation, as the chat template has it."""
        return end_of_turn(self.tokenizer)

    @cached_property
    def _converses(self) -> bool:
        prompts = self.task.prompts("train") or self.task.prompts("eval")
        some = prompts if isinstance(prompts, list) else prompts[:1]  # others are made one by one
        return any(prompt.messages is not None for prompt in some)

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end a response, beside the end of sequence: where there are conversations, the template's of a turn."""
        return self.end_of_turn if self._converses else []

    def demonstration(self, prompt: Prompt, rng: random.Random) -> Sequence:
        """A demonstration of the task to learn from. prompt: encoded, unless it brings tokens, which are taken as they are.

        Errors: UserError where the task has none, or tokens are another tokenizer's.
        """
        recorded = prompt.recorded
        if recorded is None:
            return self.sequence(prompt, self.task.demonstration(prompt, rng))
        self.check_tokens(prompt)
        found = Sequence.demonstration(recorded.prompt.tolist(), recorded.response.tolist())
        found["loss_mask"] = recorded.loss_mask
        if recorded.teacher_token_ids is not None and recorded.teacher_log_probs is not None:
            found.top = TopLogProbs(recorded.teacher_token_ids, recorded.teacher_log_probs)
        return found

    def check_tokens(self, prompt: Prompt) -> None:
        """Errors: UserError where the prompt's demonstration came as tokens of another tokenizer."""
        if prompt.recorded is not None and prompt.recorded.tokenizer != self.vocabulary:
            of = f"of tokenizer {prompt.recorded.tokenizer}" if prompt.recorded.tokenizer else "of an unnamed tokenizer"
            raise UserError(
                f"data: the tokens of {prompt.prompt_id} are {of}, and the model's is {self.vocabulary}; set data.tokens_key:"
                " null to learn the texts, or take a model with the same tokenizer"
            )

    def document(self, text: str) -> Sequence:
        """A text that is learned whole, as it stands: each of its tokens counts, and the end-of-sequence token behind them.

        In front is the beginning-of-sequence token; where the tokenizer has none, nothing predicts the first token of the text.
        """
        start: Any = self.tokenizer.bos_token_id
        tokens, sizes = encode_text(self.tokenizer, text, end_of_sequence(self.tokenizer))
        if start is not None:
            tokens, sizes = [start, *tokens], [0, *sizes]
        found = Sequence.demonstration(tokens[:1], tokens[1:])
        found["text_bytes"] = np.asarray(sizes[1:])
        return found

    def comparison(self, prompt: Prompt, rng: random.Random) -> Comparison:
        """The task's judged responses. prompt: encoded. Errors: UserError where the task has none."""
        preference = self.task.comparison(prompt, rng)
        if not isinstance(preference, Preference):
            raise UserError(f"data.task: {self.task.name}.comparison gives {preference!r:.60}, no Preference")
        return Comparison.of(
            prompt.prompt_id,
            preference,
            whole=lambda response: self.sequence(prompt, response),
            stepwise=lambda steps: self.stepwise(prompt, steps),
        )

    def sequence(self, prompt: Prompt, response: Response) -> Sequence:
        """A response as if the model had written it, with the end of a turn, or where the prompt is a text of a sequence.

        prompt: encoded. Errors: UserError for what it could not have.
        """
        if not isinstance(response, str):
            raise UserError(f"data: the response to {prompt.prompt_id} is a conversation; set rollout.program: agent")
        end = end_of_sequence(self.tokenizer) if prompt.messages is None else self.end_of_turn
        try:
            tokens, sizes = encode_text(self.tokenizer, response, end)
        except ValueError as error:
            raise UserError(f"data: the response to {prompt.prompt_id}: {error}") from None
        found = Sequence.demonstration(prompt.tokens, tokens)
        found["text_bytes"] = np.asarray(sizes)
        return found

    def stepwise(self, prompt: Prompt, steps: Iterable[Step]) -> tuple[Sequence, list[int]]:
        """A response in steps, and the places of their last tokens in it. prompt: encoded."""
        empty = self.sequence(prompt, "")
        frame = empty.tokens[empty.prompt_length :].tolist()  # what stands around an answer; an end token is its last
        before, end = frame[:-1], frame[-1:]
        tokens, ends = encode_steps(self.tokenizer, (step.text for step in steps))
        return Sequence.demonstration(prompt.tokens, before + tokens + end), [len(before) + place for place in ends]

    def collect(self, **settings: Any) -> Collection:
        """The collection of a step, or of an evaluation. settings: fields of `Collection`."""
        if self.collection.trajectories is not Collection.trajectories:  # what becomes of a request is not known here
            settings = {name: value for name, value in settings.items() if name not in ("known", "on_finished")}
            settings["features_from"] = 0
        return self.collection(**settings)

    def check(self, collection: Collection) -> None:
        """Look at what has been collected, on every process. Errors: UserError where the run should not go on with it."""

    def close(self) -> None:
        """End what it has started."""
