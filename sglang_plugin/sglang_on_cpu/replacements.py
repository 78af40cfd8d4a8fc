"""Replacements inside SGLang for a machine without a GPU. `REPLACED` in __init__.py lists each one with its reason."""

from __future__ import annotations

import multiprocessing
import os
from functools import partial


def install() -> None:
    """Install the replacements in this process and its forks. Must be called before SGLang loads its plugins."""
    import torch
    from sglang.srt.arg_groups import model_hook

    backends_of = model_hook.attention_backends_of
    model_hook.attention_backends_of = lambda view: tuple(
        "triton" if name == "torch_native" else name for name in backends_of(view)
    )
    multiprocessing.set_start_method = partial(_fork, multiprocessing.set_start_method)
    # A fork creates its thread pool on first use. If two threads load weights at once, both may create it and fail.
    os.register_at_fork(after_in_child=lambda: torch.set_num_threads(torch.get_num_threads()))
    _install_in_scheduler()


def _fork(set_start_method, method, force=False):
    """Set the start method of processes to fork. Without a CUDA context, they can reuse the first process's imports."""
    set_start_method("fork", force)


def _install_in_scheduler() -> None:
    import torch
    from sglang.srt.layers import sampler
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.layers.moe import fused_moe_native
    from sglang.srt.layers.rotary_embedding import factory
    from sglang.srt.mem_cache.pool_host import common
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttentionBackendRegistry, AttnForwardMethod

    from sglang_on_cpu import matmul
    from sglang_on_cpu.batched_attention import BatchedTorchAttention
    from sglang_on_cpu.batched_experts import moe_forward
    from sglang_on_cpu.seeded_sampling import multinomial_with_seed

    matmul.install()
    sampler.multinomial_with_seed = multinomial_with_seed
    common.ALLOC_MEMORY_FUNCS["cpu"] = allocate_unpinned
    register_attention_backend("torch_native")(BatchedTorchAttention)
    fused_moe_native.moe_forward_native = partial(moe_forward, fused_moe_native.moe_forward_native)
    factory.get_rope_cpu = partial(rope_on_cpu, factory.get_rope_cpu, factory.get_rope)
    AttentionBackendRegistry.register("torch_native", lambda attention, batch: AttnForwardMethod.MLA)
    torch.cuda.synchronize = lambda device=None: None
    from sglang.srt.lora import layers
    from sglang.srt.lora.backend import torch_backend

    layers.torch = torch_backend.torch = Unpinned(torch)
    torch.Tensor.pin_memory = lambda tensor, device=None: tensor


class Unpinned:
    """Proxy of torch for modules that pin host tensors (adapter layers). Pinning would need a GPU driver."""

    def __init__(self, torch):
        self._torch = torch

    def __getattr__(self, name):
        found = getattr(self._torch, name)
        if name not in ("tensor", "empty", "zeros", "arange"):
            return found

        def unpinned(*args, pin_memory=False, **kwargs):
            return found(*args, **kwargs)

        return unpinned


def allocate_unpinned(dims, dtype, device, pin_memory, allocator, registration_granularity_bytes=None):
    """Allocate a host buffer without cudaHostRegister, because pinning has no use without a GPU."""
    return allocator.allocate(dims, dtype=dtype, device=device)


def rope_on_cpu(
    original,
    get_rope,
    head_size,
    rotary_dim,
    max_position,
    base,
    is_neox_style=True,
    rope_scaling=None,
    dtype=None,
    partial_rotary_factor=1.0,
    device=None,
):
    """Return the rotary embedding. Without rope scaling (Moonlight), use the general version: the CPU version needs scaling."""
    common = (head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype, partial_rotary_factor)
    return get_rope(*common) if rope_scaling is None else original(*common, device)
