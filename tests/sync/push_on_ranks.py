"""What a rank of the trainer does in test_push.py; it imports no more than a push needs."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from megatron_rl.config import SyncConfig
from megatron_rl.sync.transport import WeightSyncError
from megatron_rl.sync.weight_sync import WeightSync

BUCKET_MB = 0.05
"""Small enough for several buckets."""
Weights = dict[str, torch.Tensor]


def random_weights(model: Path, seed: int) -> Weights:
    """New weights of the model's names and shapes, close enough to the old ones for sane logits."""
    generator = torch.Generator().manual_seed(seed)
    old = load_file(model / "model.safetensors")
    return {k: v + 0.3 * v.abs().mean() * torch.randn(v.shape, generator=generator) for k, v in old.items()}


def push(address: str, key: str, model: str) -> list[str]:
    """A clean push, then one that only rank 0 knows to be wrong: tensors of the first, error of the second."""
    torch.distributed.init_process_group("gloo")
    weights = random_weights(Path(model), 8)
    outcome = []
    with WeightSync(SyncConfig(bucket_mb=BUCKET_MB, timeout_s=60.0), [address], key=key, rollout_dtype="fp32") as sync:
        outcome.append(str(sync.push(iter(weights.items()), version="ranks").tensors))
        try:
            sync.push(iter([("oddity", torch.zeros(1)), *weights.items()]), version="wrong")
        except WeightSyncError as error:
            outcome.append(str(error))
    torch.distributed.destroy_process_group()
    return outcome
