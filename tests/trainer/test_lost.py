"""What a process says when another one, or the place where they met, is gone."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_rl.config import ParallelConfig
from megatron_rl.distributed import parallel
from megatron_rl.distributed.collective_errors import lost_contact
from megatron_rl.servers.server import reserve_port
from tests.ranks import fork, rank_environment


def _rank(environment: dict[str, str], gone: int, out: Path) -> None:
    os.environ.update(environment)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    dist.barrier()
    if dist.get_rank() == gone:
        os._exit(0)
    try:
        for _ in range(1000):  # the first may be through before the other one is gone
            dist.all_reduce(torch.ones(1))
    except RuntimeError as error:
        out.write_text(str(lost_contact(error)))
    os._exit(0)


@pytest.mark.parametrize("gone, who", [(1, "contact with rank 1 is lost"), (0, "contact with 127.0.0.1, where the")])
def test_the_one_that_is_left_names_the_other(gone, who, tmp_path):
    """Rank 0 has the store: without it nobody can be asked who is there."""
    with reserve_port() as reserved:
        processes = [fork(_rank, rank_environment(rank, 2, reserved), gone, tmp_path / "said") for rank in range(2)]
        for process in processes:
            process.join(120)
            assert process.exitcode == 0
    said = (tmp_path / "said").read_text()
    assert said.endswith("Run the same command again to go on from the last checkpoint")
    assert said.startswith(who) and f": rank {1 - gone} on " in said and "\n" not in said


def _alone(environment: dict[str, str], out: Path) -> None:
    os.environ.update(environment)
    try:
        parallel.initialize(ParallelConfig(timeout_s=2), seed=0)
    except RuntimeError as error:
        out.write_text(str(lost_contact(error)))
    os._exit(0)


@pytest.mark.parametrize("rank, reason", [(0, ""), (1, "nothing listens there (Connection refused)")])
def test_one_that_never_meets_the_others_says_so(rank, reason, tmp_path):
    """As when another one has died before they met. Rank 1's wait is ours: torch's is longer than it is told."""
    with reserve_port() as reserved:
        environment = rank_environment(rank, 2, reserved)
        process = fork(_alone, environment, tmp_path / "said")
        process.join(120)
        assert process.exitcode == 0
    said = (tmp_path / "said").read_text()
    met = f"127.0.0.1:{environment['MASTER_PORT']}"
    assert said.startswith(f"rank {rank} on ") and f" could not connect to the others at {met} within " in said
    assert reason in said and "\n" not in said


def test_other_errors_are_left_alone():
    assert lost_contact(RuntimeError("a tensor has the wrong shape")) is None
    assert lost_contact(RuntimeError("[gloo/transport/tcp/pair.cc:1] nobody is waited for by one process")) is None
