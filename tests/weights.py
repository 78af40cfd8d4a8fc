"""Changes to the weights of tiny model folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def scaled(folder: Path, factors: dict[str, float]) -> Path:
    """Multiply the tensors whose names end so, in place; returns the folder."""
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        for end, factor in factors.items():
            weights[name] *= factor if name.endswith(end) else 1.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def classifier(folder: Path, out: Path, seed: int) -> Path:
    """A copy of a model folder with a random head of one number, as transformers' ForSequenceClassification has it."""
    shutil.copytree(folder, out)
    config = json.loads((out / "config.json").read_text())
    name = config["architectures"][0].replace("ForCausalLM", "ForSequenceClassification")
    config |= {"architectures": [name], "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
    (out / "config.json").write_text(json.dumps(config))
    tensors = load_file(out / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    hidden = config["hidden_size"]
    draws = torch.Generator().manual_seed(seed)
    tensors["score.weight"] = torch.randn(1, hidden, generator=draws) / hidden**0.5
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return out
