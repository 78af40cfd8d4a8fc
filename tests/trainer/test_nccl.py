"""The trainer tells NCCL what SGLang tells it (the server's side: tests/servers/test_choices.py)."""

from __future__ import annotations

import os

import pytest
from ranks import run_ranks

from megatron_rl.config import ParallelConfig
from megatron_rl.distributed import parallel


def setting_after_start(given: str | None) -> str | None:
    os.environ.pop("NCCL_CUMEM_ENABLE", None)
    if given:
        os.environ["NCCL_CUMEM_ENABLE"] = given
    parallel.initialize(ParallelConfig(), seed=0)
    return os.environ.get("NCCL_CUMEM_ENABLE")


@pytest.mark.parametrize("given", [None, "1"])
def test_a_users_own_setting_stays_and_else_it_is_sglangs(given):
    assert run_ranks(1, "trainer.test_nccl:setting_after_start", (given,)) == [given or "0"]
