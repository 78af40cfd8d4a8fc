"""Stand-in for `sgl_kernel` where there is no GPU: the real one does not load without libcuda.

SGLang imports a few `*_cpu` names from it at import time, whatever the model. It calls none of them for the models
that megatron_rl trains, because `torch.ops.sgl_kernel` has no AMX operator here and SGLang then takes its torch-native
paths. A name that is called after all says so.
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
