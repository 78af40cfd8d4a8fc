"""A run's folder: only its owner can open it, and only one process at a time writes to it."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import sys
from pathlib import Path
from typing import TextIO

from megatron_rl.credentials import command_line
from megatron_rl.errors import UserError

NAME = "writer.lock"


def make_private(folder: Path) -> None:
    """Create a run's folder, or use an existing one, and give access to its owner only. Errors: OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid == os.geteuid():
        folder.chmod(0o700)


def lock(folder: Path) -> TextIO | None:
    """Lock a run's folder for writing. The lock ends when the returned file is closed or this process ends for any reason.

    The lock is a POSIX lock of this process. Child processes do not inherit it, so no child can hold it after this process has
    ended. Returns None if the file system has no locks. Errors: UserError that names the process that holds the lock.
    """
    path = folder / NAME
    file = path.open("a+")
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        file.seek(0)
        holder = file.read().strip() or "unknown"
        file.close()
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            return None
        raise UserError(
            f"run folder {folder}: another process writes to it ({holder}); wait for it, stop it, or choose another"
            " --name"
        ) from None
    file.truncate(0)
    command = command_line(["megatron-rl", *sys.argv[1:]])
    file.write(f"process {os.getpid()} on {socket.gethostname()}: {command}\n")
    file.flush()
    return file
