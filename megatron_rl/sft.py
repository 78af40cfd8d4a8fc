"""Supervised fine-tuning on the task's demonstrations, with the same trainer: the quickstart's warm start."""

from __future__ import annotations

import random

from megatron_rl.config import Config
from megatron_rl.data.balance import plan_updates
from megatron_rl.data.sequence import Sequence
from megatron_rl.launch.run import Run
from megatron_rl.metrics.hardware import hardware_metrics
from megatron_rl.metrics.reduce import figures
from megatron_rl.trainer.objective import SFT


def sft(config: Config) -> None:
    """config.steps updates on batch.prompts_per_step demonstrations each; ends with a Hugging Face folder `hf/`."""
    with Run(config, kind="sft") as run:
        trainer = run.build()
        clock = run.clock()
        while run.step < config.steps and not run.stop_requested():
            with clock("train"):
                rng = random.Random(f"{config.seed}/{run.step}")
                pairs = run.stream.next_demonstrations(config.batch.prompts_per_step, rng)
                samples = [Sequence.demonstration(prompt.tokens, response) for prompt, response in pairs]
                [shares] = plan_updates([s.inputs for s in samples], updates=1, ranks=run.ranks.data_size)
                mine = [samples[i] for i in shares[run.ranks.data_rank]]
                batches = trainer.pack(mine)
                update = trainer.update(batches, SFT())
            run.step += 1
            times = clock.times()
            sequences = [(len(s.tokens) - 1, len(s.tokens) - s.prompt_length) for s in mine]
            gpus = hardware_metrics(run, sequences, times, sum(len(s.tokens) for s in samples))
            skipped = {"data/skipped_prompts": len(run.stream.skipped)}
            run.logger.log_step(run.step, figures(update.metrics) | skipped | gpus | times)
            clock = run.clock()  # a step that is logged is not lost in its save, whose time is the next one's
            with clock("checkpoint"):
                run.checkpoint()
        run.save_hf()
