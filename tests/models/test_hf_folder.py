"""Tensors of a model folder by name: what is read, and how often a file is opened for it."""

from __future__ import annotations

import torch
from safetensors.torch import save_file

from megatron_rl.models import hf_folder
from megatron_rl.models.fp8 import Dequantized
from megatron_rl.models.hf_folder import OpenFiles


def test_a_file_is_opened_once_and_a_look_for_a_name_reads_nothing(tmp_path, monkeypatch):
    tensors = {f"t{i}": torch.randn(3, i + 1) for i in range(6)}
    file_of = {name: f"part-{i % 2}.safetensors" for i, name in enumerate(tensors)}
    for file in set(file_of.values()):
        save_file({name: tensors[name] for name in tensors if file_of[name] == file}, tmp_path / file)
    opened, real = [], hf_folder.safe_open
    monkeypatch.setattr(hf_folder, "safe_open", lambda path, *a, **k: opened.append(path.name) or real(path, *a, **k))
    found = Dequantized(OpenFiles(tmp_path, file_of))
    assert "t0" in found and "absent" not in found and len(found) == 6 and not opened
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor)
    assert sorted(opened) == ["part-0.safetensors", "part-1.safetensors"]
