"""Which flash attention is called on CUDA: what is found, what is refused, and that torch takes it."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from megatron_rl.ops import flash


@pytest.fixture
def flash_attention_4(tmp_path, monkeypatch):
    """A module where torch looks for FlashAttention 4; returns the folder to import it from."""
    package = tmp_path / "flash_attn" / "cute"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").write_text("")
    (package / "__init__.py").write_text("")
    (package / "interface.py").write_text("def _flash_attn_fwd(): ...\ndef _flash_attn_bwd(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("flash_attn")]:
        del sys.modules[name]


def test_torchs_own_is_always_there():
    assert flash.installed()[0] == "torch"
    flash.activate("torch")


def test_what_is_not_installed_is_refused():
    with pytest.raises(ValueError, match=r"FA3 is not installed \(no module flash_attn_interface\); installed: torch"):
        flash.activate("FA3")


def test_what_is_installed_is_found_and_taken(flash_attention_4):
    assert flash.installed() == ["torch", "FA4"]
    code = (
        "import torch; from megatron_rl.ops import flash; flash.activate('FA4');"
        "print(torch.nn.attention.current_flash_attention_impl())"
    )
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(flash_attention_4)!r}); {code}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "FA4", done.stderr


def test_a_broken_one_is_named(flash_attention_4):
    (flash_attention_4 / "flash_attn" / "cute" / "interface.py").write_text("raise RuntimeError('no such arch')\n")
    with pytest.raises(ValueError, match="FA4 cannot be used: RuntimeError: no such arch"):
        flash.activate("FA4")
