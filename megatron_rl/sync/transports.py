"""The weight transports of `sync.transport`. This module loads nothing heavy, because checks use it before torch is loaded."""

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
"""Built-in transports by name, in the order in which error messages suggest them."""


def transport_class(name: str) -> type[Transport]:
    """Return the transport class that sync.transport names: a built-in one, or the user's own. Errors: UserError."""
    found = resolve("weight transport", name, TRANSPORTS, "sync.transport")
    if not (isinstance(found, type) and issubclass(found, Transport)):
        raise UserError(
            f"config: sync.transport: {name} is no subclass of Transport (megatron_rl/sync/transport.py): {found!r:.60}"
        )
    return found


def instead(*, colocate: bool, shares_memory: bool = True, needs_peer_access: bool = True) -> str:
    """Return the name of the first built-in transport that meets the conditions.

    colocate: the transport must work if trainer and engine share a GPU. shares_memory, needs_peer_access: whether the transport
    may have this property.
    """
    return next(
        name
        for name, kind in TRANSPORTS.items()
        if not (colocate and kind.not_on_one_gpu)
        and kind.shares_memory <= shares_memory
        and kind.needs_peer_access <= needs_peer_access
    )
