"""All that lets Megatron-Core and SGLang run where no GPU exists; inactive where CUDA is available.

`python -m megatron_rl.platform` prints every replaced place of Megatron and why.
"""

from __future__ import annotations

import sys


def activate() -> bool:
    """Make `megatron.*` importable and usable without a GPU. Call it before the first import of Megatron.

    Does nothing where CUDA is available, or when called again. Returns whether the CPU platform is active.
    Raises RuntimeError when Megatron was imported before.
    """
    import torch

    if torch.cuda.is_available():
        return False
    from megatron_rl.platform import matmul
    from megatron_rl.platform.megatron import loader, quiet

    if any(isinstance(finder, loader.CpuFinder) for finder in sys.meta_path):
        return True
    early = [name for name in ("megatron.core", "megatron.bridge", "megatron.training") if name in sys.modules]
    if early:
        raise RuntimeError(
            f"{early[0]} was imported before megatron_rl.platform.activate(): call activate() first, "
            "else Megatron looks for a GPU that does not exist"
        )
    matmul.install()
    quiet.silence()
    loader.install()
    return True
