"""Groups of trainer and servers when a rank dies: the others wait no longer."""

from __future__ import annotations

import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from megatron_rl.sync.distributed import DistributedTransport
from megatron_rl.sync.transport import Bucket, Entry, WeightSyncError

LONG_S = 600.0
"""Longer than any wait of these tests may be."""
SIZE = 2**16


def join(body: dict, waits: threading.Event | None = None) -> dist.ProcessGroupGloo:
    """What SGLang does when it is asked to join, but for its registry of groups."""
    limit = timedelta(seconds=LONG_S)
    tcp = TCPStore(body["master_address"], body["master_port"], body["world_size"], False, limit, False)
    name = body["group_name"]
    if waits is not None:
        waits.set()
    store = PrefixStore("cpu/", PrefixStore(f"{name}/", PrefixStore(name, tcp)))
    return dist.ProcessGroupGloo(store, body["rank_offset"], body["world_size"], timeout=limit)


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


class TwoServers:
    """Two servers, one of which dies between two pushes. It has the methods of `Engines`."""

    addresses = ("http://127.0.0.1:1", "http://127.0.0.1:2")
    timeout_s = LONG_S

    def __init__(self, dies: int) -> None:
        self._dies, self._threads = dies, ThreadPoolExecutor(2)
        self._groups: list[dist.ProcessGroupGloo | None] = []
        self.received: Future = Future()

    def start(self, path: str, bodies) -> list[Future]:
        if path == "/init_weights_update_group":
            return [self._threads.submit(join, body) for body in bodies]
        assert path == "/update_weights_from_distributed"
        self._groups[self._dies] = None  # its connections close, as those of a process that is gone
        time.sleep(0.5)  # until the sender has noticed
        self.received = self._threads.submit(self._receive, self._groups[1 - self._dies])
        return [self._threads.submit(self._fail), self.received]

    def _receive(self, group) -> torch.Tensor:
        data = torch.zeros(SIZE, dtype=torch.uint8)
        group.broadcast([data], options()).wait(timedelta(seconds=LONG_S))
        return data

    def _fail(self) -> None:
        raise WeightSyncError("it has died")

    def wait(self, calls: list[Future]) -> None:
        found = [call.result(60) for call in calls]
        if not self._groups:
            self._groups = found

    def attempt(self, path: str, body: dict) -> None:
        assert path == "/destroy_weights_update_group"


def options() -> dist.BroadcastOptions:
    found = dist.BroadcastOptions()
    found.rootRank = found.rootTensor = 0
    found.timeout, found.asyncOp = timedelta(seconds=LONG_S), True
    return found


@pytest.mark.parametrize("dies", [0, 1])
def test_a_server_gets_its_bucket_though_another_one_has_died(dies):
    servers = TwoServers(dies)
    transport = DistributedTransport(servers, 1)  # pyright: ignore[reportArgumentType]: it asks no more of them
    transport.connect()
    bucket = Bucket(torch.randint(256, (SIZE,), dtype=torch.uint8), [Entry("w", torch.uint8, (SIZE,), 0, SIZE)])
    with pytest.raises(
        WeightSyncError, match="it has died"
    ) as kept:  # whose traceback keeps the broadcast, as a run's does
        transport.send(bucket, None)
    assert torch.equal(servers.received.result(60), bucket.data)  # its own limit is ten times as far away
    transport.close()
    assert kept
