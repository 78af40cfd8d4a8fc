"""Experiment trackers by name (logging.trackers): TensorBoard, Weights & Biases, MLflow, trackio.

accelerate has classes for the same trackers. They work only after accelerate has set up its own process state, which would
conflict with Megatron's process groups. So each class here calls the tracker's own library.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import secrets
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, override

from megatron_rl.config.registry import resolve
from megatron_rl.credentials import hidden
from megatron_rl.errors import UserError

if TYPE_CHECKING:
    from megatron_rl.config import Config

Samples = Sequence[Mapping[str, Any]]
"""Responses of one step: prompt, response, reward, and further values."""


@dataclass(frozen=True)
class TrackedRun:
    """Description of a run for the trackers."""

    name: str
    project: str
    """Name of the project or experiment that groups runs (logging.project)."""
    folder: Path
    resume_step: int
    """Step after which the run continues; 0 for a new run."""
    config: dict[str, Any]
    """The whole config without secrets."""

    @classmethod
    def from_config(cls, config: Config, folder: Path, resume_step: int = 0) -> TrackedRun:
        """Build the description from a config."""
        values = hidden(dataclasses.asdict(config))
        return cls(config.name, config.logging.project, folder, resume_step, values)

    def remembered(self, name: str, make: Callable[[], str]) -> str:
        """Return the text of the file `name` in the run's folder. If there is no such file, `make` provides its text."""
        file = self.folder / name
        if not file.exists():
            file.write_text(make())
        return file.read_text().strip()


class Tracker:
    """Sends a run's metrics to one service. A subclass overrides what its service supports."""

    package: ClassVar[str] = ""
    """Python package that the tracker needs; empty: none."""

    def __init__(self, run: TrackedRun) -> None:
        """Start or resume the run in the service."""

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send the metrics of a step."""

    def log_samples(self, samples: Samples, step: int) -> None:
        """Send responses of a step as a table."""

    def add_file(self, path: Path) -> bool:
        """Attach a file to the run. Return True if the service stores files."""
        return False

    def close(self) -> None:
        """Send all pending data, and end the connection."""


class TensorBoard(Tracker):
    """TensorBoard: event files in the folder `tensorboard` of the run."""

    package = "tensorboard"

    @override
    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        purge = run.resume_step + 1 if run.resume_step else 0
        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=purge)

    @override
    def log(self, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    @override
    def log_samples(self, samples: Samples, step: int) -> None:
        columns, rows = table_of(samples)
        lines = [columns, ["---"] * len(columns), *rows]
        text = "\n".join("| " + " | ".join(_cell(value) for value in line) + " |" for line in lines)
        self._writer.add_text("samples", text, step)

    @override
    def close(self) -> None:
        self._writer.close()


class WeightsAndBiases(Tracker):
    """Weights & Biases. With WANDB_MODE=offline, it writes into the run's folder, and `wandb sync` sends the data later."""

    package = "wandb"

    @override
    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._wandb = wandb
        self._run = wandb.init(
            project=run.project,
            name=run.name,
            id=run.remembered("wandb_id", lambda: secrets.token_hex(4)),
            resume="allow",
            dir=str(run.folder),
            config=run.config,
        )

    @override
    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    @override
    def log_samples(self, samples: Samples, step: int) -> None:
        columns, rows = table_of(samples)
        self._run.log({"samples": self._wandb.Table(columns=[*columns], data=[[*row] for row in rows])}, step=step)

    @override
    def add_file(self, path: Path) -> bool:
        artifact = self._wandb.Artifact(path.stem, type=path.stem)
        artifact.add_file(str(path))
        self._run.log_artifact(artifact)
        return True

    @override
    def close(self) -> None:
        self._run.finish()
        self._wandb.teardown()  # ends its service process, in which another run of the same id would get lost


class MLflow(Tracker):
    """MLflow: the server of MLFLOW_TRACKING_URI, or the file mlflow.db in the run's folder."""

    package = "mlflow"

    @override
    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient

        own = f"sqlite:///{(run.folder / 'mlflow.db').resolve()}"
        self._client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI", own))
        self._id = run.remembered("mlflow_run_id", lambda: self._start(run))
        self._client.update_run(self._id, status="RUNNING")

    def _start(self, run: TrackedRun) -> str:
        from mlflow.entities import Param

        found = self._client.get_experiment_by_name(run.project)
        files = None if "MLFLOW_TRACKING_URI" in os.environ else (run.folder / "mlflow_files").resolve().as_uri()
        experiment = found.experiment_id if found else self._client.create_experiment(run.project, files)
        started = self._client.create_run(experiment, run_name=run.name).info.run_id
        params = [Param(key, str(value)[:6000]) for key, value in _flat(run.config)]
        for i in range(0, len(params), 100):  # MLflow takes at most 100 at once
            self._client.log_batch(started, params=params[i : i + 100])
        return started

    @override
    def log(self, values: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now = int(1000 * time.time())
        # MLflow's names have no @, which stands in eval/pass@4.
        metrics = [Metric(name.replace("@", "_at_"), value, now, step) for name, value in values.items()]
        for i in range(0, len(metrics), 1000):  # MLflow takes at most 1000 at once
            self._client.log_batch(self._id, metrics=metrics[i : i + 1000])

    @override
    def log_samples(self, samples: Samples, step: int) -> None:
        columns, rows = table_of(samples)
        data = {name: [row[i] for row in rows] for i, name in enumerate(columns)}
        self._client.log_table(self._id, data, f"samples/step_{step}.json")

    @override
    def add_file(self, path: Path) -> bool:
        self._client.log_artifact(self._id, str(path))
        return True

    @override
    def close(self) -> None:
        self._client.set_terminated(self._id)


class Trackio(Tracker):
    """trackio: a local database, or the Space of TRACKIO_SPACE_ID."""

    package = "trackio"

    @override
    def __init__(self, run: TrackedRun) -> None:
        import trackio  # pyright: ignore[reportMissingImports]  # installed by the user

        self._trackio = trackio
        self._run = trackio.init(run.project, name=run.name, resume="allow", config=dict(_flat(run.config)))

    @override
    def log(self, values: Mapping[str, float], step: int) -> None:
        self._run.log(dict(values), step=step)

    @override
    def log_samples(self, samples: Samples, step: int) -> None:
        import pandas

        columns, rows = table_of(samples)
        table = self._trackio.Table(dataframe=pandas.DataFrame(rows, columns=columns))
        self._run.log({"samples": table}, step=step)

    @override
    def close(self) -> None:
        self._trackio.finish()


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
    "mlflow": MLflow,
    "trackio": Trackio,
}
"""Built-in trackers by their name in logging.trackers."""


def tracker_class(name: str) -> type[Tracker]:
    """Return the class of a built-in tracker, or your own class from `module:name` or `path/to/file.py:name`.

    Errors: UserError if there is no such tracker, or if its package is not installed.
    """
    found = resolve("tracker", name, TRACKERS, "logging.trackers")
    if not (isinstance(found, type) and issubclass(found, Tracker)):
        raise UserError(f"config: logging.trackers: {name} is not a subclass of megatron_rl.metrics.trackers.Tracker")
    if found.package and importlib.util.find_spec(found.package) is None:
        raise UserError(
            f"config: logging.trackers: {name} needs the package {found.package}; install it with"
            f" 'uv pip install {found.package}', or remove {name} from the list"
        )
    return found


class Trackers:
    """All trackers of a run. A tracker that fails is dropped with a warning; it never ends the run."""

    def __init__(self, run: TrackedRun, names: Iterable[str], warn: Callable[[str], None]) -> None:
        """Create the trackers. warn: function that gets each warning, a single line."""
        self._warn = warn
        self._started: dict[str, Tracker] = {}
        for name in names:
            kind = tracker_class(name)
            try:
                self._started[name] = kind(run)
            except Exception as error:  # a service that cannot be reached raises what its library likes
                self._drop(name, error)

    def log(self, values: Mapping[str, float], step: int) -> None:
        """Send the metrics of a step to all trackers."""
        self._each(lambda tracker: tracker.log(values, step))

    def log_samples(self, samples: Samples, step: int) -> None:
        """Send responses of a step to all trackers as a table."""
        if samples:
            self._each(lambda tracker: tracker.log_samples(samples, step))

    def add_file(self, path: Path) -> list[str]:
        """Attach a file to the run. Return the names of the trackers that store it."""
        took: dict[str, bool] = {}
        for name in [*self._started]:
            self._each(lambda tracker, name=name: took.update({name: tracker.add_file(path)}), [name])
        return [name for name, stored in took.items() if stored]

    def close(self) -> None:
        """Close all trackers."""
        self._each(lambda tracker: tracker.close())
        self._started.clear()

    def _each(self, call: Callable[[Tracker], Any], names: Iterable[str] | None = None) -> None:
        for name in [*self._started] if names is None else names:
            try:
                call(self._started[name])
            except Exception as error:
                self._drop(name, error)

    def _drop(self, name: str, error: Exception) -> None:
        self._started.pop(name, None)
        said = " ".join(str(error).split())[:300] or type(error).__name__
        self._warn(f"warning: the tracker {name} failed and gets nothing more from this process: {said}")


def table_of(samples: Samples) -> tuple[list[str], list[list[Any]]]:
    """Return (column names, rows). A value that a sample lacks is None; lists and dictionaries become text."""
    columns = [*dict.fromkeys(name for sample in samples for name in sample)]
    plain = (str, int, float, bool, type(None))
    values = [[sample.get(name) for name in columns] for sample in samples]
    return columns, [[value if isinstance(value, plain) else str(value) for value in row] for row in values]


def _cell(value: Any) -> str:
    return " ".join(str(value).split()).replace("|", "\\|")


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, (int, float, str)) else str(value)
