"""Accuracy on held-out prompts: the mean at the sampling temperature (avg@n), pass@n, and greedy."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np

from megatron_rl.config import Config
from megatron_rl.environments.evaluation import average_at_n, distinct_right, pass_at_k
from megatron_rl.launch.run import Run
from megatron_rl.metrics.reduce import figures, over_ranks
from megatron_rl.metrics.step import reward_metrics
from megatron_rl.rollout.engine import Engine


def evaluate(config: Config, run: Run, engine: Engine) -> dict[str, float]:
    """Scores of the current rollout weights on the first eval.prompts held-out prompts. Every process calls it.

    eval/score is the mean reward over all samples at the sampling temperature; eval/pass@n the chance that one of n is
    right (reward above 0.5); eval/distinct@n how many different right ones n have; eval/greedy the mean reward of one
    response without sampling.
    """
    prompts = run.eval_prompts
    if not prompts:
        return {}
    n = config.eval.samples
    sampled = engine.ask(prompts, run.support, samples=n)
    rewards = run.gather_groups(sampled, lambda t: t.reward)
    answers = run.gather_groups(sampled, lambda t: run.task.extract(t.text))
    scores = {
        "eval/score": average_at_n(rewards),
        f"eval/pass@{n}": pass_at_k(rewards, n, threshold=0.5),
        f"eval/distinct@{n}": float(np.mean(distinct_right(answers, rewards, threshold=0.5))),
        "eval/response_length": run.mean([float(t.response_length) for t in sampled]),
        "eval/prompts": float(len(rewards)),
    }
    if config.eval.greedy:
        greedy = engine.ask(prompts, replace(run.support, temperature=0.0), samples=1)
        scores["eval/greedy"] = average_at_n(run.gather_groups(greedy, lambda t: t.reward))
    return scores


def evaluate_command(config: Config) -> None:
    """`megatron-rl eval`: score the folder model.path as it is and print the scores."""
    with Engine(config, "ask") as engine, Run(config, kind="ask") as run:
        engine.join(run)
        scores = evaluate(config, run, engine)
        run.logger.say(json.dumps(scores, indent=2))


def rollout_command(config: Config) -> None:
    """`megatron-rl rollout`: sample one step's prompts and keep the trajectories in the run's rollouts/ folder."""
    config = replace(config, rollout=replace(config.rollout, record=True))
    with Engine(config, "ask") as engine, Run(config, kind="ask") as run:
        engine.join(run)
        prompts = run.stream.next(config.batch.prompts_per_step)
        trajectories = engine.collect(prompts, step=0)
        run.logger.say(json.dumps(figures(over_ranks(run.ranks, [reward_metrics(trajectories)])), indent=2))
        run.logger.say(f"trajectories are in {config.run_dir / 'rollouts'}")
