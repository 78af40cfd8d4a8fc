"""Stand-in for `sgl_kernel` on a machine without a GPU, because the real package does not load without libcuda.

SGLang imports a few functions `*_cpu` from this package for every model, when SGLang itself is imported. It does not call them
for the models that megatron_rl trains: `torch.ops.sgl_kernel` has no AMX operator here, so SGLang uses its torch-native code.
If SGLang calls such a function anyway, the call raises an error with the function's name.
"""

from __future__ import annotations

import torch

if torch.cuda.is_available():
    raise ImportError(
        "megatron_rl's stand-in for sgl_kernel was imported on a machine with a GPU: start the server with"
        " python -m sglang.launch_server, and not with python -m sglang_on_cpu"
    )


def __getattr__(name: str):
    if not name.endswith("_cpu"):
        raise AttributeError(f"module 'sgl_kernel' has no attribute '{name}' (megatron_rl's stand-in without a GPU)")

    def kernel(*_args, **_kwargs):
        raise NotImplementedError(f"sgl_kernel.{name} is not available without a GPU (megatron_rl's stand-in)")

    return kernel
