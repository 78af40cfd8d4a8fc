"""Connections between a run's processes: a rendezvous that listens on a single address, and signed objects.

The objects that torch, Megatron and this package send between processes are pickles over gloo, and gloo's listeners accept
every connection. So each object is signed with the key of the run. An object without a valid signature is refused before it is
unpickled.
"""

from __future__ import annotations

import hashlib
import hmac
import inspect
import io
import logging
import os
import pickle
import socket
import time
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address
from typing import IO, Any

import torch.distributed as dist
from torch.distributed import TCPStore, distributed_c10d  # pyright: ignore[reportPrivateImportUsage]: documented there
from torch.distributed.distributed_c10d import Backend, ProcessGroup, ProcessGroupGloo

from megatron_rl.credentials import RUN_KEY
from megatron_rl.errors import UserError

# -- network -------------------------------------------------------------------------------------------------------------
# Addresses of this machine, and reachability of another machine.


def own_address(host: str, port: int = 80) -> str:
    """Return this machine's address on the route to `host` (no packet is sent). Errors: OSError if there is no route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, port))
        return probe.getsockname()[0]


def wait_for_listener(host: str, port: int, timeout_s: float) -> None:
    """Wait until a process accepts connections at host:port. Errors: TimeoutError after timeout_s, with the last reason."""
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
    """Return True if an address or host name can only be reached from this machine."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


# -- gloo device ---------------------------------------------------------------------------------------------------------
# One gloo device for all groups of a process.
# torch gives each group its own device, with a thread that wakes up a hundred times a second as long as the group lives.
# Megatron makes about thirty groups.


def _devices() -> list[Any]:
    """Return a gloo device for each interface in GLOO_SOCKET_IFNAME; by default, for the interface that leads to MASTER_ADDR.

    torch's default uses the address of the host's name. On a cluster, this is often the wrong network, and on Debian it is the
    loopback interface.
    """
    if names := os.environ.get("GLOO_SOCKET_IFNAME"):
        return [ProcessGroupGloo.create_device(interface=name) for name in names.split(",")]
    one_host = os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE")
    with suppress(OSError):
        address = own_address(os.environ.get("MASTER_ADDR", "127.0.0.1"))
        if one_host or not address.startswith("127."):
            return [ProcessGroupGloo.create_device(hostname=address)]
    return [ProcessGroupGloo.create_default_device()]


def share_device() -> None:
    """Let all new gloo groups share the same devices. With a torch older than the pinned version, do nothing."""
    if "_backend_type" not in inspect.signature(Backend.register_backend).parameters:
        return  # it would treat a backend that is registered again as foreign, without monitored barrier
    devices = _devices()

    def create(wanted: Any, _: object) -> ProcessGroupGloo:  # torch's own function except for the options
        options: Any = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]: torch's stubs call it Options
        options._devices, options._threads, options._timeout = devices, 2 * len(devices), wanted.timeout
        group = ProcessGroupGloo(wanted.store, wanted.group_rank, wanted.group_size, options)
        group.options.global_ranks_in_group = wanted.global_ranks_in_group
        group.options.group_name = wanted.group_id
        return group

    Backend.register_backend(
        Backend.GLOO,
        create,
        extended_api=True,
        devices=Backend.backend_capability[Backend.GLOO],
        _backend_type=ProcessGroup.BackendType.GLOO,
    )


# -- processes -----------------------------------------------------------------------------------------------------------


def join(backend: str, timeout: timedelta) -> None:
    """Start torch.distributed from torchrun's environment, or for this process alone without it. Collective.

    Errors: torch's DistNetworkError if the other processes cannot be reached.
    """
    share_device()
    # torch has no argument for the pickler, but uses these two names.
    distributed_c10d._pickler, distributed_c10d._unpickler = _SignedPickler, _SignedUnpickler
    environment = os.environ
    rank, size = int(environment.get("RANK", 0)), int(environment.get("WORLD_SIZE", 1))
    host, port = environment.get("MASTER_ADDR", "127.0.0.1"), int(environment.get("MASTER_PORT", 0))
    if "RANK" not in environment:
        rank, size, host, port = 0, 1, "127.0.0.1", 0
    if size > 1 and not rank and not environment.get(RUN_KEY):
        logging.getLogger(__name__).warning(
            "the processes of this run trust everyone who reaches their ports; give them all one secret in %s", RUN_KEY
        )
    if rank:
        _reach(host, port, timeout.total_seconds())
    if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or not is_loopback(host):
        dist.init_process_group(backend, timeout=timeout)
        return
    if rank:
        store = TCPStore(host, port, size, is_master=False, timeout=timeout)
    else:
        store = listening_store(host, port, size, timeout)
    dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)


def listening_store(host: str, port: int, size: int, timeout: timedelta, *, wait: bool = True) -> TCPStore:
    """Return a store for `size` processes that listens on one address. torch's own store listens on all addresses.

    port: 0 for a free port. wait: block until all processes have joined. Errors: OSError if the address does not belong to this
    machine, or if it is in use.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.create_server((host, port), family=family, backlog=1024)
    port = listener.getsockname()[1]
    return TCPStore(
        host,
        port,
        size,
        is_master=True,
        timeout=timeout,
        wait_for_workers=wait,
        master_listen_fd=listener.detach(),
    )


def dumps(value: Any) -> bytes:
    """Return the signed pickle of an object, for another process of the run."""
    content = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    return _signature(content) + content


def loads(signed: bytes) -> Any:
    """Return the object from a signed pickle of `dumps`. Errors: UserError, before unpickling, if the signature is invalid."""
    size = hashlib.sha256().digest_size
    if not hmac.compare_digest(signed[:size], _signature(signed[size:])):
        raise UserError(
            f"a message to this process is not from its run: another program uses its ports, or {RUN_KEY} is not the same"
            " in the environment of all processes"
        )
    return pickle.loads(memoryview(signed)[size:])


def _signature(content: bytes) -> bytes:
    return hmac.digest(os.environ.get(RUN_KEY, "").encode(), content, "sha256")


class _SignedPickler:
    def __init__(self, file: IO[bytes]) -> None:
        self._file = file

    def dump(self, value: Any) -> None:
        self._file.write(dumps(value))


class _SignedUnpickler:
    def __init__(self, file: io.BytesIO) -> None:
        self._file = file

    def load(self) -> Any:
        return loads(self._file.getvalue())


def _reach(host: str, port: int, timeout_s: float) -> None:
    """Wait until rank 0's store listens.

    If no process listens, torch's own connect takes twice as long as its timeout.
    """
    try:
        wait_for_listener(host, port, timeout_s)
    except TimeoutError as error:
        raise dist.DistNetworkError(str(error)) from None
