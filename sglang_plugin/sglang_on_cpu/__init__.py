"""SGLang's server on a machine without a GPU: `python -m sglang_on_cpu ARGUMENTS` replaces `python -m sglang.launch_server`.

The program puts the folder `stand_ins/` first on Python's import path, which its child processes inherit. The folder holds
stand-ins for the packages `flashinfer`, `sgl_kernel` and `torch_memory_saver`. `replacements.py` has the other replacements. On
a machine with CUDA, nothing starts this module, and `import sgl_kernel` finds the real package.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

STAND_INS = Path(__file__).parent / "stand_ins"
"""Folder of the stand-in packages."""

REPLACED = {
    "package sgl_kernel": (
        "the real package loads libcuda at import; the stand-in has the names that SGLang always imports, but no operators,"
        " so that SGLang uses its torch-native code"
    ),
    "package flashinfer": (
        "the real package takes a fifth of SGLang's import time, for kernels that a CPU does not have; the stand-in cannot be"
        " imported, so that SGLang does without it"
    ),
    "package torch_memory_saver": (
        "the real package replaces CUDA's allocator; the stand-in frees the same memory while a colocated server sleeps, and"
        " a process that reads this memory meanwhile is killed"
    ),
    "multiprocessing.set_start_method": (
        "SGLang spawns its processes, as CUDA requires, and each of them spends 9 s of a core on imports; forked processes"
        " already have the imports"
    ),
    "torch.cuda.synchronize": "SGLang waits for the CUDA device when it releases memory; here there is no device",
    "aten::mm on CPU tensors": (
        "MKL is slow on some processors, above all for the few rows of a decode; oneDNN multiplies large fp32 weights"
        " instead (sglang_on_cpu/matmul.py)"
    ),
    "sglang.srt.mem_cache.pool_host.common.ALLOC_MEMORY_FUNCS['cpu']": (
        "the capture of routed experts pins its host buffer with cudaHostRegister; here the buffer is plain memory"
    ),
    "attention backend 'torch_native'": (
        "the original loops over requests in Python and does not support attention sinks; the replacement uses padded batches"
        " and supports sinks and windows"
    ),
    "sglang.srt.layers.moe.fused_moe_native.moe_forward_native": (
        "the original runs a dozen operators per expert, and torch.compile at the first request of gpt-oss; the replacement"
        " runs two products per expert"
    ),
    "sglang.srt.layers.sampler.multinomial_with_seed": (
        "the original hashes every vocabulary entry, with an operator of sgl_kernel and torch.compile; the replacement draws"
        " one random number per row"
    ),
    "sglang.srt.layers.rotary_embedding.factory.get_rope_cpu": (
        "the original asserts that MLA models have a rope scaling; without it (Moonlight) the version for other devices is used"
    ),
    "sglang.srt.models.deepseek_common.attention_backend_handler['torch_native']": (
        "prefill of MLA would use a path for kernels over unpadded keys; absorbed MLA reads the cache, as decode does"
    ),
    "torch in sglang.srt.lora.layers and .backend.torch_backend, and Tensor.pin_memory": (
        "adapter layers pin host tensors, for which torch needs a driver; here nothing is pinned"
    ),
    "sglang.srt.arg_groups.model_hook.attention_backends_of": (
        "the original refuses torch_native for gpt-oss, because it lacks sinks and windows; the replacement supports both"
    ),
}
"""{replaced part of SGLang: reason}."""

FLAGS = [
    *("--device", "cpu"),
    *("--attention-backend", "torch_native"),
    *("--moe-runner-backend", "triton"),  # only a name: prevents gpt-oss's layout for GPU kernels
    "--disable-overlap-schedule",  # without a GPU there is nothing to overlap with
    "--sleep-on-idle",  # otherwise the scheduler polls: one core busy while the trainer needs it
    "--skip-server-warmup",
]
"""Default flags of the server. They precede the flags on the command line, which override them."""


ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_WAIT_POLICY": "PASSIVE"}
"""Environment variables and their values, set unless the user has set them. OMP_WAIT_POLICY makes waiting threads sleep.
Otherwise they spin, and starve the thread for which they wait as soon as another process (the trainer) needs a core. Spinning
was measured to be 20 times slower."""


def prepare() -> None:
    """Set up stand-ins and ENVIRONMENT for this process and its children. Must be called before torch is imported."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    sys.path.insert(0, str(STAND_INS))
