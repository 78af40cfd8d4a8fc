"""Removes the sockets, files and shared memory that SGLang leaves behind when it is killed.

A server has its own folder for sockets and files, as its TMPDIR. The process that made the folder holds a lock on a file in it
as long as the process lives. The next start of a server removes folders whose lock is free. Uses only the standard library.
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
"""Prefix of the files of SGLang's managers/load_snapshot.py; the rest of a file name is random."""
YOUNG_S = 60.0
"""Age in seconds below which shared memory is kept, as its server may not have mapped it yet."""


@contextlib.contextmanager
def own_folder() -> Iterator[dict[str, str]]:
    """Yield environment variables that make a server write into its own folder, which is removed at the end."""
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
    """Return a folder for code that torch compiles; '' if there is no home folder to write into.

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
    """Remove what servers have left if their whole process tree was killed together with its owner."""
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
    """Return the shared-memory files of servers that these processes have mapped."""
    found = set()
    for process in processes:
        with contextlib.suppress(OSError):  # the process ended, or is another user's
            for line in Path(f"/proc/{process}/maps").read_text(errors="replace").splitlines():
                _, is_shared, rest = line.partition(SHARED_MEMORY)
                if is_shared:
                    found.add(Path(SHARED_MEMORY + rest.removesuffix(" (deleted)")))
    return found


def remove(files: Iterable[Path]) -> None:
    """Remove the files that exist and that this user may remove."""
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
