"""Runs of the ablation scripts: side by side, continued, and ended with the script. The run is a small program made up here."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.preloaded import PYTHON_WITH_TRAINER
from tests.waiting import wait_for

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RUN = """
import json, os, sys, time
from pathlib import Path

args = dict(zip(sys.argv[3::2], sys.argv[4::2]))
folder = Path(args["--runs_dir"]) / args["--name"]
(folder / "checkpoints").mkdir(parents=True)
(folder / "pid").write_text(str(os.getpid()))
(folder / "threads").write_text(os.environ["OMP_NUM_THREADS"] + os.environ["OF_RUNS"])
others = [folder.parent / name / "pid" for name in args["--note"].split() if name]
deadline = time.monotonic() + 60
while not all(other.exists() for other in others):
    if time.monotonic() > deadline:
        sys.exit("the other one is not there")
    time.sleep(0.01)
(folder / "metrics.jsonl").write_text(json.dumps({"step": int(args["--steps"])}) + "\\n")
"""
SCRIPT = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv.pop(1))
import ablations

ablations.CLI = [sys.executable, sys.argv.pop(1)]
parser = ablations.make_parser("made_up", "", steps=2)
args = parser.parse_args()
plans = {"a": {"note": "b"}, "b": {"note": "a"}, "c": {"note": WAITS_FOR}}
results = lambda root, out, steps, minutes: print("results", sorted(minutes), flush=True)
ablations.run_all(args, plans, results, environment={"OF_RUNS": " own"})
"""


@pytest.fixture
def command(tmp_path):
    """Of a script with three runs, of which the first two wait for each other; and the third for what a test says."""

    def make(waits_for: str, jobs: int | str = 2) -> list[str]:
        (tmp_path / "run.py").write_text(RUN)
        script = tmp_path / "script.py"
        script.write_text(SCRIPT.replace("WAITS_FOR", repr(waits_for)))
        own = [PYTHON_WITH_TRAINER, str(script), str(EXAMPLES), str(tmp_path / "run.py")]
        return [*own, "--jobs", str(jobs), "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]

    return make


def test_runs_go_side_by_side_and_share_the_cores(command, tmp_path):
    """Two that wait for each other both end; what is done is not done again."""
    done = subprocess.run(command(""), capture_output=True, text=True, timeout=120, check=True)
    root = tmp_path / "runs" / "2_steps"
    assert {folder.name for folder in root.iterdir() if folder.is_dir()} == {"a", "b", "c"}
    assert {(root / name / "threads").read_text() for name in "abc"} == {f"{max((os.cpu_count() or 1) // 2, 1)} own"}
    assert not list(root.glob("*/checkpoints"))
    assert done.stdout.splitlines()[-1] == "results ['a', 'b', 'c']"
    before = json.loads((root / "minutes.json").read_text())
    again = subprocess.run(command("nobody"), capture_output=True, text=True, timeout=120, check=True)
    assert again.stdout.count("was done") == 3
    assert json.loads((root / "minutes.json").read_text()) == before


def test_the_script_ends_what_it_has_started(command, tmp_path):
    """On SIGTERM; results of what is done are written, and what was stopped is not among it."""
    script = subprocess.Popen(command("nobody", jobs=3), stdout=subprocess.PIPE, text=True)
    root = tmp_path / "runs" / "2_steps"
    wait_for(lambda: (root / "minutes.json").exists() and len(read_json(root / "minutes.json")) == 2)
    wait_for(lambda: (root / "c" / "pid").exists() and (root / "c" / "pid").read_text())
    script.send_signal(signal.SIGTERM)
    out, _ = script.communicate(timeout=60)
    assert script.returncode == 143
    assert out.splitlines()[-1] == "results ['a', 'b']"
    with pytest.raises(ProcessLookupError):
        os.kill(int((root / "c" / "pid").read_text()), 0)


@pytest.mark.parametrize(
    ("fails", "reason"),
    [
        ('sys.exit("out of order")', "failed: out of order ["),
        ("os.kill(os.getpid(), 9)", "was killed; check whether the machine ran out of memory ["),
    ],
)
def test_a_run_that_fails_ends_the_others_and_says_so(command, tmp_path, fails, reason):
    """One line with the last line of its output and the file; a run that would wait on beside it is ended."""
    made = command("a", jobs=3)
    wrong = f'{fails} if folder.name == "c" else time.sleep(100)\n(folder / "metrics'
    (tmp_path / "run.py").write_text(RUN.replace('(folder / "metrics', wrong))
    failed = subprocess.run(made, capture_output=True, text=True, timeout=90)
    assert failed.returncode == 1
    assert reason in failed.stderr and "c.log]" in failed.stderr
    assert "Traceback" not in failed.stderr and failed.stdout.splitlines() == ["results []"]
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "runs" / "2_steps" / "a" / "pid").read_text()), 0)


@pytest.mark.parametrize("jobs", ["0", "-1", "two"])
def test_a_number_of_jobs_that_is_none_is_refused(command, jobs):
    """In one line that names the flag."""
    failed = subprocess.run(command("", jobs), capture_output=True, text=True, timeout=60)
    assert failed.returncode == 2 and f"argument --jobs: {jobs} is not a number of at least 1" in failed.stderr


@pytest.mark.parametrize("deaf", [False, True])
def test_a_run_that_takes_too_long_is_ended(tmp_path, monkeypatch, deaf):
    """One that does not listen to SIGTERM is killed."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    ablations = importlib.import_module("ablations")
    monkeypatch.setattr(ablations, "LONGEST_S", 1)
    monkeypatch.setattr(ablations, "ENDING_S", 1)
    program = (
        "trap '' TERM; " * deaf + "echo $$; exec sleep 1000"
    )  # a shell starts at once, and hands on what it ignores
    with pytest.raises(SystemExit, match="took over 1 s"):
        ablations.call(["sh", "-c", program], tmp_path / "log")
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "log").read_text()), 0)


def read_json(path: Path):
    """Nothing yet of a file that is being written."""
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError:
        return {}
