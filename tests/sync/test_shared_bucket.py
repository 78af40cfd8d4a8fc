"""The trainer's bucket in the engine's hands: read by all of its ranks, written to by none."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
from megatron_rl_plugin import memory, processors

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
    done = subprocess.run([sys.executable, "-c", RANK], input=pickled, capture_output=True, timeout=60)
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


def test_a_tensor_that_is_shared_by_handle_is_copied_by_the_rank():
    """As with CUDA IPC, where the data is the trainer's own memory: the engine's plugin gives its rank a copy."""
    data = torch.arange(8, dtype=torch.uint8).share_memory_()
    pickled = memory.dump_call("own_copy", ({"flattened_tensor": data, "metadata": []},), ForkingPickler)
    theirs = pickle.loads(pickled)["flattened_tensor"]
    theirs.zero_()
    assert data.tolist() == list(range(8))


@pytest.mark.parametrize("name", ["map_bucket", "own_copy"])
def test_the_engine_admits_what_is_called(name):
    assert (memory.MODULE, name) in memory.GLOBALS and callable(getattr(memory, name))


def test_what_is_no_bucket_of_ours_is_not_mapped(tmp_path):
    """A file of the server's user, memory of another name, one that is too small, a pipe, a folder."""
    file = tmp_path / memory.NAME
    file.write_bytes(b"secret of the server's user")
    other = os.memfd_create("another")
    os.ftruncate(other, 64)
    buffer = memory.allocate(8)
    os.mkfifo(tmp_path / "pipe")
    link = tmp_path / f"memfd:{memory.NAME} (deleted)"
    link.symlink_to(file)
    paths = (file, f"/proc/self/fd/{other}", tmp_path / "pipe", tmp_path, link, "/proc/self/environ", "/dev/zero")
    for path, size in ((buffer.shared.path, 9), *((path, 8) for path in paths)):
        with pytest.raises(ValueError, match="is not a bucket of . bytes made by a trainer of this user"):
            memory.map_bucket(str(path), size, [])
    os.close(other)
    if not os.geteuid():  # memory of another user, to a server that root has started
        os.seteuid(65534)
        try:
            theirs = os.memfd_create(memory.NAME)
            os.ftruncate(theirs, 8)
        finally:
            os.seteuid(0)
        with pytest.raises(ValueError, match="is not a bucket"):
            memory.map_bucket(f"/proc/self/fd/{theirs}", 8, [])
        os.close(theirs)


class Planted:
    def __init__(self, mark: str) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple:
        return open, (self.mark, "w")


def test_a_logit_processor_is_a_name(tmp_path):
    """SGLang takes the hexadecimal pickle of a class, in JSON, and loads it."""
    pickled = pickle.dumps(Planted(str(tmp_path / "written"))).hex()
    for asked in (f'{{"callable": "{pickled}"}}', pickled, "", "os.system", f"{processors.PRUNE_TAIL}\n"):
        with pytest.raises(ValueError, match="supports only megatron_rl_plugin.PruneTail"):
            processors.class_named(asked)
    assert not (tmp_path / "written").exists()
