"""What needs a GPU: marked `gpu`, collected everywhere, skipped without CUDA; its figures go into one JSON file a stage.

`--on-cpu` runs what can run without a GPU, with the CPU's own paths, to try the tests themselves.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests"), str(REPOSITORY / "tests" / "trainer")]

PACKAGES = ("torch", "megatron-core", "megatron-bridge", "transformers", "triton", "transformer-engine", "numpy")
LONGEST_ERROR = 6000
"""Characters of a failure, from its end: of a run that failed (programs.py), the ends of its logs."""


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    without = not torch.cuda.is_available() and not config.getoption("--on-cpu")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if without:
                item.add_marker(pytest.mark.skip(reason="no GPU"))


_STARTED = pytest.StashKey[float]()


def pytest_runtest_setup(item: pytest.Item) -> None:
    budget, gone = item.config.getoption("--budget-s"), time.monotonic() - item.config.stash[_STARTED]
    if budget is not None and gone > budget:
        pytest.skip(f"{gone:.0f} s have gone by, and --budget-s is {budget:.0f}")


@pytest.fixture(scope="session")
def device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(scope="session")
def cuda(device) -> torch.device:
    """For what has no meaning on a CPU."""
    if device.type != "cuda":
        pytest.skip("needs a GPU")
    return device


@pytest.fixture(scope="session")
def references(request: pytest.FixtureRequest) -> Path:
    folder = Path(request.config.getoption("--references"))
    if not folder.is_dir():
        pytest.skip(f"no {folder}: python tests/gpu/references.py makes it, on a machine with SGLang for all of it")
    return folder


# -- one JSON file a stage ---------------------------------------------------------------------------------------------


def machine() -> dict:
    """What the figures depend on."""
    found: dict = {"python": platform.python_version(), "commit": commit(), "date": time.strftime("%Y-%m-%d")}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    found["cuda"] = torch.version.cuda
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        found |= {
            "device": properties.name,
            "devices": torch.cuda.device_count(),
            "capability": f"{properties.major}.{properties.minor}",
            "memory_gib": round(properties.total_memory / 2**30, 1),
        }
        found["driver"] = said("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    return found


def said(*command: str) -> str | None:
    """First line of what a program prints; None where it fails, or is not on this machine."""
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.partition("\n")[0].strip() if done.returncode == 0 else None


def commit() -> str | None:
    """Of the checkout, "-dirty" where it was changed; a bundle carries it as a file, where git's own folder does not travel."""
    carried = REPOSITORY / "gpu-bundle" / "COMMIT"
    found = said("git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")
    return found or (carried.read_text().strip() if carried.is_file() else None)


class Report:
    """Outcomes, seconds and `record_property` figures of the tests, written as they come: a stage may be cut off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.result: dict = {"machine": machine(), "tests": {}}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when != "call" and report.passed:
            return
        entry = {"outcome": report.outcome, "seconds": round(report.duration, 2)}
        if report.user_properties:
            entry["figures"] = dict(report.user_properties)
        if report.failed:
            entry["error"] = str(report.longrepr)[-LONGEST_ERROR:]
        elif report.skipped:
            entry["reason"] = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
        self.result["tests"][report.nodeid.partition("tests/gpu/")[2] or report.nodeid] = entry
        self.path.write_text(json.dumps(self.result, indent=1) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_STARTED] = time.monotonic()
    config.addinivalue_line("markers", "gpu: needs a GPU; skipped where there is none")
    if path := config.getoption("--gpu-json"):
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        config.pluginmanager.register(Report(Path(path)), "gpu-report")
