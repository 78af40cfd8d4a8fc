"""Built-in rollout programs, by their names in rollout.program."""

from __future__ import annotations

from megatron_rl.agents.agent import Agents
from megatron_rl.agents.openai_agent import OpenAIAgents
from megatron_rl.config.registry import resolve
from megatron_rl.rollout.program import SingleTurn

PROGRAMS: dict[str, type[SingleTurn]] = {"single_turn": SingleTurn, "agent": Agents, "openai_agent": OpenAIAgents}


def rollout_program(name: str) -> type[SingleTurn]:
    """Return the built-in program with this name, or the user's own from `module:name`. Errors: UserError."""
    return resolve("rollout program", name, PROGRAMS, "rollout.program")
