"""Trackers by name, with the real libraries offline: their files hold the metrics, samples and the report."""

from __future__ import annotations

import importlib.util
import json
import random
import struct
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import ClassVar

import pytest

from megatron_rl import cli
from megatron_rl.checks.preflight import check_config
from megatron_rl.config import Config, DataConfig, LoggingConfig
from megatron_rl.errors import UserError
from megatron_rl.metrics import trackers
from megatron_rl.metrics.logger import RunLogger

SAMPLES = [
    {"prompt": "3 1 2", "response": "1 2 3", "reward": 1.0, "finish": "stop"},
    {"prompt": "2 1", "response": "2 | 1\n", "reward": 0.0, "reward/correct": 0.0},
]


def run_of(*names: str, project: str = "sums") -> Config:
    return Config(name="a/b", steps=4, logging=LoggingConfig(trackers=[*names], project=project, progress=False))


@pytest.fixture
def values() -> list[float]:
    return [random.random() for _ in range(4)]


def log(folder: Path, config: Config, values: list[float]) -> None:
    """Two processes, the second of which continues after step 2."""
    with RunLogger(folder, config) as logger:
        for step in (1, 2):
            logger.log_samples(step, SAMPLES)
            logger.log_step(step, {"reward/mean": values[step - 1], "eval/pass@4": 0.5})
    with RunLogger(folder, config, resume_step=2) as logger:
        for step in (3, 4):
            logger.log_step(step, {"reward/mean": values[step - 1], "entropy": float("nan")})


def test_tensorboard_has_metrics_and_samples(tmp_path, values):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log(tmp_path, run_of("tensorboard"), values)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert {e.step: pytest.approx(e.value, rel=1e-6) for e in events.Scalars("reward/mean")} == dict(
        enumerate(values, 1)
    )
    texts = [e.tensor_proto.string_val[0].decode() for e in events.Tensors("samples/text_summary")]
    assert len(texts) == 2 and r"| 2 1 | 2 \| 1 | 0.0 | None | 0.0 |" in texts[0]


@pytest.mark.slow
def test_mlflow_has_metrics_samples_and_the_report_in_one_run(tmp_path, values, monkeypatch, capsys):
    from mlflow import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = run_of("mlflow")
    log(tmp_path, config, values)
    (tmp_path / "config.yaml").write_text(json.dumps({"name": "a/b", "logging": {"trackers": ["mlflow"]}}))
    assert cli.main(["report", str(tmp_path), "--upload"]) == 0, capsys.readouterr().err
    assert "report: attached in mlflow" in capsys.readouterr().out

    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    [run] = client.search_runs([client.get_experiment_by_name("sums").experiment_id])
    assert run.info.run_name == "a/b" and run.info.status == "FINISHED"
    assert run.data.params["logging.project"] == "sums" and run.data.params["steps"] == "4"
    history = client.get_metric_history(run.info.run_id, "reward/mean")
    assert {metric.step: metric.value for metric in history} == dict(enumerate(values, 1))
    assert client.get_metric_history(run.info.run_id, "eval/pass_at_4")[-1].value == 0.5
    table = json.loads(Path(client.download_artifacts(run.info.run_id, "samples/step_2.json")).read_text())
    column = table["columns"].index("response")
    assert [row[column] for row in table["data"]] == [sample["response"] for sample in SAMPLES]
    assert "report.html" in {file.path for file in client.list_artifacts(run.info.run_id)}


def records_of(file: Path) -> Iterator[bytes]:
    """Records of a .wandb file: LevelDB's log format behind a header of seven bytes."""
    data, at, parts = file.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if 32768 - at % 32768 < 7:  # the rest of a block is too short for a record
            at += 32768 - at % 32768
            continue
        _, length, kind = struct.unpack("<IHB", data[at : at + 7])
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield parts
            parts = b""


@pytest.mark.slow
def test_wandbs_offline_files_have_metrics_and_samples_of_one_run(tmp_path, values, monkeypatch):
    from wandb.proto import wandb_internal_pb2

    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    log(tmp_path, run_of("wandb"), values)
    found, runs, tables = {}, set(), 0
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))
    for file in files:
        for data in records_of(file):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            if record.HasField("run"):
                runs.add((record.run.project, record.run.display_name, record.run.run_id))
            if record.HasField("history"):
                items = {"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
                found[record.history.step.num or items.get("_step")] = items.get("reward/mean")
                tables += "samples" in {name.split("/")[0] for name in items}
    assert len(files) == 2 and found == dict(enumerate(values, 1)) and tables == 2
    assert runs == {("sums", "a/b", (tmp_path / "wandb_id").read_text())}


@pytest.mark.skipif(importlib.util.find_spec("trackio") is None, reason="trackio is not installed")
def test_trackios_database_has_the_metrics(tmp_path, values, monkeypatch):
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    log(tmp_path, run_of("trackio"), values)
    from trackio.sqlite_storage import SQLiteStorage

    logs = SQLiteStorage.get_logs("sums", "a/b")
    assert {entry["step"]: entry["reward/mean"] for entry in logs if "reward/mean" in entry} == dict(
        enumerate(values, 1)
    )


class Failing(trackers.Tracker):
    """Fails from its second step on."""

    def log(self, values, step):
        if step > 1:
            raise ConnectionError("no route\nto the server")


class Keeping(trackers.Tracker):
    seen: ClassVar[list] = []

    def log(self, values, step):
        self.seen.append((step, values["reward/mean"]))


def test_a_tracker_that_fails_never_ends_the_run(tmp_path, values, capsys):
    Keeping.seen = []
    names = [f"{__file__}:{kind.__name__}" for kind in (Failing, Keeping)]
    with RunLogger(tmp_path, run_of(*names)) as logger:
        for step, value in enumerate(values, 1):
            logger.log_step(step, {"reward/mean": value})
    [warning] = [line for line in capsys.readouterr().out.splitlines() if line.startswith("warning")]
    assert warning.endswith("failed and gets nothing more from this process: no route to the server")
    kept = trackers.tracker_class(names[1])
    assert kept.seen == [*enumerate(values, 1)]  # a file's module is imported by its path


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("wandbb", "there is no tracker 'wandbb'; did you mean 'wandb'"),
        ("json:dumps", "json:dumps is not a subclass of megatron_rl.metrics.trackers.Tracker"),
        ("trackio", "trackio needs the package trackio; install it with 'uv pip install trackio'"),
    ],
)
def test_mistakes_are_told_before_a_run_starts(name, problem, monkeypatch, tmp_path):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *a: None if name == "trackio" else find(name, *a))
    with pytest.raises(UserError) as raised:
        RunLogger(tmp_path, run_of(name))
    assert problem in str(raised.value) and "logging.trackers" in str(raised.value)
    RunLogger(tmp_path, run_of(name), active=False)


def test_an_unknown_name_is_told_before_torch_is_imported_and_a_missing_package_is_no_matter_of_the_config(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda *_: None)
    for names, wrong in ((["wandb", "mlflow"], None), (["wandbb"], "there is no tracker 'wandbb'")):
        config = replace(run_of(*names), data=DataConfig(task="number_sorting"))
        with pytest.raises(UserError) if wrong else nullcontext() as raised:
            check_config(config, "train", 1)
        assert wrong is None or wrong in str(raised.value)


def test_a_report_is_uploaded_only_where_files_are_stored(tmp_path, values, capsys):
    log(tmp_path, run_of("tensorboard"), values)
    (tmp_path / "config.yaml").write_text(json.dumps({"name": "a", "logging": {"trackers": ["tensorboard"]}}))
    assert cli.main(["report", str(tmp_path), "--upload"]) == 2
    assert "no tracker of" in capsys.readouterr().err
