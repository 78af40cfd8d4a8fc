"""`python -m sglang_on_cpu ARGUMENTS` is `python -m sglang.launch_server ARGUMENTS` on a machine without a GPU.

The folder `stand_ins/` is put first on that process's path, and so on that of its children. It holds what SGLang finds in the
place of the packages `flashinfer`, `sgl_kernel` and `torch_memory_saver`; `replacements.py` has the rest. Nothing here is used
on a machine with CUDA: there nobody starts this module, and `import sgl_kernel` finds the real one.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

STAND_INS = Path(__file__).parent / "stand_ins"

REPLACED = {
    "package sgl_kernel": (
        "loads libcuda at import; the stand-in has the names that SGLang imports everywhere, and none of its operators,"
        " so that SGLang takes its torch-native paths"
    ),
    "package flashinfer": (
        "a fifth of the time in which SGLang imports what it needs, for kernels that a CPU does not have; the stand-in is a"
        " package that cannot be imported"
    ),
    "package torch_memory_saver": (
        "takes over the allocator of CUDA; the stand-in frees the same memory while a colocated server sleeps, and whoever"
        " computes with it meanwhile ends the process"
    ),
    "multiprocessing.set_start_method": (
        "SGLang spawns its processes, as CUDA wants, and each spends 9 s of a core on its imports; forked ones have them"
        " already"
    ),
    "torch.cuda.synchronize": "a release of memory waits for the device that torch is built for; here there is none",
    "aten::mm on CPU tensors": (
        "MKL is slow on some processors, above all for the few rows of a decode; oneDNN takes large fp32 weights"
        " (sglang_on_cpu/matmul.py)"
    ),
    "sglang.srt.mem_cache.pool_host.common.ALLOC_MEMORY_FUNCS['cpu']": (
        "the capture of routed experts pins its host buffer with cudaHostRegister; here it is plain memory"
    ),
    "attention backend 'torch_native'": (
        "loops over requests in Python and knows no attention sinks; replaced by padded batches with sinks and windows"
    ),
    "sglang.srt.layers.moe.fused_moe_native.moe_forward_native": (
        "a dozen operators an expert, and torch.compile at gpt-oss's first request; replaced by two products an expert"
    ),
    "sglang.srt.layers.sampler.multinomial_with_seed": (
        "hashes every place of the vocabulary, by an operator of sgl_kernel and under torch.compile; here one number a row"
    ),
    "sglang.srt.layers.rotary_embedding.factory.get_rope_cpu": (
        "asserts that MLA models have a rope scaling; without one (Moonlight) the version of the other devices is taken"
    ),
    "sglang.srt.models.deepseek_common.attention_backend_handler['torch_native']": (
        "prefill of MLA would take a path for kernels over unpadded keys; absorbed MLA reads the cache, as decode does"
    ),
    "torch in sglang.srt.lora.layers and .backend.torch_backend, and Tensor.pin_memory": (
        "adapters' layers pin host tensors, for which torch looks for a driver; here nothing is pinned"
    ),
    "sglang.srt.arg_groups.model_hook.attention_backends_of": (
        "refuses torch_native for gpt-oss for want of sinks and windows, which the replacement has"
    ),
}
"""Every place of SGLang that is replaced, and why."""

FLAGS = [
    *("--device", "cpu"),
    *("--attention-backend", "torch_native"),
    *("--moe-runner-backend", "triton"),  # a name alone: without it gpt-oss lays its experts out for GPU kernels
    "--disable-overlap-schedule",  # there is no second processor that its bookkeeping could overlap with
    "--sleep-on-idle",  # otherwise the scheduler polls: one core busy while the trainer needs it
    "--skip-server-warmup",
]
"""Flags that come before those of the command line, which overrule them."""


ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
"""Environment variables that are set where nobody else has. Threads that wait for each other must sleep: spinning ones starve
the thread that they wait for as soon as another process (the trainer) wants a core; measured 20 times slower."""


def prepare() -> None:
    """Have this process and its children find the stand-ins and ENVIRONMENT. Call it before torch is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    sys.path.insert(0, str(STAND_INS))
