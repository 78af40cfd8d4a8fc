"""Requests that name a sampling_seed are drawn by it, without SGLang's deterministic kernels.

By itself SGLang heeds the seed under --enable-deterministic-inference alone, which also takes other, slower kernels, so that
logits do not depend on the batch by one bit. A seed is worth having without: what is drawn no longer depends on how many draws
came before, and only a draw that falls next to a border between two tokens can turn out otherwise.
"""

from __future__ import annotations

import random
from typing import Any

import torch

SEEDS = 1 << 63


def of_requests(info: Any, cls: type, batch: Any, *_, **__) -> Any:
    """After SamplingBatchInfo.from_schedule_batch: the seeds of the batch's requests, where one of them has any."""
    seeds = [request.sampling_params.sampling_seed for request in batch.reqs]
    if info.sampling_seed is None and any(seed is not None for seed in seeds):
        filled = [random.randrange(SEEDS) if seed is None else seed for seed in seeds]
        info.sampling_seed = torch.tensor(filled, dtype=torch.int64).to(info.device, non_blocking=True)
    return info


def before_merge(info: Any, other: Any) -> None:
    """Before SamplingBatchInfo.merge_batch, which joins seeds only if both have them: random ones for those without."""
    if (info.sampling_seed is None) == (other.sampling_seed is None):
        return
    bare = info if info.sampling_seed is None else other
    filled = [random.randrange(SEEDS) for _ in range(len(bare))]
    bare.sampling_seed = torch.tensor(filled, dtype=torch.int64).to(bare.device, non_blocking=True)
