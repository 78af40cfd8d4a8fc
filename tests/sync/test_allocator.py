"""What trainer processes and the engine's are told about torch's allocator."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from megatron_rl.checks.preflight import preflight
from megatron_rl.config.load import build_config
from megatron_rl.errors import UserError
from megatron_rl.models.precision import Machine
from megatron_rl.servers.server import RolloutServer
from megatron_rl.sync.allocator import allocator_settings, shares_expandable_memory
from megatron_rl.sync.transports import TRANSPORTS

EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}


def test_segments_grow_by_default():
    assert allocator_settings(TRANSPORTS["distributed"], {}) == EXPANDABLE
    assert allocator_settings(TRANSPORTS["disk"], {}) == EXPANDABLE


def test_not_where_the_engine_maps_the_trainers_memory():
    assert allocator_settings(TRANSPORTS["tensor"], {}) == {}


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_the_users_own_setting_stays(name):
    assert allocator_settings(TRANSPORTS["distributed"], {name: "max_split_size_mb:512"}) == {}


def test_torch_refuses_to_share_what_we_think_it_does():
    """Its own words, in the library that is installed: a release that shares such memory would have others."""
    library = os.path.join(os.path.dirname(torch.__file__), "lib", "libc10_cuda.so")
    if not os.path.exists(library):
        pytest.skip("torch without CUDA")
    with open(library, "rb") as file:
        assert b"expandable_segments:True cannot be shared between processes" in file.read()


def test_what_cannot_be_pushed_is_refused(tiny_model, monkeypatch):
    assert shares_expandable_memory(TRANSPORTS["tensor"], EXPANDABLE)
    assert not shares_expandable_memory(TRANSPORTS["tensor"], {**EXPANDABLE, "TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC": "1"})
    assert not shares_expandable_memory(TRANSPORTS["distributed"], EXPANDABLE)
    monkeypatch.setattr(
        "megatron_rl.checks.model_and_machine.this_machine", lambda: Machine((9, 0), None, None, "13.0")
    )
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv(*EXPANDABLE.popitem())
    with pytest.raises(UserError, match="or set sync.transport: distributed"):
        preflight(
            build_config({"model": {"path": str(tiny_model("qwen3_moe"))}, "sync": {"transport": "tensor"}}), "train"
        )


def test_the_engine_does_not_inherit_it(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    settings = build_config({"model": {"path": str(tmp_path)}})
    server = RolloutServer.from_config(settings, log_path=tmp_path / "log")
    assert "PYTORCH_CUDA_ALLOC_CONF" not in server.environment()


def test_it_is_decided_before_torch_is_imported():
    code = "import sys, megatron_rl.sync.allocator; print('torch' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100)
    assert run.stdout.strip() == "False", run.stderr
