"""Compile FlashAttention 4's kernels for a GPU that is not here, by our own call on fake tensors; a child of test_flash.py.

    python compile_flash_attention_4.py sm_90a      # the cases as JSON, with seconds and the number of kernels compiled

Kernels that it compiles go to FLASH_ATTENTION_CUTE_DSL_CACHE_DIR where FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 asks for it.
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
from megatron_rl.platform import fake_gpu  # noqa: E402

TOKENS, KEYS, SEQUENCES = 1000, 1100, 3
CASES = {  # query heads, key heads, width, width of values, window, sinks, deterministic
    "gpt_oss": (64, 8, 64, 64, 128, True, False),
    "gpt_oss_full": (64, 8, 64, 64, 0, True, False),
    "qwen3": (32, 4, 128, 128, 0, False, False),
    "moonlight": (16, 16, 192, 128, 0, False, False),
    "gpt_oss, deterministic": (64, 8, 64, 64, 128, True, True),
}


def compiled() -> int:
    interface = kernels._interface()
    parts = ("_flash_attn_fwd", "_flash_attn_bwd", "_bwd_preprocess", "_bwd_postprocess_convert")
    return sum(len(getattr(interface, part).compile_cache.cache) for part in parts)


def compile_case(name: str) -> dict:
    heads, key_heads, width, value_width, window, with_sinks, deterministic = CASES[name]
    taken = flash.Heads(width, value_width, grouped=heads != key_heads)
    start, before = time.perf_counter(), compiled()
    torch.use_deterministic_algorithms(deterministic)
    bf16 = {"device": "cuda", "dtype": torch.bfloat16}
    q = torch.empty(TOKENS, heads, width, **bf16)
    k, v = (torch.empty(KEYS, key_heads, w, **bf16) for w in (width, value_width))
    sinks = torch.empty(heads, device="cuda") if with_sinks else None
    cu_q, cu_k = (torch.empty(SEQUENCES + 1, dtype=torch.int32, device="cuda") for _ in range(2))
    options = (cu_q, cu_k, 600, 700, window, 0.1)
    out, lse = kernels.flash_forward(q, k, v, sinks, *options)
    grads = kernels.flash_backward(torch.empty_like(out), q, k, v, sinks, out, lse, *options)
    return {
        "case": name,
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
        print(json.dumps([compile_case(name) for name in CASES]))
