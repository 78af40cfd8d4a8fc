"""Rewards that verifiers, and environments of conversations, give to responses."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from megatron_rl.config.registry import nearest
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.errors import UserError
from megatron_rl.tasks import Prompt, Task, combine


def give_rewards(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    trajectories: list[Trajectory],
    *,
    zero_truncated: bool = False,
) -> list[Trajectory]:
    """Return the trajectories with text, reward parts and reward. prompts: the prompts that group ids refer to.

    Reward parts from a trajectory's environment are kept. Masked trajectories are not scored. Parts that are computed later are
    0 here. zero_truncated: all parts of responses that a limit ended are 0 (agent.on_truncation).
    """
    now, later = set(task.parts) - set(task.later_parts), dict.fromkeys(task.later_parts, 0.0)
    for t in trajectories:
        if not t.turns:
            t.text = str(tokenizer.decode(t.tokens[t.prompt_length :].tolist(), skip_special_tokens=True))
        if zero_truncated and t.truncated:
            t.reward_parts = dict.fromkeys(task.parts, 0.0)
    asked = [t for t in trajectories if not t.part and not t.masked and not t.reward_parts.keys() >= now]
    scored = task.score([prompts[t.group_id] for t in asked], [t.text for t in asked], [t.truncated for t in asked])
    for t, parts in zip(asked, scored, strict=True):
        t.reward_parts = parts | t.reward_parts
    for t in trajectories:
        t.reward_parts = later | t.reward_parts
    first = trajectories[0] if trajectories else None
    for t in trajectories:
        if t.part and first is not None:  # further sequences of a sample have the reward of its first
            t.reward_parts = first.reward_parts
        else:
            first = t
        if foreign := sorted(t.reward_parts.keys() - set(task.parts)):
            raise UserError(
                f"agent: the environment of {t.prompt_id} gives the reward part '{foreign[0]}', which task '{task.name}' does"
                f" not have{nearest(foreign[0], task.parts)}"
            )
        if t.masked:
            t.reward_parts = dict.fromkeys(task.parts, 0.0)
        t.reward = combine(t.reward_parts, task.weights)
    return trajectories
