"""Makes requests with a sampling_seed use this seed, without SGLang's deterministic kernels.

SGLang itself uses the seed only with --enable-deterministic-inference. This option also selects slower kernels, with which no
bit of the logits depends on the batch. Seeds are useful even without these kernels, because a seeded draw does not depend on
the number of earlier draws. Between two runs with one seed, only draws very close to the border between two tokens can differ.
"""

from __future__ import annotations

import random
from typing import Any

import torch

SEEDS = 1 << 63
"""Number of possible seeds."""


def of_requests(info: Any, cls: type, batch: Any, *_, **__) -> Any:
    """Set the seeds of a batch if any of its requests has one (hook after SamplingBatchInfo.from_schedule_batch)."""
    seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    if info.sampling_seed is None and any(seed is not None for seed in seeds):
        filled = [random.randrange(SEEDS) if seed is None else seed for seed in seeds]
        info.sampling_seed = torch.tensor(filled, dtype=torch.int64).to(info.device, non_blocking=True)
    return info


def before_merge(info: Any, other: Any) -> None:
    """Draw random seeds for the batch without seeds if only one of two merged batches has them (hook before merge_batch).

    SamplingBatchInfo.merge_batch joins seeds only if both batches have them.
    """
    if (info.sampling_seed is None) == (other.sampling_seed is None):
        return
    bare = info if info.sampling_seed is None else other
    filled = [random.randrange(SEEDS) for _ in range(len(bare))]
    bare.sampling_seed = torch.tensor(filled, dtype=torch.int64).to(bare.device, non_blocking=True)
