"""A Linux control group for a container, if this machine allows creating one.

A control group limits the total memory of its processes at every moment, including the kernel memory used for them.
"""

from __future__ import annotations

import itertools
import os
import subprocess
import time
from contextlib import suppress
from functools import cache
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
OWN = Path("/proc/self/cgroup")
_NUMBERS = itertools.count()
_REMOVE_S = 2.0
"""Longest time in seconds to wait for killed processes to leave the group."""
_LIMITS = {
    "memory.max": "memory",
    "memory.swap.max": "swap",
    "memory.limit_in_bytes": "memory",
    "pids.max": "processes",
}
"""{file of a control group (version 2 or 1): name of the limit that it sets}."""


class Cgroup:
    """The folders of one control group. `join` is a shell command that moves its process into the group."""

    def __init__(self, folders: list[Path]) -> None:
        self.folders = folders

    @property
    def join(self) -> str:
        """Shell command that moves the shell's process into the group."""
        return " && ".join(f"echo $$ >{folder}/cgroup.procs" for folder in self.folders)

    def out_of_memory(self) -> bool:
        """Return whether the kernel has killed a process of the group because of its memory."""
        for folder in self.folders:
            for name in ("memory.events", "memory.oom_control"):
                with suppress(OSError):
                    counts = dict(line.split() for line in (folder / name).read_text().splitlines())
                    return int(counts.get("oom_kill", 0)) > 0
        return False

    def remove(self) -> None:
        """Remove the group after its processes have ended. If this fails, `sweep` removes the group at the next start."""
        deadline = time.monotonic() + _REMOVE_S
        for folder in self.folders:
            while folder.exists():
                try:
                    folder.rmdir()
                except OSError:
                    if time.monotonic() > deadline:
                        break
                    time.sleep(0.01)


def make(memory: int, processes: int) -> Cgroup | None:
    """Create a group with limits on memory (in bytes, including kernel memory) and processes; None if this is impossible."""
    return _made(parents, memory, processes) if (parents := _usable()) else None


def _made(parents: list[Path], memory: int, processes: int) -> Cgroup | None:
    name = f"megatron_rl-{os.getpid()}-{next(_NUMBERS)}"
    made = Cgroup([])
    for parent in parents:
        folder = parent / name
        try:
            folder.mkdir(mode=0o700)
            made.folders.append(folder)
            limits = {"memory": memory, "swap": 0, "processes": processes}
            for file, limit in _LIMITS.items():
                if (folder / file).exists():
                    (folder / file).write_text(str(limits[limit]))
        except OSError:
            made.remove()
            return None
    return made if made.folders else None


@cache
def _usable() -> list[Path]:
    """Return `_parents` if a process can join a group below them, else []. Groups of killed runs are removed first."""
    sweep()
    if not (parents := _parents()) or not (tried := _made(parents, 2**26, 4)):
        return []
    try:
        joined = subprocess.run(["/bin/sh", "-c", tried.join], capture_output=True, timeout=20, check=False)
        return parents if joined.returncode == 0 else []
    except (OSError, subprocess.TimeoutExpired):
        return []
    finally:
        tried.remove()


def version() -> str:
    """Return the version of control groups that can be created on this machine: v1, v2, or '' for none."""
    return f"v{1 + (len(found) == 1 and (found[0] / 'cgroup.controllers').exists())}" if (found := _usable()) else ""


@cache
def _parents() -> list[Path]:
    """Return the groups in which limited groups can be created: one in version 2, one per controller in version 1; else []."""
    own = [line.split(":", 2) for line in OWN.read_text().splitlines()]
    for number, _, path in own:
        if number != "0":
            continue
        here = ROOT / path.lstrip("/")
        for parent in (here, here.parent):
            with suppress(OSError):
                if "memory" in (parent / "cgroup.subtree_control").read_text().split() and os.access(parent, os.W_OK):
                    return [parent]
    found = [ROOT / kind / path.lstrip("/") for _, kind, path in own if kind in ("memory", "pids")]
    return found if found and all(os.access(folder, os.W_OK) for folder in found) else []


def sweep() -> int:
    """Remove the groups of runs that have ended (the process that created the group is gone). Returns the number of groups."""
    count = 0
    for parent in _parents():
        for folder in parent.glob("megatron_rl-*"):
            pid = folder.name.split("-")[1]
            if not Path(f"/proc/{pid}").exists():
                with suppress(OSError):
                    folder.rmdir()
                    count += 1
    return count
