"""A run's folder is its owner's alone, and one process writes it at a time."""

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
    """Make a run's folder, or take one that is there, for its owner's eyes alone. Errors: OSError."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid == os.geteuid():
        folder.chmod(0o700)


def lock(folder: Path) -> TextIO | None:
    """Be the writer of a run's folder until the returned file is closed or this process ends, in whatever way.

    The lock is the process's own (POSIX): no child inherits it, so none can hold it longer. None where the file system has
    no locks. Errors: UserError that names the process which writes there already.
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
            f"run folder {folder}: another process writes there ({holder}); wait for it or end it, or choose another --name"
        ) from None
    file.truncate(0)
    command = command_line(["megatron-rl", *sys.argv[1:]])
    file.write(f"process {os.getpid()} on {socket.gethostname()}: {command}\n")
    file.flush()
    return file
