"""The reinforcement learning loop: sample, score, update, push the weights to the rollout engines, evaluate."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

from megatron_rl.config import Config
from megatron_rl.data.balance import redistribute
from megatron_rl.evaluate import evaluate
from megatron_rl.report.step import log_step
from megatron_rl.rollout.buffer import RolloutBuffer
from megatron_rl.rollout.engine import Engine
from megatron_rl.rollout.refresh import RefreshSchedule, measure, refresh_metrics
from megatron_rl.run.run import Run
from megatron_rl.trainer.compute_advantages import Advantages
from megatron_rl.trainer.hooks import UpdateContext, updates_of
from megatron_rl.trainer.objective import Policy


def train(config: Config) -> None:
    """Run reinforcement learning with a config. If the run has checkpoints, continue from the newest one."""
    with Run(config, kind="train") as run, Engine(run) as engine:
        trainer, logger = run.build(), run.logger
        engine.join()
        engine.push(trainer, version=run.step)
        schedule, objective = RefreshSchedule(config.sync.refresh), Policy(config)
        advantages, rollouts = Advantages(config, trainer, run.critic), RolloutBuffer(run, engine, run.rewards.verify)
        run.keep_state_of(engine, rollouts)
        if run.step == 0:
            logger.log_eval(0, evaluate(config.eval, run, engine))
        clock = run.clock()
        while run.step < config.steps and not run.stop_requested():
            with clock("rollout"):
                prompts, trajectories = rollouts.next()

            with clock("reward"):
                run.rewards.score(trajectories, prompts, learns=True)

            with clock("log_probs"):
                advantages.compute_group_advantages(trajectories)
                samples = redistribute(trajectories, config.batch.updates_per_step, run.ranks)
                rollout_batch = [trainer.pack(of_update) for of_update in samples]
                for index, batches in enumerate(rollout_batch):
                    trainer.compute_fields(batches, objective.needs, UpdateContext(index, rollout_batch))
                advantages.compute_token_advantages(samples, rollout_batch, run.kl.value)

            with clock("train"):
                updates = []
                objective = replace(objective, kl_coefficient=run.kl.value)
                for part, place in updates_of(rollout_batch, config.batch.epochs):
                    if run.critic:
                        run.critic.update(part, advantages.returns[part])
                    if run.trains_policy:
                        updates.append(trainer.update(rollout_batch[part], objective, place))
                        if updates[-1].ends_batch:
                            break
            run.end_step()

            with clock("sync"):
                drift = measure(trainer, [*chain(*samples)], config.sync.refresh)
                age = run.step - engine.version
                confined = any(update.lr_scale < 1 and not update.ends_batch for update in updates)
                evaluated = run.evaluates and run.due(config.eval.every)  # an evaluation needs the current weights
                if refreshed := schedule.due(drift, age=age, confined=confined) or evaluated:
                    engine.push(trainer, version=run.step)
            with clock("eval"):
                if evaluated:
                    logger.log_eval(run.step, evaluate(config.eval, run, engine))
            measured = engine.metrics() | rollouts.metrics() | refresh_metrics(drift, age, refreshed)
            measured |= run.rewards.metrics() | advantages.metrics() | (run.critic.metrics() if run.critic else {})
            first_epoch = updates[: len(rollout_batch)]
            responses = len(prompts) * config.batch.samples_per_prompt * len(first_epoch) // len(rollout_batch)
            measured |= run.kl.update(first_epoch, responses)
            log_step(run, trajectories, rollout_batch, updates, measured, clock)
            clock = run.clock()  # log a step before its checkpoint, whose time counts to the next step
            with clock("checkpoint"):
                run.checkpoint(prepare=engine.sleep)
