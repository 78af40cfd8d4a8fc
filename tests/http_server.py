"""An HTTP server of a test's own: a process at a port that is reserved for it, which may be killed and started again."""

from __future__ import annotations

import socket
import subprocess
import time
from collections.abc import Callable, Sequence

from megatron_rl.servers.server import reserve_port


class HttpServer:
    """`command(port)` is started at once and whenever `start` is called; `close` ends it and gives the port back."""

    def __init__(self, command: Callable[[int], Sequence[str]]) -> None:
        self._reserved = reserve_port()
        self.port: int = self._reserved.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._command = command
        self.start()

    def start(self, timeout_s: float = 100.0) -> None:
        """Start it, and wait until it takes connections."""
        self.process = subprocess.Popen(self._command(self.port))
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and self.process.poll() is None:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.05)
        self.kill()
        raise AssertionError(f"the server does not start: {' '.join(self._command(self.port))}")

    def kill(self) -> None:
        """End the process, if it has not ended, and wait for it."""
        self.process.kill()
        self.process.wait(20)

    def close(self) -> None:
        """End it for good."""
        self.kill()
        self._reserved.close()
