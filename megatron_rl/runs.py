"""Loads runs as pandas data frames, for notebooks: `metrics, samples = runs.load("runs/quickstart")`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from megatron_rl.errors import UserError
from megatron_rl.report.run_folder import read_run

if TYPE_CHECKING:
    import pandas


class RunFrames(NamedTuple):
    """The log of one run."""

    metrics: pandas.DataFrame
    """One row per logged step (index `step`), one column per metric. If a step does not have a metric, the value is NaN."""
    samples: pandas.DataFrame
    """One row per logged response: `step`, `prompt`, `response`, `reward`, `finish`, and the parts of the reward. The run logs
    a few responses of each step (`logging.samples`)."""


def load(folder: str | Path) -> RunFrames:
    """Read the metrics and samples in a run's folder. The run may still be writing.

    Errors: UserError if the folder holds no run, if a line of its log cannot be read, or if pandas is not installed.
    """
    try:
        import pandas
    except ImportError:
        raise UserError("megatron_rl.runs needs pandas: pip install pandas") from None
    run = read_run(Path(folder))
    metrics = pandas.DataFrame([*run.lines], columns=["step", *(name for name in run.metrics if name != "step")])
    return RunFrames(metrics.set_index("step").astype(float), pandas.DataFrame(run.samples))
