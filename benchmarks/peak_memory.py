"""Peak memory of torch, counted at its allocator, so that memory inside of C++ operators and kernels is included."""

from __future__ import annotations

import gc
from collections.abc import Callable

import torch

from megatron_rl.data.packing import Batch
from megatron_rl.trainer.hooks import ALONE
from megatron_rl.trainer.model_pass import ModelPass
from megatron_rl.trainer.objective import Policy
from megatron_rl.trainer.trainer import Trainer


def forward_and_backward(trainer: Trainer, batches: list[Batch]) -> Callable[[], None]:
    """Return a function that runs the passes of an update, without the reduction of gradients (gloo would copy them)."""
    objective = Policy(trainer.config).for_update(trainer.totals(batches))
    trainer.chunks[0].config.finalize_model_grads_func = None

    def run() -> None:
        for ddp in trainer.ddp:
            ddp.train()
        with trainer._observed(trainer.hooks, batches, "update", ALONE) as passes:
            trainer._run(
                ModelPass(trainer.model, trainer.ddp, batches, passes, objective, trainer.support, forward_only=False)
            )

    return run


def peak_bytes(run: Callable[[], object]) -> int:
    """Return the peak of the bytes that `run` holds, beyond the bytes held before it.

    Without a GPU the bytes are those from torch's CPU allocator. The profiler reports each of its calls, so the result is exact
    and the same in every run. Memory outside of tensors is not counted (buffers of oneDNN, Python arrays).
    """
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run()
        return torch.cuda.max_memory_allocated() - before
    gc.collect()  # so that garbage of an earlier run is not freed in this run
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    events = [e for e in profile.profiler.kineto_results.events() if e.name() == "[memory]"]
    held, peak = 0, 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak
