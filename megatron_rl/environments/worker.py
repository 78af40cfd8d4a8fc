"""Child side of `WorkerPool`: reads pickled arguments from stdin, calls one function, writes pickled results to stdout.

Run as `python -m megatron_rl.environments.worker module:function memory_mb [module to import first ...]`.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pickle
import resource
import signal
import struct
import sys

HEADER = struct.Struct("<Q")
"""Length of the pickled message that follows."""
_PR_SET_PDEATHSIG = 1


def main(target: str, memory_mb: str, *imports: str) -> None:
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # a busy worker must not outlive a killed trainer
    if os.getppid() != parent:
        return
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    limit = int(memory_mb) * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    requests, replies = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a verifier prints must not mix with the replies
    module, _, function = target.partition(":")
    call = getattr(importlib.import_module(module), function)
    for name in imports:
        importlib.import_module(name)
    _send(replies, ("ready", None))
    while header := requests.read(HEADER.size):
        arguments = pickle.loads(requests.read(HEADER.unpack(header)[0]))  # from our own parent
        try:
            result = ("result", call(*arguments))
        except Exception as error:
            result = ("error", f"{type(error).__name__}: {error}"[:500])
        _send(replies, result)


def _send(stream, message) -> None:
    data = pickle.dumps(message)
    stream.write(HEADER.pack(len(data)) + data)
    stream.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
