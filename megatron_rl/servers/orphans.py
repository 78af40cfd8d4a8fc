"""Removes the sockets, files and shared memory that SGLang leaves behind when it is killed.

A server has a folder of its own for the former, as its TMPDIR. Who made the folder holds a lock on a file in it for as long as
it lives; a folder whose lock is free is removed when the next server starts. Standard library alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

PREFIX = "megatron-rl-sglang-"
LOCK = "lock"
SHARED_MEMORY = "/dev/shm/sglang_loads_"
"""Prefix of the files of SGLang's managers/load_snapshot.py; the rest of a name is random."""
YOUNG_S = 60.0
"""Shared memory so new may be a server's that has not mapped it yet."""


@contextlib.contextmanager
def own_folder() -> Iterator[dict[str, str]]:
    """Environment variables of a server by which it writes into a folder of its own, which is removed at the end."""
    sweep()
    folder, lock = _make()
    try:
        # What torch has compiled is for the next server too.
        yield {
            "TMPDIR": str(folder),
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR") or compiled() or f"{folder}/inductor",
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def compiled() -> str:
    """Folder of what torch compiles; empty where there is no home to write into.

    torch's own is in /tmp: another user could make it first, with code that is loaded.
    """
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        folder = cache / "megatron_rl" / "torchinductor"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return ""
    return str(folder) if os.access(folder, os.W_OK) else ""


def sweep() -> None:
    """Remove what servers have left whose whole process tree was killed with its owner."""
    for folder in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        with contextlib.suppress(OSError):  # another user's, or one that is removed meanwhile
            lock = os.open(folder / LOCK, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(lock)
    old = {file for file in _shared_memory() if time.time() - _modified(file) > YOUNG_S}
    if old:
        remove(old - mapped(int(process.name) for process in Path("/proc").glob("[0-9]*")))


def mapped(processes: Iterable[int]) -> set[Path]:
    """The shared memory of servers that these processes have mapped."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):  # it ended, or is another user's
            for line in Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines():
                _, is_shared, rest = line.partition(SHARED_MEMORY)
                if is_shared:
                    found.add(Path(SHARED_MEMORY + rest.removesuffix(" (deleted)")))
    return found


def remove(files: Iterable[Path]) -> None:
    """Remove those that are there and ours to remove."""
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink()


def _make() -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT)
        with contextlib.suppress(OSError):  # somebody has swept it before it was locked
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(lock).st_ino == os.stat(folder / LOCK).st_ino:
                return folder, lock
        os.close(lock)


def _shared_memory() -> list[Path]:
    folder = Path(SHARED_MEMORY)
    mine = []
    for file in folder.parent.glob(folder.name + "*"):
        with contextlib.suppress(OSError):
            if file.stat().st_uid == os.getuid():
                mine.append(file)
    return mine


def _modified(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except OSError:
        return time.time()
