"""Task VerifyIF: prompts with instructions that a program can verify (arXiv:2507.02833), in one turn or several (Multi-IF)."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from typing import TYPE_CHECKING, Any, override

from megatron_rl.config import DataConfig
from megatron_rl.errors import UserError
from megatron_rl.tasks.public_sets import PublicSet
from megatron_rl.tasks.task import Parts, Prompt
from megatron_rl.tools.tool import in_thread
from megatron_rl.tools.toolbox import Environment, Said
from megatron_rl.verifiers.instructions import PARTS, Instruction, listed, read

if TYPE_CHECKING:
    from megatron_rl.tools.toolbox import Toolbox

TURNS = "further_turns"
"""Name of a row's column and of a key in a prompt's metadata. Both hold (text, instructions) of each turn after the first."""


class VerifyIF(PublicSet):
    """Rows of IFEval, IFBench, IF_multi_constraints_upto5 or Multi-IF. Generated rows have the form of IFEval or Multi-IF.

    data.options: turns (number of turns in generated rows); skip_unscorable (True skips rows that this machine cannot check).
    """

    verifier = "instructions"
    known_options: tuple[str, ...] = (*PublicSet.known_options, "turns", "skip_unscorable")

    def __init__(self, data: DataConfig, demonstrations: bool = False):
        self.turns, self.skip = data.options.get("turns", 1), bool(data.options.get("skip_unscorable", False))
        if not isinstance(self.turns, int) or self.turns < 1:
            raise UserError(f"config: data.options.turns = {self.turns!r} is not a positive number of turns")
        super().__init__(data, demonstrations)
        self.main_parts = ("correct", "content")
        if any(prompt.metadata for prompts in self._split.values() for prompt in prompts):
            self.program = "agent"

    @override
    def convert(self, row: dict[str, Any]) -> dict[str, Any]:
        found = dict(row)
        prompt, answer = self.data.prompt_key, self.data.answer_key
        if "turn_1_prompt" in row:  # Multi-IF
            numbers = takewhile(lambda number: row.get(f"turn_{number}_prompt") not in (None, "", "None"), count(1))
            turns = [_turn(row, number) for number in numbers]
            if turns:
                (found[prompt], found[answer]), found[TURNS] = turns[0], turns[1:]
        elif "instruction_id_list" in row:  # IFEval and IFBench
            found[answer] = {name: row.get(name) for name in ("instruction_id_list", "kwargs")}
        elif "ground_truth" in row and "messages" in row:  # IF_multi_constraints_upto5
            found[prompt], found[answer] = row["messages"], row["ground_truth"]
        return found

    @override
    def _prompt(self, where: str, row: dict[str, Any]) -> Prompt:
        found = super()._prompt(where, row)
        if self.demonstrations:
            return found
        turns = [(found.text, found.answer), *row.get(TURNS, ())]
        for _, answer in turns:
            self._check(where, listed(answer))
        return replace(found, metadata={TURNS: turns[1:]} if turns[1:] else {})

    def _check(self, where: str, instructions: list[Instruction]) -> None:
        """Raise UserError for an instruction that this machine cannot check, or ValueError if such rows are skipped."""
        from megatron_rl.verifiers.instruction_checkers import build, lacking

        try:
            for name, arguments in instructions:
                if problem := lacking(name):
                    raise ValueError(problem)
                build(name, arguments)
        except ValueError as error:
            if self.skip:
                raise
            remedy = "leave such rows out with data.options.skip_unscorable: true"
            raise UserError(f"data: {where} cannot be scored: {error} (or {remedy})") from None

    @override
    def environment(self, prompt: Prompt, toolbox: Toolbox) -> Environment:
        return FurtherTurns(toolbox, task=self, prompt=prompt) if prompt.metadata else Environment(toolbox)

    @override
    def generate(self, rng: random.Random) -> dict[str, Any]:
        first = rng.randint(1, 3 if self.turns == 1 else 2)
        drawn = draw(rng, first + self.turns - 1)
        ids, arguments, texts = [d[0] for d in drawn], [d[1] for d in drawn], [d[2] for d in drawn]
        prompt = " ".join([rng.choice(REQUESTS).format(rng.choice(TOPICS)), *texts[:first]])
        if self.turns == 1:
            return {"prompt": prompt, "instruction_id_list": ids, "kwargs": arguments}
        row: dict[str, Any] = {}
        for turn, end in enumerate(range(first, len(drawn) + 1), 1):
            content = prompt if turn == 1 else texts[end - 1]
            row[f"turn_{turn}_prompt"] = json.dumps({"role": "user", "content": content})
            row[f"turn_{turn}_instruction_id_list"] = json.dumps(ids[:end])
            row[f"turn_{turn}_kwargs"] = json.dumps([json.dumps(given) for given in arguments[:end]])
        return row


def _turn(row: Mapping[str, Any], number: int) -> tuple[str, dict[str, Any]]:
    """Return (user's text, all instructions that apply) of a turn of a Multi-IF row. Errors: ValueError."""
    message = read(row[f"turn_{number}_prompt"])
    if not isinstance(message, Mapping) or not isinstance(message.get("content"), str):
        raise ValueError(f"turn_{number}_prompt is not a message")
    names = ("instruction_id_list", "kwargs")
    return message["content"], {name: row.get(f"turn_{number}_{name}") for name in names}


@dataclass
class FurtherTurns(Environment):
    """A conversation in which each turn adds an instruction and earlier ones still apply. The reward is the mean over turns.

    Turns that the conversation does not reach count as 0.
    """

    task: VerifyIF = None  # type: ignore[assignment]  # the fields of Environment have defaults
    prompt: Prompt = None  # type: ignore[assignment]
    scores: list[Parts] = field(default_factory=list)
    """Scores of the turns so far."""

    @override
    async def respond(self, turn: Said) -> list[Mapping[str, Any]] | None:
        if turn.final is None:
            return await super().respond(turn)
        further, done = self.prompt.metadata[TURNS], len(self.scores)
        asked = replace(self.prompt, answer=further[done - 1][1]) if done else self.prompt
        self.scores += await in_thread(self.task.score, [asked], [turn.final])
        return [{"role": "user", "content": further[done][0]}] if done < len(further) else None

    @override
    def reward_parts(self) -> dict[str, float]:
        turns = 1 + len(self.prompt.metadata[TURNS])
        return {part: sum(score[part] for score in self.scores) / turns for part in PARTS}


REQUESTS = (
    "Write a short text about {}.",
    "Tell a story in which {} matters.",
    "Explain to a child why people like {}.",
    "Write a letter to a friend about {}.",
    "Describe {} as if for a travel guide.",
    "Advertise {} to somebody who is in a hurry.",
)
TOPICS = (
    *("a lighthouse", "an old train", "the first snow", "a street market", "a garden at night", "a lost umbrella"),
    *("a mountain lake", "a bakery", "a chess club", "a small island", "a quiet library", "a village fair"),
)
WORDS = (
    *("river", "window", "bridge", "silver", "morning", "forest", "letter", "winter", "circle", "candle", "harbor"),
    *("mirror", "pocket", "orange", "shadow", "thunder", "velvet", "whistle"),
)
ENDINGS = ("That is all there is to say.", "Let us see what comes next.", "Thank you for reading this.")
Arguments = dict[str, Any]
DRAWN: dict[str, Callable[[random.Random], Arguments]] = {
    "keywords:existence": lambda rng: {"keywords": rng.sample(WORDS[:6], 2)},
    "keywords:frequency": lambda rng: {
        "keyword": rng.choice(WORDS[6:12]),
        "frequency": rng.randint(1, 3),
        "relation": "at least",
    },
    "keywords:forbidden_words": lambda rng: {"forbidden_words": rng.sample(WORDS[12:], 2)},
    "keywords:letter_frequency": lambda rng: {
        "letter": rng.choice("aeilnorst"),
        "let_frequency": rng.randint(3, 12),
        "let_relation": "at least",
    },
    "length_constraints:number_words": lambda rng: rng.choice(
        [
            {"num_words": rng.randint(20, 60), "relation": "at least"},
            {"num_words": rng.randint(100, 200), "relation": "less than"},
        ]
    ),
    "length_constraints:number_paragraphs": lambda rng: {"num_paragraphs": rng.randint(2, 4)},
    "detectable_content:number_placeholders": lambda rng: {"num_placeholders": rng.randint(1, 3)},
    "detectable_content:postscript": lambda rng: {"postscript_marker": "P.S."},
    "detectable_format:number_bullet_lists": lambda rng: {"num_bullets": rng.randint(2, 4)},
    "detectable_format:number_highlighted_sections": lambda rng: {"num_highlights": rng.randint(1, 3)},
    "detectable_format:title": lambda rng: {},
    "change_case:english_capital": lambda rng: {},
    "change_case:english_lowercase": lambda rng: {},
    "punctuation:no_comma": lambda rng: {},
    "startend:end_checker": lambda rng: {"end_phrase": rng.choice(ENDINGS)},
    "startend:quotation": lambda rng: {},
    "count:conjunctions": lambda rng: {"small_n": rng.randint(2, 4)},
    "count:numbers": lambda rng: {"N": rng.randint(1, 3)},
}
"""Instructions for generated rows, each with a function that draws its arguments. Any machine can check them. A response can
follow all of them together, except for pairs in CONFLICTS."""


def draw(rng: random.Random, most: int) -> list[tuple[str, Arguments, str]]:
    """Draw up to `most` instructions that do not conflict, as (name, arguments, text)."""
    from megatron_rl.verifiers.instruction_checkers import CONFLICTS, build

    found: list[tuple[str, Arguments, str]] = []
    for name in rng.sample(list(DRAWN), len(DRAWN)):
        if len(found) < most and not any(other in CONFLICTS.get(name, ()) for other, _, _ in found):
            arguments = DRAWN[name](rng)
            found.append((name, arguments, build(name, arguments)[1]))
    return found
