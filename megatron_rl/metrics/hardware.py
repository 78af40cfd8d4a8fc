"""What a step made of the GPUs: memory, utilization, tokens per second and GPU; null where there is none."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from megatron_rl.metrics.flops import TRAINING, sequence_flops, utilization

if TYPE_CHECKING:
    from megatron_rl.launch.run import Run


def hardware_metrics(
    run: Run, sequences: list[tuple[int, int]], times: dict[str, float], tokens: int | None = None
) -> dict[str, float | None]:
    """Of the step that ends. Collective.

    sequences: (tokens, predicted ones) of what this data-parallel rank's leader trained on. tokens: of the whole step, prompts
    and responses. Memory is the largest of all processes since the last call; MFU counts forward and backward of the updates,
    without recomputation and scoring, over time/train_s; GPUs are those of the trainer.
    """
    flops = TRAINING * sum(run.gather_from_leaders([sequence_flops(run.hf_config, sequences)]))
    gpu = torch.cuda.is_available()
    peak, reserved = (torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()) if gpu else (0, 0)
    peak, reserved = run.ranks.maximum(peak), run.ranks.maximum(reserved)
    if gpu:
        torch.cuda.reset_peak_memory_stats()
    gpus, device = run.ranks.world_size, torch.cuda.get_device_name() if gpu else None
    return {
        "memory/peak_gb": peak / 1e9 if gpu else None,
        "memory/reserved_gb": reserved / 1e9 if gpu else None,
        "throughput/mfu": utilization(flops, times["time/train_s"], gpus, device),
        "throughput/tokens_per_s_per_gpu": tokens / times["time/step_s"] / gpus if gpu and tokens else None,
    }
