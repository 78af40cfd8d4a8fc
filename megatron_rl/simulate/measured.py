"""Measured runs: reading the sizes, lengths and times of their steps, estimating costs, and comparing with predictions."""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

from megatron_rl.errors import UserError
from megatron_rl.report.run_folder import RunLog, number, read_run
from megatron_rl.simulate.costs import Costs, Setting
from megatron_rl.simulate.simulated_step import Simulated, TrainerWork, simulate

WARM_UP = 2
"""Number of warm-up steps, which are not compared because caches fill and kernels are compiled."""
UNLIMITED = 1 << 30
PARTS = ("rollout", "log_probs", "train", "sync")
NOT_MODELLED = ("eval", "checkpoint")


@dataclass(frozen=True)
class Measured:
    """The steps of a run in steady state, read from its folder."""

    name: str
    setting: Setting
    lengths: list[np.ndarray]
    """Response lengths as [responses] per step, for all steps from the first one on."""
    seconds: list[dict[str, float]]
    """Seconds of each step in `steps`, as {part: seconds}. The parts are PARTS, other and step, without evaluations and
    checkpoints."""
    steps: list[int]
    """Indices (from 0) of the steps in steady state. They come after the warm-up, and no server restarted in them."""


def read_measured(folder: Path) -> Measured:
    """Read a measured run. Errors: UserError if the folder holds no run, or a kind of run that cannot be simulated."""
    log = read_run(folder)
    _check(log)
    lines = [line for line in log.lines if line.get("time/step_s") is not None and line["step"] > 0]
    if len(lines) <= WARM_UP or [line["step"] for line in lines] != list(range(1, len(lines) + 1)):
        raise UserError(
            f"simulate: {folder}: {len(lines)} steps in metrics.jsonl; more than {WARM_UP} are needed, from the first step on,"
            " without gaps"
        )
    files = [sorted((folder / "rollouts").glob(f"step_{line['step'] - 1:06d}.rank*.npz")) for line in lines]
    lengths = [_lengths(log, line, of_step) for line, of_step in zip(lines, files, strict=True)]
    responses, prompt = len(lengths[0]), []
    for line, of_step in zip(lines, lengths, strict=True):
        prompt.append(_figure(log, line, "tokens") / responses - float(of_step.mean()))
    steps = [
        i
        for i in range(WARM_UP, len(lines))
        if all(
            lines[i].get(name) == lines[i - 1].get(name)
            for name in ("rollout/restarts", "rollout/retries", "rollout/reused")
        )
    ]
    # During the last steps, fewer batches are requested ahead.
    ahead = log.setting("rollout.max_staleness", 0)
    ends = (log.setting("steps", 0) or len(lines)) - ahead
    steps = [i for i in steps if i < ends]
    if not steps:
        raise UserError(f"simulate: {folder}: no steady step: run more steps, without servers that die")
    seconds = []
    for line in (lines[i] for i in steps):
        parts = {part: _figure(log, line, f"time/{part}_s") for part in PARTS}
        whole = _figure(log, line, "time/step_s") - sum(
            number(line.get(f"time/{part}_s")) or 0 for part in NOT_MODELLED
        )
        seconds.append({**parts, "other": whole - sum(parts.values()), "step": whole})
    ranks = max((len(of_step) for of_step in files), default=0) or 1
    servers = {lines[i].get("rollout/servers") for i in steps}
    if len(servers) > 1:
        counts = ", ".join(f"{count:g}" for count in sorted(number(count) or 0 for count in servers))
        raise UserError(f"simulate: {folder}: {counts} servers in its steps; measure a run in which none comes or goes")
    setting = _setting(log, ranks, max(0.0, statistics.fmean(prompt)))
    return Measured(log.name, replace(setting, servers=int(servers.pop() or setting.servers)), lengths, seconds, steps)


def _check(log: RunLog) -> None:
    not_modeled = {
        "rollout.dynamic_sampling.max_rounds": (0, None),
        "rollout.program": ("single_turn", None),
        "sync.refresh.when": ("always", None),
        "rollout.load": (None,),
    }
    if not log.config:
        raise UserError(f"simulate: {log.folder}: no config.yaml; name the folder of a run of megatron-rl train")
    for key, modeled in not_modeled.items():
        if (value := log.setting(key)) not in modeled:
            raise UserError(
                f"simulate: {log.folder}: {key}: {value} is not modeled; measure a run with {modeled[0] or 'null'}"
            )


def _figure(log: RunLog, line: Any, name: str) -> float:
    value = number(line.get(name))
    if value is None:
        raise UserError(
            f"simulate: {log.folder}/metrics.jsonl: step {line['step']} has no {name};"
            " name the folder of a run of megatron-rl train"
        )
    return value


def _lengths(log: RunLog, line: Any, files: list[Path]) -> np.ndarray:
    """Return the response lengths of a step: recorded ones, or ones drawn with the logged mean, quantiles and maximum."""
    if files:
        from megatron_rl.data.trajectory import load_trajectories

        return np.asarray([t.response_length for file in files for t in load_trajectories(file)])
    count = log.setting("batch.prompts_per_step", 0) * log.setting("batch.samples_per_prompt", 0)
    if not count:
        raise UserError(f"simulate: {log.folder}/config.yaml has no batch.prompts_per_step and samples_per_prompt")
    mean = _figure(log, line, "response/length")
    known = [_figure(log, line, f"response/length_quantile/{name}") for name in ("p10", "p50", "p90", "max")]
    # Below p10, nothing is known about the lengths of the lowest tenth.
    places = (np.arange(count) + 0.5) / count
    drawn = np.interp(places, [0.0, 0.1, 0.5, 0.9, 1 - 0.5 / count], [min(1.0, known[0]), *known])
    for _ in range(20):  # scale all lengths except for the longest until the mean fits
        drawn = np.where(drawn < known[-1], np.clip(drawn * mean / drawn.mean(), 1, known[-1]), drawn)
    return np.random.default_rng(line["step"]).permutation(np.rint(drawn).astype(int))


def _setting(log: RunLog, ranks: int, prompt_tokens: float) -> Setting:
    arguments = " ".join(map(str, log.setting("rollout.server.extra_args", [])))
    slots = re.search(r"--max-running-requests[ =](\d+)", arguments)
    updates, epochs = log.setting("batch.updates_per_step", 1), log.setting("batch.epochs", 1)
    return Setting(
        samples_per_prompt=log.setting("batch.samples_per_prompt"),
        max_new_tokens=log.setting("rollout.max_new_tokens", 1024),
        prompt_tokens=prompt_tokens,
        servers=len(log.setting("rollout.addresses", [])) or log.setting("rollout.server.count", 1),
        slots=int(slots[1]) if slots else UNLIMITED,
        leaders=ranks,
        concurrency=log.setting("rollout.concurrency", 512),
        tokens_per_micro_batch=log.setting("batch.tokens_per_micro_batch", UNLIMITED),
        updates_per_step=updates,
        epochs=epochs,
        scoring_passes=(updates * epochs > 1) + (log.setting("algorithm.kl.coefficient", 0) > 0),
        max_staleness=log.setting("rollout.max_staleness", 0),
        partial_rollout=log.setting("rollout.partial_rollout") is not False,
        colocated=log.setting("rollout.colocate", False),
        pipeline=log.setting("parallel.pipeline", 1),
        virtual_pipeline=log.setting("parallel.virtual_pipeline", 1),
    )


def nonnegative(columns: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return coefficients [k] >= 0 of columns [n, k] that fit seconds [n] by least squares of the relative errors.

    Schwarz's criterion (BIC) limits the number of nonzero coefficients. A coefficient that the measurements do not determine is
    0.
    """
    values = np.maximum(values, 1e-6)  # resolution of the measurements
    a, n = columns / values[:, None], len(values)
    best, found = math.inf, np.zeros(columns.shape[1])
    for size in range(1, columns.shape[1] + 1):
        for chosen in map(list, combinations(range(columns.shape[1]), size)):
            scale = np.abs(a[:, chosen]).max(axis=0)
            if not scale.all():
                continue
            fitted, _, rank, _ = np.linalg.lstsq(a[:, chosen] / scale, np.ones(n), rcond=1e-9)
            if rank < size or (fitted < 0).any():
                continue
            residual = float(((a[:, chosen] / scale @ fitted - 1) ** 2).mean())
            score = n * math.log(residual + 1e-18) + size * math.log(n)
            if score < best:
                best, found = score, np.zeros(columns.shape[1])
                found[chosen] = fitted / scale
    return found


def calibrate(runs: Sequence[Measured]) -> Costs:
    """Estimate costs from runs. Runs with max_staleness 0 determine all costs but overlap_slowdown, which needs other runs.

    Runs of different sizes determine more costs. Errors: UserError without a run with max_staleness 0.
    """
    exact = [run for run in runs if not run.setting.max_staleness]
    if not exact:
        raise UserError("simulate: --from needs at least one run with rollout.max_staleness: 0")
    decode, rollout_s, trained, train_s, scored, scored_s = [], [], [], [], [], []
    for run in exact:
        for step, seconds in zip(run.steps, run.seconds, strict=True):
            # With one server, the amount of work does not depend on the costs.
            unit = simulate(run.setting, Costs(decode_base_s=1.0), [run.lengths[step]])
            work = max(unit.work, key=lambda one: (one.iterations, one.tokens))
            decode.append([work.iterations, work.tokens, work.kv_tokens, work.prefill_tokens, 1])
            rollout_s.append(seconds["rollout"])
            does = TrainerWork.of(run.setting, run.lengths[step]).times(run.setting.epochs)
            trained.append([does.tokens, does.micro_batches, does.updates])
            train_s.append(seconds["train"])
    base, sequence, kv, prefill, request = nonnegative(np.asarray(decode), np.asarray(rollout_s))
    token, micro_batch, update = nonnegative(np.asarray(trained), np.asarray(train_s))
    costs = Costs(
        decode_base_s=base if base or sequence else 1e-9,
        decode_sequence_s=sequence,
        decode_kv_token_s=kv,
        prefill_token_s=prefill,
        request_s=request,
        train_token_s=token,
        micro_batch_s=micro_batch,
        update_s=update,
        push_s=_median(exact, "sync"),
        other_s=max(0.0, _median(exact, "other")),
    )
    for run in exact:
        for step, seconds in zip(run.steps, run.seconds, strict=True):
            passes = TrainerWork.of(run.setting, run.lengths[step]).passes_s(costs)
            scored.append([run.setting.scoring_passes * passes, 1])
            scored_s.append(seconds["log_probs"])
    share, rest = nonnegative(np.asarray(scored), np.asarray(scored_s))
    costs = replace(costs, log_probs_s=rest)
    if any(run.setting.scoring_passes for run in exact):
        costs = replace(costs, log_probs_share=share)
    return replace(costs, overlap_slowdown=_slowdown([run for run in runs if run.setting.max_staleness], costs))


def _median(runs: Sequence[Measured], part: str) -> float:
    return statistics.median(seconds[part] for run in runs for seconds in run.seconds)


def _slowdown(ahead: Sequence[Measured], costs: Costs) -> float:
    """Estimate overlap_slowdown. Simulated time is linear in this factor, because the amount of work does not depend on it."""
    if not ahead:
        return 1.0
    steps = [step for run in ahead for step in predict(run, costs).steps]
    missing = sum(seconds["step"] for run in ahead for seconds in run.seconds) - sum(step.step_s for step in steps)
    overlap = sum(step.overlap_s for step in steps)
    return 1 + max(0.0, missing / overlap) if overlap else 1.0


def predict(run: Measured, costs: Costs) -> Simulated:
    """Simulate the run's steps in steady state (`run.steps`), with the run's response lengths."""
    found = simulate(run.setting, costs, run.lengths)
    return replace(found, steps=[found.steps[step] for step in run.steps])


@dataclass(frozen=True)
class Compared:
    """A part of the step: its measured and predicted median time over the steps in steady state, in seconds."""

    name: str
    part: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """Relative error of the prediction."""
        return self.predicted / self.measured - 1 if self.measured else math.nan


def compare(run: Measured, costs: Costs) -> list[Compared]:
    """Compare the measured times of the step and its parts with the predicted ones."""
    predicted = predict(run, costs).steps
    return [
        Compared(
            run.name,
            part,
            statistics.median(seconds[part] for seconds in run.seconds),
            statistics.median(getattr(step, f"{part}_s") for step in predicted),
        )
        for part in ("step", *PARTS, "other")
    ]
