"""Rollout programs (`rollout.program`), which turn prompts into tokens and request responses."""

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
    """Rollout program whose samples are single responses to a prompt. Other programs are subclasses.

    Each process makes one program for the run.
    """

    collection: type[Collection] = Collection
    """Class that requests the responses of a step."""
    parts: tuple[str, ...] = ()
    """Reward parts that the program adds to those of the task; their weight is 0 unless data.rewards sets another."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase, task: Task, ranks: Ranks) -> None:
        """Check the config against the task. Every process makes a program. Errors: UserError for a wrong config."""
        self.config, self.tokenizer, self.task, self.ranks = config, tokenizer, task, ranks
        self._harmony = speaks_harmony(tokenizer)
        self._check_task(task)

    def _check_task(self, task: Task) -> None:
        if task.program not in (None, self.config.rollout.program):
            raise UserError(f"config: data.task: {task.name} needs rollout.program: {task.program}")

    def with_task(self, task: Task) -> Self:
        """Return the program for prompts of another task (that of an evaluation set); open resources are shared.

        Errors: UserError if this program cannot send the task's prompts.
        """
        self._check_task(task)
        other = copy.copy(self)
        other.task = task
        return other

    @cached_property
    def vocabulary(self) -> str:
        """Digest of the tokenizer, which is stored with recorded tokens."""
        return vocabulary_digest(self.tokenizer)

    def encode(self, prompt: Prompt) -> Prompt:
        """Return the prompt with its tokens. Errors: UserError for a conversation with a model that uses Harmony channels."""
        if prompt.messages is not None and self._harmony:
            raise UserError(
                "config: rollout.program: the model thinks and answers on channels (Harmony), and a single response would be"
                " scored with both in it; set rollout.program: agent, agent.dialect: harmony and agent.max_turns: 1"
            )
        return prompt.encode(self.tokenizer)

    def check_tools(self, prompt: Prompt) -> None:
        """Check a prompt before it is sent. Errors: UserError if the prompt defines a tool whose calls nobody answers."""

    @cached_property
    def end_of_turn(self) -> list[int]:
        """Token with which the chat template ends a turn of the model, as a list of one id."""
        return end_of_turn(self.tokenizer)

    @cached_property
    def _converses(self) -> bool:
        prompts = self.task.prompts("train") or self.task.prompts("eval")
        some = prompts if isinstance(prompts, list) else prompts[:1]  # other collections make prompts one by one
        return any(prompt.messages is not None for prompt in some)

    @property
    def stop_token_ids(self) -> list[int]:
        """Tokens that end a response, in addition to the end-of-sequence token: for conversations, the end-of-turn token."""
        return self.end_of_turn if self._converses else []

    def demonstration(self, prompt: Prompt, rng: random.Random) -> Sequence:
        """Return a demonstration of the task to train on.

        prompt: encoded, unless it has recorded tokens, which are used unchanged.
        Errors: UserError if the task has no demonstration, or if the recorded tokens belong to another tokenizer.
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
        """Raise UserError if the prompt's demonstration consists of tokens of another tokenizer."""
        if prompt.recorded is not None and prompt.recorded.tokenizer != self.vocabulary:
            of = f"of tokenizer {prompt.recorded.tokenizer}" if prompt.recorded.tokenizer else "of an unnamed tokenizer"
            raise UserError(
                f"data: the tokens of {prompt.prompt_id} are {of}, and the model's is {self.vocabulary}; set data.tokens_key:"
                " null to learn from the texts, or use a model with the same tokenizer"
            )

    def document(self, text: str) -> Sequence:
        """Return a sequence that trains on a whole text: the loss includes its tokens and a final end-of-sequence token.

        The beginning-of-sequence token comes first. If the tokenizer has none, nothing predicts the first token of the text.
        """
        start: Any = self.tokenizer.bos_token_id
        tokens, sizes = encode_text(self.tokenizer, text, end_of_sequence(self.tokenizer))
        if start is not None:
            tokens, sizes = [start, *tokens], [0, *sizes]
        found = Sequence.demonstration(tokens[:1], tokens[1:])
        found["text_bytes"] = np.asarray(sizes[1:])
        return found

    def comparison(self, prompt: Prompt, rng: random.Random) -> Comparison:
        """Return the responses to a prompt that the task compares. prompt: encoded. Errors: UserError if the task has none."""
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
        """Return prompt and response as one sequence, as if the model had written the response and its end token.

        prompt: encoded. Errors: UserError for a response that the model could not give.
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
        """Return prompt and steps as one sequence, and the position of each step's last token in the response.

        prompt: encoded.
        """
        empty = self.sequence(prompt, "")
        frame = empty.tokens[empty.prompt_length :].tolist()  # tokens around an answer; the last is the end token
        before, end = frame[:-1], frame[-1:]
        tokens, ends = encode_steps(self.tokenizer, (step.text for step in steps))
        return Sequence.demonstration(prompt.tokens, before + tokens + end), [len(before) + place for place in ends]

    def collect(self, **settings: Any) -> Collection:
        """Return the collection of a step, or of an evaluation. settings: fields of `Collection`."""
        if self.collection.trajectories is not Collection.trajectories:  # samples of a request are not known here
            settings = {name: value for name, value in settings.items() if name not in ("known", "on_finished")}
            settings["features_from"] = 0
        return self.collection(**settings)

    def check(self, collection: Collection) -> None:
        """Check a collection, on every process. Errors: UserError if the run should not continue with it."""

    def close(self) -> None:
        """Stop what the program has started."""
