"""`megatron-rl simulate`: tables of the time of each part of a step, from stated or measured costs, next to measured times."""

from __future__ import annotations

import dataclasses
import difflib
import statistics
from pathlib import Path
from typing import Annotated, Any, Self

import numpy as np
import yaml
from pydantic import Field, TypeAdapter, ValidationError, model_validator
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from megatron_rl.config import Count, Positive, section
from megatron_rl.config.load import parse_yaml, yaml_problem
from megatron_rl.errors import UserError
from megatron_rl.simulate.costs import Costs, Hardware, Lengths, Mode, Model, Setting
from megatron_rl.simulate.simulated_step import Simulated, simulate


@section
class Scenario:
    """Content of a scenario file. A step's number of responses per GPU does not depend on the number of GPUs."""

    gpus: list[Positive] = dataclasses.field(default_factory=lambda: [8, 64, 512, 4096])
    modes: dict[str, Mode]
    lengths: Lengths
    costs: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Fields of `Costs` that override the values derived from hardware and model."""
    hardware: Hardware | None = None
    model: Model | None = None
    responses_per_gpu: Positive = 8
    samples_per_prompt: Positive = 8
    updates_per_step: Positive = 1
    epochs: Positive = 1
    scoring_passes: Count = 0
    tokens_per_micro_batch: Positive = 16384
    max_new_tokens: Positive
    prompt_tokens: Count = 0
    server_gpus: Positive = 1
    slots: Positive = 256
    gpus_per_rank: Positive = 1
    pipeline: Positive = 1
    """Number of pipeline stages of a trainer rank. Costs per token do not include waits for other stages."""
    virtual_pipeline: Positive = 1
    """Number of model parts per pipeline stage (interleaved schedule)."""
    concurrency: Positive = 512
    steps: Annotated[int, Field(ge=1)] = 3
    """Number of simulated steps that are measured. Earlier steps, in which the servers get ahead, are not measured."""
    seed: Count = 0

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if (self.hardware is None) != (self.model is None):
            raise ValueError("hardware and model go together: state both, or neither and all of costs")
        if not self.modes or not self.gpus:
            raise ValueError("there is nothing to simulate: give gpus and modes at least one entry")
        if self.gpus_per_rank % self.pipeline:
            raise ValueError(f"pipeline {self.pipeline} does not divide the gpus_per_rank of {self.gpus_per_rank}")
        if self.virtual_pipeline > 1 and self.pipeline == 1:
            raise ValueError(f"virtual_pipeline {self.virtual_pipeline} needs a pipeline of two or more: set pipeline")
        return self

    def stated_costs(self) -> Costs:
        """Return the scenario's costs. Errors: ValidationError for an invalid field of `costs`."""
        derived: dict[str, Any] = {}
        if self.hardware and self.model:
            derived = self.hardware.costs(self.model, self.server_gpus, self.gpus_per_rank)
        return TypeAdapter(Costs).validate_python(derived | self.costs)

    def setting(self, mode: Mode, gpus: int) -> Setting:
        """Return the sizes of a step on `gpus` GPUs. Errors: UserError if the GPUs cannot be divided in this way."""
        servers = gpus if mode.colocate else round(gpus * mode.server_share)
        trainer = gpus if mode.colocate else gpus - servers
        for what, key, count, size in (
            ("servers", "server_gpus", servers, self.server_gpus),
            ("the trainer", "gpus_per_rank", trainer, self.gpus_per_rank),
        ):
            if count < size or count % size:
                raise UserError(
                    f"simulate: of {gpus} GPUs {what} would have {count}, which {key} {size} does not divide; change"
                    " it, gpus or server_share"
                )
        return Setting(
            samples_per_prompt=self.samples_per_prompt,
            max_new_tokens=self.max_new_tokens,
            prompt_tokens=self.prompt_tokens,
            servers=servers // self.server_gpus,
            slots=self.slots,
            leaders=trainer // self.gpus_per_rank,
            concurrency=self.concurrency,
            tokens_per_micro_batch=self.tokens_per_micro_batch,
            updates_per_step=self.updates_per_step,
            epochs=self.epochs,
            scoring_passes=self.scoring_passes,
            max_staleness=mode.max_staleness,
            partial_rollout=mode.partial_rollout,
            colocated=mode.colocate,
            pipeline=self.pipeline,
            virtual_pipeline=self.virtual_pipeline,
        )

    def simulated(self, mode: Mode, gpus: int, costs: Costs) -> Simulated:
        """Simulate steps in the steady state. All modes have the same response lengths."""
        rng, warm_up = np.random.default_rng([self.seed, gpus]), mode.max_staleness + 1
        count = gpus * self.responses_per_gpu
        steps = warm_up + self.steps + mode.max_staleness
        lengths = [self.lengths.draw(rng, count, self.max_new_tokens) for _ in range(steps)]
        return simulate(self.setting(mode, gpus), costs, lengths, skip=warm_up)


def read_scenario(path: Path) -> tuple[Scenario, Costs]:
    """Read a scenario file. Returns the scenario and its costs. Errors: UserError naming file and key."""
    try:
        values = parse_yaml(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"simulate {path}: {getattr(error, 'strerror', None) or 'not a text'}; name a YAML file"
        ) from None
    except yaml.YAMLError as error:
        raise UserError(f"simulate {path}: not YAML: {yaml_problem(error)}") from None
    if not isinstance(values, dict):
        raise UserError(f"simulate {path}: not a mapping of keys; examples/simulate_qwen3_30b.yaml is one")
    prefix, known = "", Scenario
    try:
        scenario = TypeAdapter(Scenario).validate_python(values)
        prefix, known = "costs.", Costs
        return scenario, scenario.stated_costs()
    except ValidationError as error:
        raise UserError(f"simulate {path}: {_first(error, prefix, known)}") from None


def _first(error: ValidationError, prefix: str, known: Any) -> str:
    problem = error.errors()[0]
    path = [str(part) for part in problem["loc"]]
    key = prefix + ".".join(path)
    if problem["type"] == "unexpected_keyword_argument":
        parts = {"hardware": Hardware, "model": Model, "lengths": Lengths, "modes": Mode}
        owner = parts.get(path[0], known) if len(path) > 1 else known
        names = [field.name for field in dataclasses.fields(owner)]
        near = difflib.get_close_matches(key.rpartition(".")[2], names, 1)
        return f"unknown key '{key}'; {f"did you mean '{near[0]}'?" if near else f'there are {", ".join(names)}'}"
    if problem["type"] == "missing":
        return f"'{key}' is missing: state it"
    said = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "value_error":
        return f"'{key}': {said}" if key else said
    return f"'{key}': {said[0].lower()}{said[1:]}, found {problem['input']!r}"


def simulate_command(file: Path | None, measured: list[Path], compared: list[Path]) -> None:
    """Print the tables of a scenario and of comparisons with measured runs.

    file: scenario file, simulated with its own costs or with the costs of the measured runs. measured: runs from which costs
    are estimated. compared: runs to compare with the prediction from these costs. Errors: UserError.
    """
    if file is None and not measured:
        raise UserError("simulate: name a FILE, or give runs with --from to measure costs from")
    console = Console()
    scenario, costs = read_scenario(file) if file else (None, None)
    if measured:
        from megatron_rl.simulate.measured import calibrate, read_measured

        costs = calibrate([read_measured(folder) for folder in measured])
        console.print("costs:", *(f"  {k}: {v:.4g}" for k, v in dataclasses.asdict(costs).items() if v), sep="\n")
    assert costs is not None
    if compared:
        from megatron_rl.simulate.measured import compare, read_measured

        rows = [row for folder in compared for row in compare(read_measured(folder), costs)]
        numbers = [Column(heading, justify="right") for heading in ("measured, s", "predicted, s", "error")]
        table = Table(Column("run", overflow="fold"), "part", *numbers)
        for row in rows:
            error = f"{row.error:+.1%}" if row.part == "step" else ""
            table.add_row(Text(row.name), row.part, f"{row.measured:.3g}", f"{row.predicted:.3g}", error)
        console.print(table)
    elif scenario:
        console.print(table_of(scenario, costs))


def table_of(scenario: Scenario, costs: Costs) -> Table:
    """Return a table with one row per number of GPUs and mode: the seconds of a step, and the shares of the step's parts."""
    numbers = [
        "step, s",
        "steps\nper h",
        "tokens/s\nper GPU",
        "wait",
        "score",
        "train",
        "push",
        "idle",
        "tail",
        "stale",
    ]
    table = Table(
        "GPUs", "mode", *(Column(heading, justify="right") for heading in numbers), box=None, padding=(0, 1, 0, 0)
    )
    for gpus in scenario.gpus:
        for name, mode in scenario.modes.items():
            found = scenario.simulated(mode, gpus, costs)
            seconds = statistics.fmean(step.step_s for step in found.steps)
            parts = ("rollout_s", "log_probs_s", "train_s", "sync_s")
            shares = [statistics.fmean(getattr(step, part) for step in found.steps) / seconds for part in parts]
            ages = np.concatenate([step.staleness for step in found.steps])
            tokens = statistics.fmean(step.tokens for step in found.steps)
            figures = (f"{seconds:.4g}", f"{3600 / seconds:.3g}", f"{tokens / seconds / gpus:.4g}")
            percents = (f"{share:.0%}" for share in (*shares, found.idle, found.tail))
            table.add_row(str(gpus), name, *figures, *percents, f"{ages.mean():.1f}/{ages.max()}")
    return table
