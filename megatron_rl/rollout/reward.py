"""The rewards of responses."""

from __future__ import annotations

from collections.abc import Sequence

from transformers import PreTrainedTokenizerBase

from megatron_rl.data.trajectory import Trajectory
from megatron_rl.environments import Prompt, Task, combine


def give_rewards(
    task: Task, tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], trajectories: list[Trajectory]
) -> list[Trajectory]:
    """The trajectories with text, reward parts and reward. prompts: those that their group ids count."""
    texts = tokenizer.batch_decode(
        [t.tokens[t.prompt_length :].tolist() for t in trajectories], skip_special_tokens=True
    )
    asked = [prompts[t.group_id] for t in trajectories]
    truncated = [t.finish_reason == "length" for t in trajectories]
    for t, text, parts in zip(trajectories, texts, task.score(asked, texts, truncated), strict=True):
        t.text, t.reward_parts, t.reward = text, parts, combine(parts, task.weights)
    return trajectories
