"""Which of its addresses this machine is known by."""

from __future__ import annotations

import socket


def own_address(host: str, port: int = 80) -> str:
    """Address of this machine as `host` sees it (no packet is sent). Errors: OSError where there is no way to it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]
