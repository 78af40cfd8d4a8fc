"""The algorithm: sample, score, update, push the weights, look. Everything else is behind one verb each."""

from __future__ import annotations

from functools import partial
from itertools import chain

import torch

from megatron_rl.algorithms import advantages as adv
from megatron_rl.config import AlgorithmConfig, Config
from megatron_rl.data.balance import redistribute
from megatron_rl.data.packing import Sample
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.evaluate import evaluate
from megatron_rl.launch.run import Run
from megatron_rl.metrics.step import log_step
from megatron_rl.rollout.engine import Engine
from megatron_rl.sync.refresh import RefreshSchedule, measure, refresh_metrics
from megatron_rl.trainer.objective import is_pointwise, log_probs_before, policy_objective


def train(config: Config) -> None:
    """Reinforcement learning by the config, from the newest checkpoint of the run where there is one."""
    with Run(config, kind="train") as run, Engine(run) as engine:
        trainer, logger = run.build(), run.logger
        engine.join()
        engine.push(trainer, version=run.step)
        schedule = RefreshSchedule(config.sync.refresh)
        if run.step == 0:
            logger.log_eval(0, evaluate(config, run, engine))
        clock = run.clock()
        while run.step < config.steps and not run.stop_requested():
            with clock("rollout"):
                prompts = run.stream.next(config.batch.prompts_per_step)
                trajectories = engine.collect(prompts, step=run.step)

            with clock("log_probs"):
                found = advantages(config.algorithm, run, trajectories)
                samples = [Sample.from_trajectory(t, a) for t, a in zip(trajectories, found, strict=True)]
                samples = redistribute(samples, config.batch.updates_per_step, run.ranks)
                updates = [trainer.pack(of_update) for of_update in samples]
                for index, batches in enumerate(updates):
                    # With one update the current policy is the old one, and the loss takes its own log-probs as such.
                    if name := log_probs_before(config):
                        trainer.compute_log_probs(batches, name, learn_routes=index > 0)
                    trainer.compute_reference_log_probs(batches)

            with clock("train"):
                metrics = []
                for index, batches in enumerate(updates):
                    loss = partial(policy_objective, config, trainer.scale(batches), all_reduce=trainer.context_sum)
                    # Before the first update routers have not moved: there is nothing to predict.
                    options = {"pointwise": is_pointwise(config), "learn_routes": index > 0, "rollout_batch": updates}
                    metrics.append(trainer.update(batches, loss, **options))
            run.step += 1

            with clock("sync"):
                drift = measure(trainer, [*chain(*samples)], config.sync.refresh)
                age = run.step - engine.version
                confined = any(m.get("update/backtracks") or m.get("update/rejected") for m in metrics)
                evaluated = bool(run.eval_prompts) and run.due(config.eval.every)  # of the weights as they are
                if refreshed := schedule.due(drift, age=age, confined=confined) or evaluated:
                    engine.push(trainer, version=run.step)
            with clock("eval"):
                if evaluated:
                    logger.log_eval(run.step, evaluate(config, run, engine))
            of_engine = engine.metrics() | refresh_metrics(drift, age, refreshed)
            log_step(run, trajectories, updates, metrics, of_engine, clock)
            clock = run.clock()  # a step that is logged is not lost in its save, whose time is the next one's
            with clock("checkpoint"):
                run.checkpoint()


def advantages(config: AlgorithmConfig, run: Run, trajectories: list[Trajectory]) -> torch.Tensor:
    """[N] advantage of each of this leader's trajectories against the others of its prompt, on whatever leader they are."""
    parts = run.ranks.gather_from_leaders([(t.group_id, t.reward) for t in trajectories])
    groups = torch.tensor([group for part in parts for group, _ in part])
    rewards = torch.tensor([reward for part in parts for _, reward in part], dtype=torch.float32)
    if config.advantage == "rloo":
        everyones = adv.leave_one_out(rewards, groups)
    else:
        everyones = adv.group_relative(rewards, groups, normalize=config.advantage == "grpo")
    first = sum(len(part) for part in parts[: run.ranks.data_rank])
    return everyones[first : first + len(trajectories)]
