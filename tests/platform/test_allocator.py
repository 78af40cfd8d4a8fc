"""The allocator's settings: taken by programs without a GPU, left alone where the user has some."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from megatron_rl.platform import allocator

PROGRAM = """
import json, os, sys
from megatron_rl.platform import allocator
allocator.restart_program()
print(json.dumps([sys.argv[1:], {k: v for k, v in os.environ.items() if k.startswith(("MALLOC_", "GLIBC_"))}]))
"""


def run(tmp_path: Path, **environment: str) -> list:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("MALLOC_", "GLIBC_", "LD_PRELOAD"))}
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, str(program), "--option", "a b"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=True, env=clean | environment
    )
    return json.loads(done.stdout)


def test_a_program_restarts_itself_once_with_the_settings(tmp_path, monkeypatch):
    arguments, settings = run(tmp_path)
    assert arguments == ["--option", "a b"]
    assert settings == ({} if allocator._GPU_DRIVER.exists() else allocator.ENVIRONMENT)


def test_the_users_own_settings_stay(tmp_path):
    assert run(tmp_path, MALLOC_ARENA_MAX="4")[1] == {"MALLOC_ARENA_MAX": "4"}
    assert run(tmp_path, LD_PRELOAD="libm.so.6")[1] == {}
