"""Evaluation on held-out prompts: mean reward at the sampling temperature (avg@n), pass@n, greedy and unpruned sampling."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.checks.eval_sets import EvalSet, overall
from megatron_rl.checks.preflight import check_demonstrations
from megatron_rl.config import Config, EvalConfig
from megatron_rl.data.trajectory import Trajectory
from megatron_rl.errors import StopRequested, UserError
from megatron_rl.metrics.evaluation import average_at_n, collision, distinct_right, majority_at_n, pass_at_k
from megatron_rl.metrics.logger import METRICS_FILE, SCORES_FILE
from megatron_rl.metrics.reduce import figures, over_ranks
from megatron_rl.models.parallel_check import read_hf_config
from megatron_rl.report.samples import agent_metrics, readable, write_responses
from megatron_rl.report.step import reward_metrics
from megatron_rl.rollout.demonstrations import FILE, best_of, light, problem_of, row_of, samples_of, summary
from megatron_rl.rollout.engine import Engine
from megatron_rl.run.run import Run
from megatron_rl.tasks import Prompt


def evaluate(settings: EvalConfig, run: Run, engine: Engine) -> dict[str, float]:
    """Return the scores of SGLang's current weights on the first eval.prompts held-out prompts of each set.

    Every process must call this. The scores of a set of eval.sets are named eval/NAME/... If all sets have names, eval/score is
    the mean of their scores.

    - eval/score: mean reward over all samples at the sampling temperature
    - eval/pass@k: probability that at least one of k responses is right (reward at least 0.5), for n and eval.pass_at
    - eval/maj@n: mean reward of each prompt's most frequent answer
    - eval/distinct@n: number of different right answers among n responses
    - eval/collision: probability that two right answers are the same
    - eval/greedy: mean reward of one greedy response
    - eval/reward/PART: mean of each reward part, if there are several
    - eval/score_unpruned, eval/pass_unpruned@k: scores of responses sampled without vocabulary pruning
      (eval.unpruned)

    Masked responses are left out of all scores. If all are masked, there is no score. The responses are written to the folder
    evals/ of the run, one JSON line each. If the run is asked to stop during the evaluation, there are no scores.
    """
    try:
        return _evaluate(settings, run, engine)
    except StopRequested:
        run.logger.say(f"stop requested during the evaluation at step {run.step}; this evaluation is left out")
        return {}


def _evaluate(settings: EvalConfig, run: Run, engine: Engine) -> dict[str, float]:
    scores, rows = dict[str, float](), list[dict[str, Any]]()
    for one in run.eval_sets:
        if one.prompts:
            found, responses = _of_set(settings, run, engine, one)
            scores |= one.named(found)
            rows += responses
    if not scores:
        return {}
    scores |= overall(scores, "eval/score", run.eval_sets)
    if "eval/score" in scores:
        run.record_score(scores["eval/score"])
    run.ranks.main_does(lambda: write_responses(_responses_file(run), rows))
    return scores


def _of_set(
    settings: EvalConfig, run: Run, engine: Engine, one: EvalSet
) -> tuple[dict[str, float], list[dict[str, Any]]]:
    prompts, task, n = one.prompts, one.program.task, one.samples
    sizes = sorted({k for k in settings.pass_at if k <= n} | {n})
    seed = f"eval/{one.name}/{run.step}" if one.name else f"eval/{run.step}"

    def ask(support: SamplingSupport, samples: int, seed: str) -> list[Trajectory]:
        found = engine.ask(prompts, support, samples=samples, seed=seed, program=one.program)
        if run.rewards.models:
            engine.sleep()  # a colocated engine makes room for reward models
        run.rewards.score(found, prompts, task=task)
        return found

    def rows_of(trajectories: list[Trajectory], **said: Any) -> list[dict[str, Any]]:
        said |= {"set": one.name} if one.name else {}
        return run.gather_from_leaders([{**said, **_row(run, prompts, t)} for t in trajectories])

    sampled = ask(run.support, n, seed)
    rewards = run.gather_groups(_judged(sampled), lambda t: t.reward)
    answers = run.gather_groups(_judged(sampled), lambda t: task.extract(t.text))
    scores = _mean_and_best(rewards, sizes)
    if rewards:
        scores[f"eval/maj@{n}"] = majority_at_n(answers, rewards)
        scores[f"eval/distinct@{n}"] = float(np.mean(distinct_right(answers, rewards, threshold=0.5)))
        if (same := collision(answers, rewards, threshold=0.5)) is not None:
            scores["eval/collision"] = same
        if len(task.parts) > 1:
            for part in task.parts:
                scores[f"eval/reward/{part}"] = run.mean([t.reward_parts[part] for t in _judged(sampled)])
    scores["eval/response_length"] = run.mean(_lengths(sampled))
    scores["eval/prompts"] = float(len(rewards))
    if run.config.rollout.program != "single_turn":
        scores |= {
            f"eval/{name}": value for name, value in figures(over_ranks(run.ranks, [agent_metrics(sampled)])).items()
        }
    rows = rows_of(sampled, greedy=False)
    if settings.unpruned:
        whole = ask(run.support.unpruned, n, seed)
        scores |= _mean_and_best(run.gather_groups(_judged(whole), lambda t: t.reward), sizes, "_unpruned")
        rows += rows_of(whole, greedy=False, unpruned=True)
    if one.greedy:
        greedy = ask(replace(run.support, temperature=0.0), 1, "greedy")
        if found := run.gather_groups(_judged(greedy), lambda t: t.reward):
            scores["eval/greedy"] = average_at_n(found)
        rows += rows_of(greedy, greedy=True)
    return scores, rows


def _row(run: Run, prompts: Sequence[Prompt], trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory in readable form, with its prompt as it was before chat template and tokenizer."""
    prompt = prompts[trajectory.group_id]
    return {**readable(run.tokenizer, trajectory), "asked": prompt.messages or prompt.text}


def _lengths(trajectories: list[Trajectory]) -> list[float]:
    """Return the number of tokens of each response, summed over its consecutive sequences."""
    found: list[float] = []
    for trajectory in trajectories:
        if trajectory.part and found:
            found[-1] += trajectory.response_length
        else:
            found.append(float(trajectory.response_length))
    return found


def _judged(trajectories: list[Trajectory]) -> list[Trajectory]:
    return [t for t in trajectories if not t.masked and not t.part]


def _mean_and_best(rewards: list[list[float]], sizes: list[int], sampler: str = "") -> dict[str, float]:
    """Return the mean reward, and pass@k for each k in `sizes`, over the prompts that have max(sizes) responses."""
    scores = {f"eval/score{sampler}": average_at_n(rewards)} if rewards else {}
    if whole := [row for row in rewards if len(row) == max(sizes)]:
        scores |= {f"eval/pass{sampler}@{k}": pass_at_k(whole, k, threshold=0.5) for k in sizes}
    return scores


def evaluate_command(config: Config) -> None:
    """Run `megatron-rl eval`: score the model in model.path, then print and store the scores.

    If the run's folder already holds a run, none of its files changes. `megatron-rl report` compares the scores of several such
    folders.
    """
    with Run(config, kind="sample") as run:
        if not run.evaluates:
            raise UserError(
                f"data: task '{config.data.task}' has no held-out prompts to evaluate on (eval.prompts ="
                f" {config.eval.prompts}): set data.eval_path, or raise eval.prompts"
            )
        run.build_scorers()
        with Engine(run) as engine:
            engine.join()
            scores = evaluate(config.eval, run, engine)
            run.ranks.main_does(lambda: write_responses(run.folder / SCORES_FILE, [{"step": run.step} | scores]))
            run.logger.say(json.dumps(scores, indent=2))
            run.logger.say(f"responses are in {_responses_file(run)}")


def rollout_command(config: Config) -> None:
    """Run `megatron-rl rollout`: sample responses to one step's prompts, and store the trajectories in the run's rollouts/.

    The trajectories are stored as .npz for rollout.load and as .jsonl for people. With
    rollout.demonstrations.min_reward, good responses are also stored as demonstrations for `megatron-rl sft`. Errors:
    UserError if files of a training run would be overwritten.
    """
    check_demonstrations(config, read_hf_config(config.model.path).vocab_size)
    config = replace(config, rollout=replace(config.rollout, record=True))
    folder = config.run_dir / "rollouts"
    if (config.run_dir / METRICS_FILE).exists():
        raise UserError(f"rollout: {config.run_dir} is the folder of a training run; choose another --name")
    with Run(config, kind="sample") as run, Engine(run) as engine:
        run.build_scorers()
        engine.join()
        prompts = run.stream.next(config.batch.prompts_per_step)
        settings = config.rollout.demonstrations
        trajectories = engine.collect(prompts, step=0, top_log_probs=settings.top_log_probs)
        run.rewards.verify(trajectories, prompts)
        engine.record(trajectories, step=0)  # before scoring: loaded trajectories are scored again
        run.rewards.score(trajectories, prompts)
        rows = run.gather_from_leaders([_row(run, prompts, t) for t in trajectories])
        run.ranks.main_does(lambda: write_responses(folder / "step_000000.jsonl", rows))
        measured = reward_metrics(trajectories, agents=config.rollout.program != "single_turn")
        run.logger.say(json.dumps(figures(over_ranks(run.ranks, [measured])), indent=2))
        run.logger.say(f"trajectories are in {folder}: step_000000.jsonl for people, .npz for rollout.load")
        if settings.min_reward is not None:
            _write_demonstrations(run, prompts, trajectories, folder / FILE)


def _write_demonstrations(run: Run, prompts: Sequence[Prompt], trajectories: list[Trajectory], file: Path) -> None:
    settings = run.config.rollout.demonstrations
    mine = [(problem_of(sample, settings), sample) for sample in samples_of(trajectories)]
    found = run.gather_from_leaders([(problem, [] if problem else light(sample)) for problem, sample in mine])
    kept, left_out = best_of([sample for problem, sample in found if not problem], settings)
    left_out += Counter(problem for problem, _ in found if problem)
    rows = (row_of(t, prompts[t.group_id], run.tokenizer, run.program.vocabulary) for sample in kept for t in sample)
    run.ranks.main_does(lambda: write_responses(file, rows))
    run.logger.say(f"{summary(len(kept), left_out)}; they are in {file}")


def _responses_file(run: Run) -> Path:
    return run.folder / "evals" / f"step_{run.step:06d}.jsonl"
