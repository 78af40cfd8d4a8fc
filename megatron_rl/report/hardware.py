"""GPU metrics of the trainer in a step: memory, utilization, and tokens per second and GPU. Empty on a machine without GPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import torch

from megatron_rl.data.sequence import Sequence
from megatron_rl.metrics.reduce import Metric, Metrics, maximum, ratio
from megatron_rl.models.flops import PEAK_TFLOPS, TRAINING, sequence_flops

if TYPE_CHECKING:
    from megatron_rl.run.run import Run


def hardware_metrics(run: Run, trained: Iterable[Sequence], times: Mapping[str, float], epochs: float = 1.0) -> Metrics:
    """Return the hardware metrics of this process for the step that has just ended.

    trained: sequences of this data-parallel rank that the updates used `epochs` times. times: seconds by metric name. Memory is
    the peak since the last call, in GB of 10^9 bytes. MFU counts the FLOPs of forward and backward passes of the updates;
    recomputation and scoring are not included.
    """
    if not torch.cuda.is_available():
        return {}
    lengths = [(s.inputs, s.response_length) for s in trained] if run.ranks.is_leader else []
    gpus, step = run.ranks.world_size, times["time/step_s"]
    found = {
        "memory/peak_gb": maximum(torch.cuda.max_memory_allocated() / 1e9),
        "memory/reserved_gb": maximum(torch.cuda.max_memory_reserved() / 1e9),
        "throughput/tokens_per_s_per_gpu": per_second(run, sum(inputs + 1 for inputs, _ in lengths), gpus * step),
    }
    torch.cuda.reset_peak_memory_stats()
    if peak := PEAK_TFLOPS.get(torch.cuda.get_device_name()):
        flops = epochs * TRAINING * sequence_flops(run.hf_config, lengths)
        found["throughput/mfu"] = per_second(run, flops, gpus * peak * 1e12 * times["time/train_s"])
    return found


def per_second(run: Run, amount: float, seconds: float) -> Metric:
    """Return a rate as a metric: the sum of the amounts of all processes, divided by the `seconds` of rank 0."""
    return ratio(amount, seconds if run.ranks.rank == 0 else 0.0)
