"""The trainer's bucket in the engine's hands: read by all of its ranks, written to by none."""

from __future__ import annotations

import pickle
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

from megatron_rl.sync.pythonpath.megatron_rl_plugin import memory
from megatron_rl.sync.weight_sync import SERVER_PYTHONPATH

# An engine's rank, which has the plugin by its own name: it loads the pickle, shows what it got, and zeroes it.
RANK = """
import pickle, sys, torch
bucket = pickle.loads(sys.stdin.buffer.read())
data = bucket["flattened_tensor"]
print(data.tolist(), [m.name for m in bucket["metadata"]])
data.view(torch.float32)[:2].zero_()
assert not data[:8].any()
"""


def load_elsewhere(pickled: bytes) -> str:
    environment = {"PYTHONPATH": str(SERVER_PYTHONPATH)}
    done = subprocess.run([sys.executable, "-c", RANK], input=pickled, capture_output=True, timeout=60, env=environment)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout.decode().strip()


def test_what_a_rank_writes_into_its_bucket_no_other_sees():
    """SGLang's gpt-oss zeroes `loaded_weight` in place on every tensor-parallel rank but the first."""
    buffer = memory.allocate(16)
    buffer.copy_(torch.arange(16, dtype=torch.uint8))
    entries = [{"name": "x", "shape": (4,), "dtype": "float32"}]
    pickled = memory.dump_call("map_bucket", (buffer.shared.path, 16, entries))
    seen = [load_elsewhere(pickled) for _ in range(2)]
    assert seen == [f"{list(range(16))} ['x']"] * 2
    assert buffer.tolist() == list(range(16))


def test_the_next_bucket_in_the_same_memory_is_seen():
    buffer = memory.allocate(8)
    for value in (1, 2):
        buffer.fill_(value)
        assert memory.map_bucket(buffer.shared.path, 8, [])["flattened_tensor"].tolist() == [value] * 8


def test_a_tensor_that_is_shared_by_handle_is_copied_by_the_rank(monkeypatch):
    """As with CUDA IPC, where the data is the trainer's own memory: the engine's plugin gives its rank a copy."""
    monkeypatch.syspath_prepend(str(SERVER_PYTHONPATH))
    data = torch.arange(8, dtype=torch.uint8).share_memory_()
    pickled = memory.dump_call("own_copy", ({"flattened_tensor": data, "metadata": []},), ForkingPickler)
    theirs = pickle.loads(pickled)["flattened_tensor"]
    theirs.zero_()
    assert data.tolist() == list(range(8))


@pytest.mark.parametrize("name", ["map_bucket", "own_copy"])
def test_the_engine_admits_what_is_called(name):
    assert (memory.MODULE, name) in memory.GLOBALS and callable(getattr(memory, name))
