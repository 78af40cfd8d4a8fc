"""Makes the rendezvous store of a server's processes listen only on loopback. torch's store listens on all addresses."""

from __future__ import annotations

import socket
from collections.abc import Callable
from datetime import timedelta
from ipaddress import ip_address
from typing import Any

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]: documented there


def on_loopback(
    original: Callable[..., Any], hostname: str, port: int, rank: int, world_size: int, timeout: timedelta, *args: Any
) -> Any:
    """Create a store that listens only on 127.0.0.1, if the processes meet at this address (hook around _create_c10d_store)."""
    if rank or not _is_loopback(hostname):
        return original(hostname, port, rank, world_size, timeout, *args)
    listener = socket.create_server((hostname, port), backlog=1024)
    return TCPStore(hostname, port, world_size, is_master=True, timeout=timeout, master_listen_fd=listener.detach())


def _is_loopback(hostname: str) -> bool:
    try:
        return ip_address(hostname).is_loopback and ":" not in hostname
    except ValueError:
        return False
