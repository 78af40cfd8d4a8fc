"""Stands for Python where pytest-xdist starts a worker: `worker.py -u -c CODE` runs CODE in a fork of the process that has
imported the trainer, so that a worker has the tests collected in a third of the time, and most of its memory in common with
others."""

from __future__ import annotations

import os
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parent.parent)  # of this script: the folder above it is the one wanted

from tests.preloaded import TRAINER, execute
from tests.zygote import Process


def main() -> int:
    """Returns the exit status of the fork, which is killed with this process."""
    process = Process(TRAINER, execute, (sys.argv[-1],), files=(0, 1, 2))
    for number in (0, 1):  # of which the other end is to see the end
        os.close(number)
    process.join()
    return process.exitcode if process.exitcode is not None and process.exitcode >= 0 else 1


if __name__ == "__main__":
    sys.exit(main())
