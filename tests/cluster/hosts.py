"""Several hosts on this machine: network namespaces around a bridge, with links that can be cut. Needs root.

They share the file system, as nodes of a cluster do, and the machine's processes: those of a host are ended by its name.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

NETWORK = "10.213.7"


class Hosts:
    """A context manager: hosts number 1, 2, ... are there within; at the end they and their processes are gone.

    Public fields: count.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self._prefix = f"mrl{os.getpid()}"
        self._processes: dict[int, list[subprocess.Popen[bytes]]] = {}

    def __enter__(self) -> Hosts:
        try:
            self._build()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _build(self) -> None:
        hub = self._name(0)
        _run("ip", "netns", "add", hub)
        _run("ip", "-n", hub, "link", "add", "bridge", "type", "bridge")
        _run("ip", "-n", hub, "link", "set", "bridge", "up")
        for host in range(1, self.count + 1):
            name = self._name(host)
            _run("ip", "netns", "add", name)
            _run("ip", "-n", hub, "link", "add", f"port{host}", "type", "veth", "peer", "name", "eth0", "netns", name)
            _run("ip", "-n", hub, "link", "set", f"port{host}", "master", "bridge", "up")
            _run("ip", "-n", name, "address", "add", f"{self.address(host)}/24", "dev", "eth0")
            for link in ("lo", "eth0"):
                _run("ip", "-n", name, "link", "set", link, "up")
            # `ip netns exec` puts these in the place of those of /etc. Names are looked up nowhere else, which takes long.
            files = Path("/etc/netns") / name
            files.mkdir(parents=True)
            (files / "nsswitch.conf").write_text("hosts: files\n")
            (files / "hosts").write_text(f"127.0.0.1 localhost\n{self.address(host)} {socket.gethostname()}\n")

    def __exit__(self, *_exception: object) -> None:
        for host in range(self.count + 1):
            self.end(host)
            subprocess.run(["ip", "netns", "delete", self._name(host)], capture_output=True, timeout=30)
            shutil.rmtree(Path("/etc/netns") / self._name(host), ignore_errors=True)

    def _name(self, host: int) -> str:
        return f"{self._prefix}-{host}"

    def address(self, host: int) -> str:
        """In the hosts' network."""
        return f"{NETWORK}.{host}"

    def start(self, host: int, command: Sequence[str], log: Path, **variables: str) -> subprocess.Popen[bytes]:
        """A process of a host; its output goes to the end of log. variables: of its environment, beside this process's."""
        with log.open("ab") as out:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self._name(host), *command],
                stdout=out,
                stderr=out,
                start_new_session=True,
                env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
            )
        self._processes.setdefault(host, []).append(process)
        return process

    def end(self, host: int) -> None:
        """kill -9 of all that runs there, as when the host is lost; what it wrote stays."""
        found = subprocess.run(["ip", "netns", "pids", self._name(host)], capture_output=True, text=True, timeout=30)
        for pid in map(int, found.stdout.split()):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._processes.pop(host, []):
            process.wait(30)

    def cut(self, host: int) -> None:
        """Take the plug out: no packet goes to or from it, and nobody is told."""
        _run("ip", "-n", self._name(0), "link", "set", f"port{host}", "down")

    def join(self, host: int) -> None:
        """Put the plug back in."""
        _run("ip", "-n", self._name(0), "link", "set", f"port{host}", "up")


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
