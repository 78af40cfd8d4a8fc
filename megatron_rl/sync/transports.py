"""The weight transports of `sync.transport`, with the attributes that checks need. This module imports nothing heavy."""

from __future__ import annotations

from megatron_rl.config.registry import resolve
from megatron_rl.errors import UserError
from megatron_rl.sync.disk import DiskTransport
from megatron_rl.sync.distributed import DistributedTransport
from megatron_rl.sync.tensor import TensorTransport
from megatron_rl.sync.transport import Transport

TRANSPORTS: dict[str, type[Transport]] = {
    "distributed": DistributedTransport,
    "tensor": TensorTransport,
    "disk": DiskTransport,
}
"""Built-in transports, in the order in which messages suggest them as alternatives."""


def transport_class(name: str) -> type[Transport]:
    """Return the class that sync.transport names: built-in, or the user's own. Errors: UserError."""
    found = resolve("weight transport", name, TRANSPORTS, "sync.transport")
    if not (isinstance(found, type) and issubclass(found, Transport)):
        raise UserError(
            f"config: sync.transport: {name} is no subclass of Transport (megatron_rl/sync/transport.py): {found!r:.60}"
        )
    return found


def instead(*, colocate: bool, shares_memory: bool = True, needs_peer_access: bool = True) -> str:
    """Return the first built-in transport that meets the conditions.

    colocate: the transport must work if trainer and engine share a GPU. shares_memory, needs_peer_access: allowed properties.
    """
    return next(
        name
        for name, kind in TRANSPORTS.items()
        if not (colocate and kind.not_on_one_gpu)
        and kind.shares_memory <= shares_memory
        and kind.needs_peer_access <= needs_peer_access
    )
