"""Endless stream of training prompts. The order follows from a seed, differs between epochs, and is the same on every rank."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from megatron_rl.errors import UserError
from megatron_rl.tasks.preferences import Comparison
from megatron_rl.tasks.sampled_demonstrations import TEACHER_IDS, TEACHER_LOG_PROBS
from megatron_rl.tasks.task import Prompt, Task

if TYPE_CHECKING:
    from megatron_rl.data.sequence import Sequence as Tokens

log = logging.getLogger(__name__)

SHOWN = 5
"""Largest number of skipped prompts that the log names. Thousands may be skipped."""


class Form(Protocol):
    """Interface of the rollout program (`rollout.program`) that converts prompts, demonstrations and preferences to tokens."""

    def encode(self, prompt: Prompt) -> Prompt:
        """Return the prompt with its tokens."""
        ...

    def demonstration(self, prompt: Prompt, rng: random.Random) -> Tokens:
        """Return the tokens of a demonstration for an encoded prompt."""
        ...

    def document(self, text: str) -> Tokens:
        """Return a text as a token sequence in which all tokens are learned."""
        ...

    def check_tokens(self, prompt: Prompt) -> None:
        """Raise UserError if the prompt's recorded demonstration was tokenized with another tokenizer."""
        ...

    def check_tools(self, prompt: Prompt) -> None:
        """Raise UserError if a prompt shows a tool that the run does not have."""
        ...

    def comparison(self, prompt: Prompt, rng: random.Random) -> Comparison:
        """Return the tokens of the scored responses to an encoded prompt."""
        ...


def check_forms(
    prompts: Sequence[Prompt], form: Form, learned: Callable[[Prompt, random.Random], object] | None = None
) -> None:
    """Encode one prompt of each form of conversation, with its demonstration or comparison, to find errors before training.

    learned: form.demonstration or form.comparison; None if the run samples responses. Errors: UserError naming the first prompt
    that the chat template or the program does not accept.
    """
    seen: set[Any] = set()
    for prompt in prompts if isinstance(prompts, list) else ():  # a procedural task generates prompts one by one
        if learned is None:
            form.check_tools(prompt)
        shape = _shape(prompt)
        if shape in seen or prompt.document or prompt.recorded:
            continue
        seen.add(shape)
        encoded = form.encode(prompt)
        if learned is not None:
            learned(encoded, random.Random(0))


def _shape(prompt: Prompt) -> Any:
    """Return the features of a prompt that a chat template may depend on: successive pairs of messages, with their fields."""
    judged = prompt.preference.judged if prompt.preference else ()
    shapes = []
    for messages in (prompt.messages, prompt.response, *(one.response for one in judged)):
        fields = [(m["role"], *sorted(m)) for m in messages] if isinstance(messages, list) else [str(type(messages))]
        shapes.append(frozenset(zip([None, *fields], [*fields, None], strict=True)))
    return bool(prompt.tools), *shapes


def fitting(prompts: Sequence[Prompt], form: Form, context_length: int, max_new_tokens: int) -> list[Prompt]:
    """Tokenize held-out prompts, and drop prompts that leave no room for max_new_tokens. The log counts the dropped ones.

    Errors: UserError if there are prompts, but none fits.
    """
    encoded = [form.encode(prompt) for prompt in prompts]
    short = [p for p in encoded if len(p.tokens) + max_new_tokens <= context_length]
    if encoded and not short:
        raise _none_fits(len(encoded), "held-out prompts", context_length, max_new_tokens)
    if count := len(encoded) - len(short):
        longest = max(len(p.tokens) for p in encoded)
        log.warning(
            f"data: {count} of {len(encoded)} held-out prompts skipped: with rollout.max_new_tokens {max_new_tokens} they"
            f" exceed rollout.context_length {context_length}; the longest has {longest} tokens"
        )
    return short


def demonstrations(prompt: Prompt, form: Form, rng: random.Random, context_length: int) -> list[Tokens]:
    """Return the token sequences to learn from a prompt: its demonstration, or its text in pieces of at most context_length."""
    if prompt.document:
        return form.document(prompt.text).cut(context_length)
    return [form.demonstration(prompt if prompt.recorded else form.encode(prompt), rng)]


def held_out_demonstrations(prompts: Sequence[Prompt], form: Form, context_length: int) -> list[Tokens]:
    """Return the tokens of held-out demonstrations and texts, the same in every call. The log counts those that are too long.

    Errors: UserError if there are demonstrations, but none fits.
    """
    found = [
        one
        for prompt in prompts
        for one in demonstrations(prompt, form, random.Random(f"eval/{prompt.prompt_id}"), context_length)
    ]
    fits = [demonstration for demonstration in found if len(demonstration.tokens) <= context_length]
    if len(fits) < len(found):
        problem = (
            f"data: {len(found) - len(fits)} of {len(found)} held-out demonstrations exceed rollout.context_length"
            f" {context_length}"
        )
        if not fits:
            raise UserError(f"{problem}: raise it, or set eval.prompts to 0")
        log.warning(f"{problem}, and are skipped")
    return fits


def held_out_comparisons(prompts: Sequence[Prompt], form: Form, context_length: int) -> list[Comparison]:
    """Return the comparisons of held-out prompts, the same in every call. The log counts unusable comparisons.

    Errors: UserError if there are comparisons, but none is usable.
    """
    found = [form.comparison(form.encode(p), random.Random(f"eval/{p.prompt_id}")) for p in prompts]
    problems = {one.prompt_id: problem for one in found if (problem := one.problem(context_length))}
    if problems:
        name, problem = next(iter(problems.items()))
        counted = f"data: {len(problems)} of {len(found)} held-out comparisons are skipped, {name} because {problem}"
        if len(problems) == len(found):
            raise UserError(f"{counted}: give others, or set eval.prompts to 0")
        log.warning(counted)
    return [one for one in found if one.prompt_id not in problems]


def _none_fits(count: int, what: str, context_length: int, max_new_tokens: int) -> UserError:
    return UserError(
        f"data: none of the {count} {what} leaves room for rollout.max_new_tokens {max_new_tokens} in"
        f" rollout.context_length {context_length}: raise rollout.context_length"
    )


class PromptStream:
    """Endless stream of a task's training prompts with their tokens.

    The order in epoch e depends only on (seed, e). The stream skips prompts without room for max_new_tokens, too long
    demonstrations, and unusable comparisons. It collects the ids of skipped prompts in `skipped` and logs the first few. It
    returns a long text in several consecutive pieces. Errors: UserError if nothing in an epoch fits.
    """

    def __init__(self, task: Task, form: Form, context_length: int, max_new_tokens: int, seed: int) -> None:
        self.task = task
        self.prompts = task.prompts("train")
        if not len(self.prompts):
            raise UserError(f"data: task '{task.name}' has no training prompt")
        self.form = form
        self.context_length = context_length
        self.max_new_tokens = max_new_tokens
        self.seed = seed
        self.skipped: set[str] = set()
        """Ids of the prompts that were skipped so far."""
        self._given = 0
        """Number of pieces of the current text that the stream has returned."""
        self._rest: list[Any] = []
        """Remaining pieces of the current text, if it has been encoded."""
        self._unwanted: Callable[[Prompt], bool] = lambda prompt: False
        self._start_epoch(0)

    def leave_out(self, unwanted: Callable[[Prompt], bool]) -> None:
        """Skip the prompts that an evaluation set (eval.sets) contains. Errors: UserError if no prompts remain."""
        if isinstance(self.prompts, list) and all(map(unwanted, self.prompts)):
            raise UserError(
                f"config: eval.sets has all {len(self.prompts)} training prompts of task '{self.task.name}', so none is left"
                " to learn from; give other data, or leave the set out"
            )
        self._unwanted = unwanted

    def check_room(self) -> None:
        """Raise UserError if no prompt leaves room for max_new_tokens. Called before servers start."""
        prompts = (self.prompts[index] for index in self._order)
        if not any(self._fits(self.form.encode(prompt)) for prompt in prompts if not self._unwanted(prompt)):
            raise _none_fits(len(self.prompts), "prompts", self.context_length, self.max_new_tokens)

    def check_demonstrations(self, *, taught: bool) -> None:
        """Check recorded demonstrations before a model is built.

        taught: every demonstration needs tokens and the log-probs of a teacher. Errors: UserError naming the first invalid one.
        """
        # A procedural task has no recorded demonstrations, and generating all of its prompts would take seconds.
        for prompt in self.prompts if taught or isinstance(self.prompts, list) else ():
            if taught and (prompt.recorded is None or prompt.recorded.teacher_token_ids is None):
                raise UserError(
                    f"config: distillation.recorded: {prompt.prompt_id} has no log-probs of a teacher"
                    f" ('{TEACHER_IDS}', '{TEACHER_LOG_PROBS}'); record them with rollout.demonstrations.top_log_probs"
                )
            self.form.check_tokens(prompt)

    def _fits(self, prompt: Prompt) -> bool:
        return len(prompt.tokens) + self.max_new_tokens <= self.context_length

    def _start_epoch(self, epoch: int) -> None:
        self.epoch, self.position, self._taken = epoch, 0, 0
        self._given, self._rest = 0, []
        self._order = list(range(len(self.prompts)))
        random.Random(f"{self.seed}/{epoch}").shuffle(self._order)

    def next(self, count: int) -> list[Prompt]:
        """Return the next `count` prompts that fit."""

        def examine(prompt: Prompt) -> tuple[list[Prompt], str]:
            prompt = self.form.encode(prompt)
            problem = (
                f"data: prompt {prompt.prompt_id} skipped: its {len(prompt.tokens)} tokens + rollout.max_new_tokens"
                f" {self.max_new_tokens} exceed rollout.context_length {self.context_length}"
            )
            return [prompt], "" if self._fits(prompt) else problem

        return self._take(count, examine, f"prompts leaves room for rollout.max_new_tokens {self.max_new_tokens} in")

    def next_demonstrations(self, count: int, rng: random.Random) -> list[Tokens]:
        """Return the next `count` demonstrations (or pieces of texts) that fit into context_length."""

        def examine(prompt: Prompt) -> tuple[list[Tokens], str]:
            found = demonstrations(prompt, self.form, rng, self.context_length)
            if not found:
                return [], f"data: text {prompt.prompt_id} skipped: it needs at least two tokens"
            total = len(found[0].tokens)
            problem = (
                f"data: demonstration {prompt.prompt_id} skipped: its {total} tokens, the prompt's {found[0].prompt_length}"
                f" included, exceed rollout.context_length {self.context_length}"
            )
            return found, problem if total > self.context_length else ""

        return self._take(count, examine, "demonstrations fits into")

    def next_comparisons(self, count: int, rng: random.Random) -> list[Comparison]:
        """Return the next `count` comparisons whose responses all fit into context_length."""

        def examine(prompt: Prompt) -> tuple[list[Comparison], str]:
            comparison = self.form.comparison(self.form.encode(prompt), rng)
            problem = comparison.problem(self.context_length)
            return [comparison], problem and f"data: comparison {prompt.prompt_id} skipped: {problem}"

        return self._take(count, examine, "comparisons has different responses that fit into")

    def _take[T](self, count: int, examine: Callable[[Prompt], tuple[list[T], str]], wanted: str) -> list[T]:
        """Return the next `count` usable items. examine: returns a prompt's items and the reason to skip it, or ''."""
        chosen: list[T] = []
        while len(chosen) < count:
            if self.position == len(self._order):
                if not self._taken:
                    raise UserError(
                        f"data: none of the {len(self.prompts)} {wanted} rollout.context_length {self.context_length}"
                    )
                self._start_epoch(self.epoch + 1)
            prompt, problem = self.prompts[self._order[self.position]], ""
            if self._unwanted(prompt):
                problem = f"data: prompt {prompt.prompt_id} skipped: an evaluation set (eval.sets) has it"
            elif not self._rest:
                found, problem = examine(prompt)
                self._rest = found[self._given :]
            if not problem:
                now, self._rest = self._rest[: count - len(chosen)], self._rest[count - len(chosen) :]
                chosen += now
                self._taken += len(now)
                self._given += len(now)
                if self._rest:
                    break
            self.position, self._given, self._rest = self.position + 1, 0, []
            if problem and prompt.prompt_id not in self.skipped:
                self.skipped.add(prompt.prompt_id)
                if len(self.skipped) <= SHOWN:
                    log.warning(problem)
                if len(self.skipped) == SHOWN:
                    log.warning("data: further skipped prompts are not named, but counted in data/skipped_prompts")
        return chosen

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the stream, for a checkpoint."""
        return {
            "seed": self.seed,
            "size": len(self.prompts),
            "epoch": self.epoch,
            "position": self.position,
            "given": self._given,
            "taken": self._taken,
            "skipped": sorted(self.skipped),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly at the position `state`. Errors: UserError if data or seed have changed since it was saved."""
        for key, now in (("seed", self.seed), ("size", len(self.prompts))):
            if state[key] != now:
                raise UserError(
                    f"checkpoint: the data stream had {key} {state[key]}, now it has {now}: resume with the same data,"
                    " or start a new run with checkpoint.load"
                )
        self._start_epoch(state["epoch"])
        self.position, self._taken, self.skipped = state["position"], state["taken"], set(state["skipped"])
        self._given = state.get("given", 0)
