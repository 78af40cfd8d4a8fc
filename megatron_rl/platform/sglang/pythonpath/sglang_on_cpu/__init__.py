"""SGLang plugin (entry point group `sglang.srt.plugins`): what SGLang lacks where there is no GPU.

SGLang calls `install` at the start of each of its processes. `REPLACED` in megatron_rl/platform/sglang/__init__.py
lists every place with its reason.
"""

from __future__ import annotations

from functools import partial


def install() -> None:
    """Replace the places below; does nothing where CUDA is available."""
    import torch

    if torch.cuda.is_available():
        return
    from sglang.srt.arg_groups import model_hook
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.mem_cache.pool_host import common

    from sglang_on_cpu.attention import BatchedTorchAttention
    from sglang_on_cpu.moe import moe_forward

    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate_unpinned
    register_attention_backend("torch_native")(BatchedTorchAttention)
    fused_moe_native.moe_forward_native = partial(moe_forward, fused_moe_native.moe_forward_native)
    backends_of = model_hook.attention_backends_of
    model_hook.attention_backends_of = lambda view: tuple(
        "triton" if name == "torch_native" else name for name in backends_of(view)
    )


def allocate_unpinned(dims, dtype, device, pin_memory, allocator, registration_granularity_bytes=None):
    """Host buffer without cudaHostRegister: pinning means nothing where there is no GPU."""
    return allocator.allocate(dims, dtype=dtype, device=device)
