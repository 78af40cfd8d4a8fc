"""The endless order in which prompts are asked: seeded, shuffled anew in each epoch, the same on every rank."""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from typing import Any

from megatron_rl.environments.task import Prompt, Task
from megatron_rl.errors import UserError

log = logging.getLogger(__name__)


def fitting(prompts: Sequence[Prompt], tokenizer, context_length: int, max_new_tokens: int) -> list[Prompt]:
    """Tokenised prompts that leave room for max_new_tokens; the others are logged (for evaluation sets)."""
    encoded = [prompt.encode(tokenizer) for prompt in prompts]
    short = [p for p in encoded if len(p.tokens) + max_new_tokens <= context_length]
    for prompt in encoded:
        if len(prompt.tokens) + max_new_tokens > context_length:
            log.warning("%s", _too_long(prompt, context_length, max_new_tokens))
    return short


def _too_long(prompt: Prompt, context_length: int, max_new_tokens: int) -> str:
    return (
        f"data: prompt {prompt.prompt_id} skipped: its {len(prompt.tokens)} tokens + rollout.max_new_tokens "
        f"{max_new_tokens} exceed rollout.context_length {context_length}"
    )


class PromptStream:
    """Training prompts of a task, tokenised, without end.

    Epoch e visits the prompts in an order that depends on (seed, e) alone. A prompt that leaves no room for
    max_new_tokens is skipped: logged once, counted in `skipped`. Errors: UserError where no prompt of an epoch fits.
    """

    def __init__(self, task: Task, tokenizer, context_length: int, max_new_tokens: int, seed: int):
        self.prompts = task.prompts("train")
        if not len(self.prompts):
            raise UserError(f"data: task '{task.name}' has no training prompt")
        self.tokenizer = tokenizer
        self.context_length = context_length
        self.max_new_tokens = max_new_tokens
        self.seed = seed
        self.skipped: set[str] = set()
        """Ids of the prompts that were too long so far."""
        self._start_epoch(0)

    def _start_epoch(self, epoch: int) -> None:
        self.epoch, self.position, self._taken = epoch, 0, 0
        self._order = list(range(len(self.prompts)))
        random.Random(f"{self.seed}/{epoch}").shuffle(self._order)

    def next(self, count: int) -> list[Prompt]:
        """The next `count` prompts that fit."""
        chosen: list[Prompt] = []
        while len(chosen) < count:
            if self.position == len(self._order):
                if not self._taken:
                    raise UserError(
                        f"data: none of the {len(self.prompts)} prompts leaves room for rollout.max_new_tokens"
                        f" {self.max_new_tokens} in rollout.context_length {self.context_length}"
                    )
                self._start_epoch(self.epoch + 1)
            prompt = self.prompts[self._order[self.position]].encode(self.tokenizer)
            self.position += 1
            if len(prompt.tokens) + self.max_new_tokens <= self.context_length:
                chosen.append(prompt)
                self._taken += 1
            elif prompt.prompt_id not in self.skipped:
                self.skipped.add(prompt.prompt_id)
                log.warning("%s", _too_long(prompt, self.context_length, self.max_new_tokens))
        return chosen

    def state_dict(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "size": len(self.prompts),
            "epoch": self.epoch,
            "position": self.position,
            "taken": self._taken,
            "skipped": sorted(self.skipped),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where `state` was taken. Errors: UserError where data or seed differ from then."""
        for key, now in (("seed", self.seed), ("size", len(self.prompts))):
            if state[key] != now:
                raise UserError(
                    f"checkpoint: the data stream had {key} {state[key]}, now it has {now}: resume with the same data,"
                    " or start a new run with checkpoint.load"
                )
        self._start_epoch(state["epoch"])
        self.position, self._taken, self.skipped = state["position"], state["taken"], set(state["skipped"])
