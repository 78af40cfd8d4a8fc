"""The group of trainer and server when a rank dies before all have come: the others wait no longer."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from megatron_rl.sync.distributed import DistributedTransport
from megatron_rl.sync.transport import WeightSyncError

LONG_S = 600.0
"""Longer than any wait of this test may be."""


def join(body: dict, waits: threading.Event) -> None:
    """What SGLang does when it is asked to join, but for its registry of groups."""
    limit = timedelta(seconds=LONG_S)
    tcp = TCPStore(body["master_address"], body["master_port"], body["world_size"], False, limit, False)
    name = body["group_name"]
    waits.set()
    store = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, tcp)))
    dist.ProcessGroupGloo(store, body["rank_offset"], body["world_size"], timeout=limit)


class Server:
    """A server of two ranks, the second of which dies when the first one waits for it. It has the methods of `Engines`."""

    addresses = ("http://127.0.0.1:1",)
    timeout_s = LONG_S

    def __init__(self) -> None:
        self._threads, self._waits = ThreadPoolExecutor(2), threading.Event()
        self.first: Future = Future()

    def start(self, path: str, bodies: list[dict]) -> list[Future]:
        assert path == "/init_weights_update_group"
        self.first = self._threads.submit(join, bodies[0], self._waits)
        return [self._threads.submit(self._die)]

    def _die(self) -> None:
        assert self._waits.wait(60)
        raise WeightSyncError("it has died")

    def wait(self, calls: list[Future]) -> None:
        calls[0].result(60)


def test_a_rank_that_waits_for_one_that_has_died_is_let_go():
    server = Server()
    transport = DistributedTransport(server, 2)  # pyright: ignore[reportArgumentType]: it asks no more of them
    with pytest.raises(WeightSyncError, match="it has died"):
        transport.connect()
    with pytest.raises(RuntimeError):  # its own limit is ten times as far away
        server.first.result(60)
