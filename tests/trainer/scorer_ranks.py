"""What each rank does in test_scorers.py: reward models score trajectories by passes under one parallel layout."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
from layouts import make_config
from ranks import end_layout
from transformers import PreTrainedTokenizerBase

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.config.load import build_config
from megatron_rl.config.plan import share_of
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.distributed import parallel
from megatron_rl.models.hf_folder import read_tokenizer
from megatron_rl.rewards.rewards import Rewards
from megatron_rl.tasks import Prompt
from megatron_rl.trainer.trainer import build_trainer

COUNT, LONGEST = 9, 30
STEPS = {"steps": True, "step_separator": "\n", "sigmoid": True, "step_aggregation": "mean"}


def make_trajectories(seed: int) -> list[Trajectory]:
    """Some with tokens of tools, one that is masked, one that a limit has ended."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(COUNT):
        prompt, response = int(rng.integers(1, 15)), int(rng.integers(3, LONGEST))
        mask = np.ones(response, bool)
        mask[int(rng.integers(0, response - 1)) :][:2] = number % 2 == 0
        mask[0] = True
        found.append(
            Trajectory(
                prompt_id=str(number),
                group_id=number,
                tokens=rng.integers(4, 64, prompt + response).astype(np.int32),
                prompt_length=prompt,
                fields={"loss_mask": mask},
                finish_reason="turns" if number == 4 else "stop",
                masked=number == 2,
                reward_parts={"liked": 0.0},
            )
        )
    return found


def make_texts(seed: int, tokenizer: PreTrainedTokenizerBase) -> list[Trajectory]:
    """Responses in lines: some cut off, some without a last line break, one that says nothing and one masked."""
    rng = np.random.default_rng(seed)
    found = []
    for number in range(COUNT):
        lines = ["".join(rng.choice([*"abc =+12é", "数"], int(rng.integers(0, 7)))) for _ in range(rng.integers(1, 5))]
        text = "" if number == 5 else "\n".join(lines)
        cut = number % 3 == 0
        prompt = rng.integers(4, 64, int(rng.integers(1, 15))).tolist()
        response = tokenizer.encode(text, add_special_tokens=False) + ([] if cut else [tokenizer.eos_token_id])
        found.append(
            Trajectory(
                prompt_id=str(number),
                group_id=number,
                tokens=np.asarray([*prompt, *response], np.int32),
                prompt_length=len(prompt),
                fields={"loss_mask": np.ones(len(response), bool)},
                finish_reason="length" if cut else "stop",
                text=text,
                masked=number == 2,
                reward_parts={"steps": 0.0, "wise": 0.0},
            )
        )
    return found


def score(
    model: str, classifier: str, judge: str, seed: int, layouts: list[dict[str, Any]]
) -> list[tuple[dict[str, float], dict[str, tuple[float, list[float]]]]]:
    """Layout by layout, by ids: rewards of all trajectories; reward and step_scores of all texts, at which a judge looks too.

    Scores are normalized, as in a step of training; those of steps are probabilities, and -1 is none.
    """
    results = []
    for layout in layouts:
        models = {"liked": {"path": classifier, "normalize": True}}
        config = make_config(model, {"rewards": {"models": models}} | layout)
        ranks = parallel.initialize(config.parallel, config.seed)
        task: Any = SimpleNamespace(weights={"liked": 2.0})
        rewards = Rewards(config.rewards, ranks, task, max_new_tokens=LONGEST, zero_truncated=True)
        rewards.build(
            lambda folder, layout=layout, ranks=ranks: build_trainer(
                make_config(folder, layout), ranks, total_updates=None, support=SamplingSupport(), value_head=True
            )
        )
        share = share_of(COUNT, ranks.data_rank, ranks.data_size) if ranks.is_leader else range(0)
        mine = [t for t in make_trajectories(seed) if t.group_id in share]
        rewards.score(mine, [Prompt("p", "")] * COUNT, learns=True)
        found = ranks.gather({t.prompt_id: t.reward for t in mine})
        judges = {"wise": {"address": judge, "model": "m", "scale": [0, 100], "max_failures": 1.0, "retries": 0}}
        steps = build_config({"rewards": {"models": {"steps": {"path": classifier, **STEPS}}, "judges": judges}})
        of_steps: Any = SimpleNamespace(weights={"steps": 2.0, "wise": 1.0})
        by_steps = Rewards(steps.rewards, ranks, of_steps, max_new_tokens=LONGEST)
        by_steps.check([Prompt("p", "")])
        by_steps.build(lambda folder, rewards=rewards: rewards.models["liked"])
        texts = [t for t in make_texts(seed, read_tokenizer(classifier)) if t.group_id in share]
        by_steps.score(texts, [Prompt("p", "")] * COUNT, learns=True)
        scored = ranks.gather(
            {t.prompt_id: (t.reward, np.nan_to_num(t["step_scores"], nan=-1.0).tolist()) for t in texts}
        )
        results.append(
            tuple({number: one for part in each for number, one in part.items()} for each in (found, scored))
        )
        end_layout()
    return results
