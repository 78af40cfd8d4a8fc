"""The algorithm: sample, score, update, push the weights, look. Everything else is behind one verb each."""

from __future__ import annotations

from itertools import chain

import torch

from megatron_rl.algorithms.advantages import ADVANTAGES
from megatron_rl.config import AlgorithmConfig, Config
from megatron_rl.data.balance import redistribute
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.evaluate import evaluate
from megatron_rl.launch.run import Run
from megatron_rl.metrics.step import log_step
from megatron_rl.registry import resolve
from megatron_rl.rollout.engine import Engine
from megatron_rl.sync.refresh import RefreshSchedule, measure, refresh_metrics
from megatron_rl.trainer.hooks import Place
from megatron_rl.trainer.objective import Policy


def train(config: Config) -> None:
    """Reinforcement learning by the config, from the newest checkpoint of the run where there is one."""
    with Run(config, kind="train") as run, Engine(run) as engine:
        trainer, logger = run.build(), run.logger
        engine.join()
        engine.push(trainer, version=run.step)
        schedule, objective = RefreshSchedule(config.sync.refresh), Policy(config)
        if run.step == 0:
            logger.log_eval(0, evaluate(config, run, engine))
        clock = run.clock()
        while run.step < config.steps and not run.stop_requested():
            with clock("rollout"):
                prompts = run.stream.next(config.batch.prompts_per_step)
                trajectories = engine.collect(prompts, step=run.step)

            with clock("log_probs"):
                add_advantages(config.algorithm, run, trajectories)
                samples = redistribute(trajectories, config.batch.updates_per_step, run.ranks)
                rollout_batch = [trainer.pack(of_update) for of_update in samples]
                for index, batches in enumerate(rollout_batch):
                    trainer.compute_fields(batches, objective.needs, Place(index, rollout_batch))

            with clock("train"):
                updates = [
                    trainer.update(batches, objective, Place(index, rollout_batch))
                    for index, batches in enumerate(rollout_batch)
                ]
            run.step += 1

            with clock("sync"):
                drift = measure(trainer, [*chain(*samples)], config.sync.refresh)
                age = run.step - engine.version
                confined = any(update.lr_scale < 1 for update in updates)
                evaluated = bool(run.eval_prompts) and run.due(config.eval.every)  # of the weights as they are
                if refreshed := schedule.due(drift, age=age, confined=confined) or evaluated:
                    engine.push(trainer, version=run.step)
            with clock("eval"):
                if evaluated:
                    logger.log_eval(run.step, evaluate(config, run, engine))
            measured = engine.metrics() | refresh_metrics(drift, age, refreshed)
            log_step(run, trajectories, rollout_batch, updates, measured, clock)
            clock = run.clock()  # a step that is logged is not lost in its save, whose time is the next one's
            with clock("checkpoint"):
                run.checkpoint()


def add_advantages(config: AlgorithmConfig, run: Run, trajectories: list[Trajectory]) -> None:
    """Give each of this leader's trajectories its advantage over the others of its prompt, on whatever leader they are.

    What is masked gets none, and the others' baseline leaves it out.
    """
    judged = [t for t in trajectories if not t.masked and not t.part]
    parts = run.ranks.gather_from_leaders([(t.group_id, t.reward) for t in judged])
    groups = torch.tensor([group for part in parts for group, _ in part])
    rewards = torch.tensor([reward for part in parts for _, reward in part], dtype=torch.float32)
    everyones = resolve("advantage", config.advantage, ADVANTAGES, "algorithm.advantage")(rewards, groups)
    first = sum(len(part) for part in parts[: run.ranks.data_rank])
    mine = iter(everyones[first : first + len(judged)].tolist())
    advantage = 0.0
    for trajectory in trajectories:
        if not trajectory.part:
            advantage = 0.0 if trajectory.masked else next(mine)
        trajectory["advantages"] = advantage
