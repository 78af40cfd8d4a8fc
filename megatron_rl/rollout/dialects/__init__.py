"""How a model is told of tools, calls them and is answered: tokens on one side, calls and results on the other."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from megatron_rl.registry import resolve
from megatron_rl.rollout.dialects.base import Call, Dialect, Parsed, without_end
from megatron_rl.rollout.dialects.qwen import Qwen
from megatron_rl.rollout.dialects.react import ReAct

DIALECTS: dict[str, type[Dialect]] = {"qwen": Qwen, "react": ReAct}

__all__ = ["DIALECTS", "Call", "Dialect", "Parsed", "dialect", "without_end"]


def dialect(name: str, tokenizer: PreTrainedTokenizerBase) -> Dialect:
    """The dialect of that name, or the user's own by `module:name`. Errors: UserError for a name that is not there."""
    return resolve("dialect", name, DIALECTS, "agent.dialect")(tokenizer)
