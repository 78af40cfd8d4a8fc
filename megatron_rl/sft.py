"""Supervised fine-tuning on the task's demonstrations, with the same trainer: the quickstart's warm start."""

from __future__ import annotations

import random

from megatron_rl.config import Config
from megatron_rl.data.balance import plan_updates
from megatron_rl.data.sequence import Sequence
from megatron_rl.environments.stream import held_out_demonstrations
from megatron_rl.launch.from_data import Learned, learn_from_data
from megatron_rl.launch.run import Run
from megatron_rl.metrics.reduce import figures, mean, over_ranks
from megatron_rl.trainer.objective import SFT


def sft(config: Config) -> None:
    """config.steps updates on batch.prompts_per_step demonstrations each; ends with a Hugging Face folder `hf/`."""
    with Run(config, kind="sft") as run:
        trainer = run.build()
        held_out = held_out_demonstrations(run.held_out, run.program, config.rollout.context_length)

        def learn() -> Learned:
            rng = random.Random(f"{config.seed}/{run.step}")
            samples = run.stream.next_demonstrations(config.batch.prompts_per_step, rng)
            [shares] = plan_updates([s.inputs for s in samples], updates=1, ranks=run.ranks.data_size)
            mine = [samples[i] for i in shares[run.ranks.data_rank]]
            return Learned(trainer.update(trainer.pack(mine), SFT()), mine)

        learn_from_data(run, learn, lambda: evaluate(run, held_out))


def evaluate(run: Run, demonstrations: list[Sequence]) -> dict[str, float]:
    """eval/loss: mean negative log-likelihood (nats a token) of the responses of held-out demonstrations. Collective."""
    if not demonstrations:
        return {}
    [shares] = plan_updates([s.inputs for s in demonstrations], updates=1, ranks=run.ranks.data_size)
    batches = run.trainer.pack([demonstrations[i] for i in shares[run.ranks.data_rank]])
    log_probs = run.trainer.compute_log_probs(batches)
    measured = [
        {"eval/loss": mean(-values.where(batch.mask, 0.0).sum(), batch.mask.sum())}
        for batch, values in zip(batches, log_probs, strict=True)
        if values is not None and run.trainer.reports
    ]
    scores = figures(over_ranks(run.ranks, measured))
    return scores | {"eval/prompts": float(len(demonstrations))}
