"""Supervised fine-tuning on demonstrations, continued pretraining on texts, and distillation from a teacher."""

from __future__ import annotations

import random

from megatron_rl.config import Config
from megatron_rl.data.balance import plan_updates
from megatron_rl.likelihood import held_out, likelihoods
from megatron_rl.offline import StepResult, train_offline
from megatron_rl.run.run import Run
from megatron_rl.trainer.objective import SFT


def sft(config: Config) -> None:
    """Run config.steps updates on batch.prompts_per_step demonstrations or pieces of texts each. Writes a folder `hf/`."""
    with Run(config, kind="sft") as run:
        trainer = run.build()
        objective = SFT(config.distillation if config.teaches else None, config.sft.label_smoothing)
        unseen = held_out(run)

        def learn() -> StepResult:
            rng = random.Random(f"{config.seed}/{run.step}")
            samples = run.stream.next_demonstrations(config.batch.prompts_per_step, rng)
            [shares] = plan_updates([s.inputs for s in samples], updates=1, ranks=run.ranks.data_size)
            mine = [samples[i] for i in shares[run.ranks.data_rank]]
            batches = trainer.pack(mine)
            trainer.compute_fields(batches, objective.needs)
            return StepResult(trainer.update(batches, objective), mine)

        train_offline(run, learn, lambda: likelihoods(run, trainer, unseen))
