"""Shared fixtures: tiny models of each family, made once per test run."""

from __future__ import annotations

import gc
import os
from pathlib import Path

import pytest

gc.disable()  # until all tests are imported: a fifth of that time
REPOSITORY = Path(__file__).resolve().parent.parent
SLOW = ("e2e", "trainer", "rollout", "routing", "sync", "models", "platform", "csrc")
"""Folders whose files take minutes: servers, several processes, compilers. Their tests, and those marked `slow`, are not among
those of `tests/run.sh --fast`, but for the files of FAST."""
FAST = (
    "test_objective.py",
    "test_packing.py",
    "test_table.py",
    "test_refusals.py",
    "test_spec.py",
    "test_precision.py",
    "test_dialects.py",
    "test_conversation.py",
    "test_dpo_loss.py",
    "test_kl_control.py",
    "test_later_rewards.py",
    "test_slots.py",
    "test_finished.py",
)
"""Files of these folders that take seconds."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Of all tests, and of tests/gpu: pytest reads options before it comes to that folder."""
    parser.addoption(
        "--times", metavar="FILE", help="append a line for each test to FILE as it ends: seconds, outcome, name"
    )
    group = parser.getgroup("gpu")
    group.addoption("--on-cpu", action="store_true", help="run tests/gpu without a GPU where they can")
    group.addoption("--gpu-json", metavar="FILE", help="write outcomes and figures of tests/gpu to FILE")
    group.addoption(
        "--references",
        metavar="FOLDER",
        default=str(REPOSITORY / "gpu-bundle" / "references"),
        help="what tests/gpu/references.py made on a CPU (default: gpu-bundle/references)",
    )


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long files first: the last worker that is still at one would be alone."""
    items.sort(key=lambda item: item.path.parent.name not in SLOW)
    for item in items:
        if item.path.parent.name in SLOW and item.path.name not in FAST:
            item.add_marker("slow")


class _Ends:
    """Says at once which test has failed, as a suite that is ended by a limit says nothing at its end; keeps times."""

    def __init__(self, times: str | None) -> None:
        self._times = times
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._seconds[report.nodeid] = self._seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            print(f"\n{report.outcome.upper()} {report.nodeid} ({report.when})", flush=True)
        if report.when == "teardown" and self._times:
            with open(self._times, "a") as file:
                file.write(f"{self._seconds.pop(report.nodeid):8.2f} {report.outcome} {report.nodeid}\n")


def pytest_collection_finish() -> None:
    """What all tests have imported is not looked at again whenever garbage is collected."""
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    """Reports come together in the process that the user has started."""
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Ends(config.getoption("--times")))


@pytest.fixture(autouse=True)
def _ends_groups():
    """A process of tests that has had many trainers would be busy with their groups alone (`ranks.end_layout`)."""
    yield
    if len(os.listdir("/proc/self/task")) > 150:
        from ranks import free_trainers

        free_trainers()


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory):
    """tiny_model("qwen3_moe", "--layers", "4") -> folder of a tiny random model, made once for the same arguments."""
    made: dict[tuple[str, ...], Path] = {}

    def make(*arguments: str) -> Path:
        from tools.make_tiny_model import main  # transformers, which most files of tests do without

        if arguments not in made:
            out = tmp_path_factory.mktemp("models") / "-".join(a.strip("-") for a in arguments)
            assert main([arguments[0], str(out), *arguments[1:]]) == 0
            made[arguments] = out
        return made[arguments]

    return make
