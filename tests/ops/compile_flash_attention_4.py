"""Compile FlashAttention 4's kernels for a GPU that is not here, by our own call on fake tensors; a child of test_flash.py.

    python compile_flash_attention_4.py sm_90a      # the cases as JSON, with seconds and the number of kernels compiled

With FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 the kernels are kept in FLASH_ATTENTION_CUTE_DSL_CACHE_DIR, also for a machine
with such a GPU and the same versions of Python, flash-attn-4, nvidia-cutlass-dsl and apache-tvm-ffi.
"""

from __future__ import annotations

import json
import os
import sys
import time

ARCHITECTURE = sys.argv[1] if len(sys.argv) > 1 else "sm_90a"
CAPABILITY, MULTIPROCESSORS = {"sm_90a": ((9, 0), 132), "sm_100a": ((10, 0), 148)}[ARCHITECTURE]
os.environ |= {"CUTE_DSL_ARCH": ARCHITECTURE, "FLASH_ATTENTION_NUM_SMS": str(MULTIPROCESSORS)}

import torch  # noqa: E402
from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

from megatron_rl.ops import flash  # noqa: E402
from megatron_rl.ops import flash_attention_4 as kernels  # noqa: E402
from tests.platform import fake_gpu  # noqa: E402

TOKENS, KEYS = 1000, 1100
HEADS = {  # query heads, key heads, width, width of values, window, sinks
    "gpt_oss": (64, 8, 64, 64, 128, True),
    "gpt_oss_full": (64, 8, 64, 64, 0, True),
    "qwen3": (32, 4, 128, 128, 0, False),
    "moonlight": (16, 16, 192, 128, 0, False),
}
CASES = [  # heads, sequences, deterministic: kernels of their own above 256 sequences, and for determinism
    *((name, 3, deterministic) for deterministic in (False, True) for name in HEADS),
    *(("gpt_oss", 300, deterministic) for deterministic in (False, True)),
]


def compiled() -> int:
    interface = kernels._interface()
    caches = [part.compile_cache.cache for part in vars(interface).values() if hasattr(part, "compile_cache")]
    return sum(len(cache) for cache in caches)


def compile_case(name: str, sequences: int, deterministic: bool) -> dict:
    heads, key_heads, width, value_width, window, with_sinks = HEADS[name]
    taken = flash.Heads(width, value_width, grouped=heads != key_heads)
    start, before = time.perf_counter(), compiled()
    torch.use_deterministic_algorithms(deterministic)
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.empty(TOKENS, heads, width, **bf16)
    k, v = (torch.empty(KEYS, key_heads, w, **bf16) for w in (width, value_width))
    sinks = torch.empty(heads, device="cuda") if with_sinks else None
    cu_q, cu_k = (torch.empty(sequences + 1, dtype=torch.int32, device="cuda") for _ in range(2))
    options = (cu_q, cu_k, 600, 700, window, 0.1)
    out, lse = kernels.flash_forward(q, k, v, sinks, *options)
    grads = kernels.flash_backward(torch.empty_like(out), q, k, v, sinks, out, lse, *options)
    return {
        "case": [name, sequences, deterministic],
        "chosen": flash.choose("auto", torch.bfloat16, taken, CAPABILITY),
        "shapes": [list(x.shape) for x in (out, lse, *grads) if x is not None],
        "expected": [
            *([TOKENS, heads, value_width], [heads, TOKENS], list(q.shape), list(k.shape), list(v.shape)),
            *([[heads]] if with_sinks else []),
        ],
        "kernels": compiled() - before,
        "seconds": round(time.perf_counter() - start, 1),
    }


if __name__ == "__main__":
    fake_gpu.pretend(CAPABILITY)
    kernels._interface()
    with FakeTensorMode():
        print(json.dumps([compile_case(*case) for case in CASES]))
