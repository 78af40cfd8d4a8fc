"""Changes to the weights of tiny model folders."""

from __future__ import annotations

from pathlib import Path

from safetensors.torch import load_file, save_file


def scaled(folder: Path, factors: dict[str, float]) -> Path:
    """Multiply the tensors whose names end so, in place; returns the folder."""
    weights = load_file(folder / "model.safetensors")
    for name in weights:
        for end, factor in factors.items():
            weights[name] *= factor if name.endswith(end) else 1.0
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
