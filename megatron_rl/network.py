"""Addresses of this machine, and whether another one can be reached."""

from __future__ import annotations

import socket
import time
from ipaddress import ip_address


def own_address(host: str, port: int = 80) -> str:
    """Address of this machine as `host` sees it (no packet is sent). Errors: OSError where there is no way to it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]


def wait_for_listener(host: str, port: int, timeout_s: float) -> None:
    """Return when something accepts connections there. Errors: TimeoutError, after timeout_s, with the last reason."""
    deadline = time.monotonic() + timeout_s
    while True:
        left = deadline - time.monotonic()
        try:
            socket.create_connection((host, port), timeout=min(5.0, max(0.1, left))).close()
            return
        except OSError as error:
            if left <= 0:
                raise TimeoutError(f"nothing listens there ({error.strerror or error})") from None
        time.sleep(0.2)


def is_loopback(host: str) -> bool:
    """Tell if an address or name is this machine's own alone."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
