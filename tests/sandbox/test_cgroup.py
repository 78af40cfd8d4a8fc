"""Control groups of containers: limits hold, the kernel's word on memory is heard, and what is left over is swept."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_rl.sandbox import cgroup

here = pytest.mark.skipif(not cgroup.version(), reason="no control group can be made on this machine")
MEMORY = 64 * 2**20
USE = "x = bytearray({})"


@pytest.fixture
def group():
    made = cgroup.make(MEMORY, 8)
    assert made
    yield made
    made.remove()
    assert not any(folder.exists() for folder in made.folders)


def run_in(group: cgroup.Cgroup, code: str) -> int:
    command = ["/bin/sh", "-c", f'{group.join} && exec "$@"', "group", sys.executable, "-I", "-S", "-c", code]
    return subprocess.run(command, capture_output=True, timeout=60, check=False).returncode


@here
def test_its_memory_is_bounded(group):
    assert run_in(group, USE.format(2**20)) == 0 and not group.out_of_memory()
    assert run_in(group, USE.format(2 * MEMORY)) == -9 and group.out_of_memory()


@here
def test_its_processes_are_bounded(group):
    code = """
import os, signal, subprocess
status = 0
try:
    started = [subprocess.Popen(["sleep", "60"]) for _ in range(20)]
except OSError:
    status = 7
signal.signal(15, lambda *_: os._exit(status))
os.killpg(0, 15)
"""
    command = ["/bin/sh", "-c", f'{group.join} && exec "$@"', "group", sys.executable, "-I", "-S", "-c", code]
    assert subprocess.run(command, capture_output=True, timeout=60, start_new_session=True, check=False).returncode == 7


@here
def test_what_a_killed_run_left_is_swept_at_the_next_start():
    code = "import os; from megatron_rl.sandbox import cgroup as c\nprint(*c.make(2**26, 8).folders, flush=True); os._exit(9)"
    left = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    folders = [Path(folder) for folder in left.stdout.split()]
    own = cgroup.make(MEMORY, 8)
    assert folders and own
    try:
        deadline = time.monotonic() + 30
        while any(folder.exists() for folder in folders) and time.monotonic() < deadline:
            cgroup._usable.__wrapped__()
        assert not any(folder.exists() for folder in folders)
        assert all(folder.exists() for folder in own.folders), "its process lives"
    finally:
        own.remove()


@pytest.fixture
def tree(tmp_path, monkeypatch):
    """Control groups as folders: nothing can join them."""
    monkeypatch.setattr(cgroup, "ROOT", tmp_path / "cgroup")
    monkeypatch.setattr(cgroup, "OWN", tmp_path / "own")
    for name in ("a/b", "memory/c", "pids"):
        (tmp_path / "cgroup" / name).mkdir(parents=True)
    return tmp_path


@pytest.mark.parametrize(
    ("own", "controllers", "parents"),
    [
        ("0::/a/b\n", {"a": "cpu memory pids"}, ["a"]),
        ("0::/a/b\n", {"a": "memory", "a/b": "memory"}, ["a/b"]),
        ("0::/a/b\n", {"a": "cpu"}, []),
        ("9:memory:/c\n8:pids:/\n3:cpu:/\n0::/\n", {}, ["memory/c", "pids"]),
        ("9:memory:/gone\n8:pids:/\n", {}, []),
        ("", {}, []),
    ],
)
def test_where_groups_are_made(tree, own, controllers, parents):
    (tree / "own").write_text(own)
    for folder, names in controllers.items():
        (tree / "cgroup" / folder / "cgroup.subtree_control").write_text(names)
    assert cgroup._parents.__wrapped__() == [tree / "cgroup" / parent for parent in parents]


def test_a_group_that_no_process_can_join_is_not_used(tree, monkeypatch):
    (tree / "own").write_text("9:memory:/c\n")
    monkeypatch.setattr(cgroup, "_parents", lambda: [tree / "cgroup/memory/c"])
    monkeypatch.setattr(cgroup.Cgroup, "join", "false")
    assert cgroup._usable.__wrapped__() == [] and not list((tree / "cgroup/memory/c").iterdir())
