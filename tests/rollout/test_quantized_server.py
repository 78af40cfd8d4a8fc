"""Folders of `megatron-rl quantize` on real SGLang servers, which read them by their own layers and loaders.

Their products have GPU kernels alone; `quantized_plugin` replaces these, and nothing else. The log-probs must be those of the
calibrated model, and not those of the original. A sum in another order rounds here and there an input to the neighbor in e4m3,
and then all that follows in the sequence: hence medians, and short sequences. Of the 2,000 inputs of a token one in 3e5 is so
near to a border: a tenth of the sequences of 20 tokens has one, with half of its tokens behind it. Half of all tokens of 24
sequences are behind one with a chance of 2e-12 (Chernoff).
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import CPU_SERVER, client_of, prefill_log_probs
from safetensors.torch import load_file, save_file

from megatron_rl.compression import quantization
from megatron_rl.servers.server import RolloutServer
from tools.make_tiny_model import Sizes, make_tiny_model

PLUGIN = Path(__file__).parent / "quantized_plugin"
SIZES = Sizes(
    hidden=128, layers=3, heads=4, kv_heads=2, head_dim=32, intermediate=256, expert_intermediate=128, experts=4
)
CASES = [
    ("qwen3_moe", "fp8_tensor", [1]),
    ("mixtral", "int4", [1]),
    ("qwen3", "int4", []),
]


def a_model(family: str, folder: Path) -> Path:
    """Of random weights so large that a token's probability depends on what stands before it, one row's unlike the other's."""
    make_tiny_model(family, folder, sizes=SIZES, dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        if tensor.dim() == 2 and "embed" not in name and "lm_head" not in name:
            tensors[name] = (torch.randn(tensor.shape) * tensor.shape[1] ** -0.5).to(tensor.dtype)
            tensors[name] *= torch.logspace(-0.5, 0.5, len(tensor))[torch.randperm(len(tensor))][:, None]
        elif "lm_head" in name or ("embed" in name and "lm_head.weight" not in tensors):
            tensors[name] = (torch.randn(tensor.shape) * 0.15).to(tensor.dtype)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@torch.no_grad()
def log_probs(model, sequences: list[list[int]]) -> list[np.ndarray]:
    found = []
    for tokens in sequences:
        table = model(torch.tensor([tokens])).logits[0, :-1].float().log_softmax(-1)
        found.append(table.gather(1, torch.tensor(tokens[1:])[:, None])[:, 0].numpy())
    return found


@pytest.mark.parametrize(("family", "form", "keep_layers"), CASES)
def test_sglang_serves_the_calibrated_model(family, form, keep_layers, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(PLUGIN), prepend=os.pathsep)
    folder = a_model(family, tmp_path / "model")
    quantization.check_source(folder, form, keep_layers)
    sequences = [torch.randint(5, 500, (20,)).tolist() for _ in range(24)]
    model = quantization.load(folder).float()
    quantization.calibrate(model, form, keep_layers, lambda: print(len(log_probs(model, sequences)), "sequences"))
    with quantization.plain(model):
        original = log_probs(model, sequences)
    calibrated = log_probs(model, sequences)
    quantization.export(model, form, folder, tmp_path / "hf", keep_layers)
    with RolloutServer(
        tmp_path / "hf",
        CPU_SERVER,
        dtype="fp32",
        context_length=256,
        log_path=tmp_path / "sglang.log",
    ) as server:
        served = prefill_log_probs(client_of(server), sequences)
    near, far = (
        float(np.median(np.abs(np.concatenate(served) - np.concatenate(theirs)))) for theirs in (calibrated, original)
    )
    print(f"{family} {form}: to the calibrated model {near:.3g}, to the original {far:.3g}")
    assert near < 1e-4 and far > 0.02, (near, far)
    shutil.rmtree(tmp_path / "hf")
