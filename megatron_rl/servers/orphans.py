"""Removes the sockets, files and shared memory that a killed SGLang server leaves.

Each server has its own folder for sockets and files, as its TMPDIR. The process that made the folder locks a file in the folder
until the process ends. The next start of a server removes the folders whose lock is free. Uses only the standard library.
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
"""Prefix of the shared-memory files that SGLang's managers/load_snapshot.py makes; the suffix of each name is random."""
YOUNG_S = 60.0
"""Shared-memory files younger than this many seconds are kept, because their server may not have mapped them yet."""


@contextlib.contextmanager
def own_folder() -> Iterator[dict[str, str]]:
    """Make a folder for one server, yield the environment variables that name the folder, and remove it at the end.

    Leftovers of killed servers are removed first.
    """
    sweep()
    folder, lock = _make()
    try:
        # Compiled code of torch is kept for the next server.
        yield {
            "TMPDIR": str(folder),
            "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR") or compiled() or f"{folder}/inductor",
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def compiled() -> str:
    """Return the cache folder for code that torch compiles; '' if the user's cache folder cannot be written.

    torch's default folder is in /tmp, where another user could create it first, with code that torch then loads.
    """
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
        folder = cache / "megatron_rl" / "torchinductor"
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except (OSError, RuntimeError):
        return ""
    return str(folder) if os.access(folder, os.W_OK) else ""


def sweep() -> None:
    """Remove folders and shared memory of servers that were killed together with their supervisor (`supervise.py`)."""
    for folder in Path(tempfile.gettempdir()).glob(PREFIX + "*"):
        with contextlib.suppress(OSError):  # another user's folder, or a folder removed meanwhile
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
    """Return the servers' shared-memory files that these processes (ids) have mapped."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):  # the process ended, or is another user's
            for line in Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines():
                _, is_shared, rest = line.partition(SHARED_MEMORY)
                if is_shared:
                    found.add(Path(SHARED_MEMORY + rest.removesuffix(" (deleted)")))
    return found


def remove(files: Iterable[Path]) -> None:
    """Remove files. Skip files that do not exist or that this user may not remove."""
    for file in files:
        with contextlib.suppress(OSError):
            file.unlink()


def _make() -> tuple[Path, int]:
    while True:
        folder = Path(tempfile.mkdtemp(prefix=PREFIX))
        lock = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT)
        with contextlib.suppress(OSError):  # another process swept the folder before it was locked
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
