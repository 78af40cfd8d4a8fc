"""How the processes of a run find each other, and whom they believe."""

from __future__ import annotations

import io
import pickle
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from ranks import run_ranks
from torch.distributed import distributed_c10d

from megatron_rl.config import ParallelConfig
from megatron_rl.credentials import RUN_KEY
from megatron_rl.distributed import parallel
from megatron_rl.distributed.processes import dumps, listening_store, loads
from megatron_rl.errors import UserError

LIMIT = timedelta(seconds=60)


def listening() -> set[str]:
    """The addresses on which this process and those below it listen."""
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    found = [connection for process in processes for connection in process.net_connections("inet")]
    return {connection.laddr.ip for connection in found if connection.status == psutil.CONN_LISTEN}


def addresses_of_a_rank() -> tuple[set[str], list[int]]:
    ranks = parallel.initialize(ParallelConfig(), 0)
    found = listening()
    ranks.barrier()
    return found, ranks.gather(ranks.rank)


@pytest.mark.parametrize("processes", [1, 2])
def test_processes_of_one_machine_listen_on_it_alone(processes):
    for found, gathered in run_ranks(processes, f"{__name__}:addresses_of_a_rank", ()):
        assert found and found <= {"127.0.0.1"}
        assert gathered == [*range(processes)]


def test_a_store_listens_on_its_address_alone():
    store = listening_store("127.0.0.1", 0, 3, LIMIT, wait=False)
    other = dist.TCPStore("127.0.0.1", store.port, 3, is_master=False, timeout=LIMIT, wait_for_workers=False)
    other.set("a", "b")
    assert store.get("a") == b"b"
    found = [c.laddr.ip for c in psutil.Process().net_connections("inet") if c.laddr.port == store.port]
    assert set(found) == {"127.0.0.1"}


class Planted:
    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> tuple:
        return open, (self.mark, "w")


def test_what_no_process_of_the_run_has_signed_is_not_unpickled(tmp_path, monkeypatch):
    monkeypatch.setenv(RUN_KEY, "one")
    value = {"a": [1, None, (2.5, "ß")]}
    assert loads(dumps(value)) == value
    ours = dumps(Planted(tmp_path / "written"))
    monkeypatch.setenv(RUN_KEY, "another")
    for foreign in (ours, pickle.dumps(Planted(tmp_path / "written")), ours[:40], b"", ours[:32] + dumps(1)[32:]):
        with pytest.raises(UserError, match=f"not from its run: .*{RUN_KEY}"):
            loads(foreign)
    assert not (tmp_path / "written").exists()


def objects_of_torch(mark: str) -> str:
    """An object that torch is to unpickle, as somebody would send it who has connected to a port."""
    parallel.initialize(ParallelConfig(), 0)
    try:
        distributed_c10d._unpickler(io.BytesIO(pickle.dumps(Planted(Path(mark))))).load()
    except UserError as error:
        return str(error)
    return "unpickled"


def test_objects_of_torch_are_signed_too(tmp_path):
    [said] = run_ranks(1, f"{__name__}:objects_of_torch", (str(tmp_path / "written"),))
    assert "not from its run" in said and not (tmp_path / "written").exists()
