"""Makes Megatron-Core and SGLang run without a GPU, or without packages that Megatron requires.

With a GPU only the few replacements for missing packages are active; if Transformer Engine is installed, none are.
`python -m megatron_rl.platform` prints every replaced part of Megatron with the reason.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING

from megatron_rl.errors import UserError

if TYPE_CHECKING:
    from megatron_rl.platform.megatron.rules import Missing

_MODELOPTS = "modelopt.torch.quantization.plugins.transformer_engine"
"""ModelOpt's plugin for Transformer Engine layers. Without a GPU it is hidden, because Megatron then has no such layers."""


def activate(*, gpu: bool | None = None) -> frozenset[Missing]:
    """Make `megatron.*` importable and usable on this machine. Call it before the first import of Megatron.

    gpu: True if Megatron must find a GPU; None: as torch reports. On a machine without a GPU, `activate(gpu=True)` keeps
    Megatron's device code and replaces only missing packages. Tests use this to import what a GPU machine imports, or to
    build models on the meta device. The argument does not change torch.cuda.is_available(), which megatron_rl.models and the
    trainer call.

    Returns the parts that the platform replaces; an empty set if it is inactive. The first call decides for the process.
    Errors: UserError if there is a GPU and Transformer Engine or Apex is installed but broken; RuntimeError if Megatron was
    imported before.
    """
    if importlib.util.find_spec("torch") is None:
        return frozenset()  # Megatron cannot be imported either: for plans, which need neither
    active = sys.modules.get("megatron_rl.platform.megatron.loader")
    if active is not None and (finder := active.installed()):
        return finder.missing
    missing = missing_parts(gpu)
    if gpu is None and not missing:
        return missing
    early = [name for name in ("megatron.core", "megatron.bridge", "megatron.training") if name in sys.modules]
    if early:
        raise RuntimeError(
            f"{early[0]} was imported before megatron_rl.platform.activate(): call activate() first, "
            "otherwise Megatron looks for packages and devices that do not exist here"
        )
    from megatron_rl.platform.megatron import loader

    if "GPU" in missing:
        from sglang_on_cpu import matmul

        from megatron_rl.platform.megatron import quiet

        matmul.install()
        quiet.silence()
        sys.modules.setdefault(_MODELOPTS, None)  # pyright: ignore[reportArgumentType]: Python's mark of an absent module
    loader.install(missing)
    return missing


def missing_parts(gpu: bool | None = None) -> frozenset[Missing]:
    """Return the parts that Megatron requires and that are missing here. gpu and errors: as in `activate`.

    Without a GPU all of them count as missing: packages that need a GPU are then not used even if they are installed.
    """
    import torch

    if not (torch.cuda.is_available() if gpu is None else gpu):
        from megatron_rl.platform.megatron.rules import EVERYTHING

        return EVERYTHING
    if has_transformer_engine():
        return frozenset()
    return frozenset({"Transformer Engine"} if has_apex() else {"Transformer Engine", "fused Adam"})


def has_transformer_engine() -> bool:
    """Import Transformer Engine, and return True if it is installed and works.

    Errors: UserError if it is installed but broken. Megatron would then use some of its parts and miss others.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return False
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        raise UserError(
            f"Transformer Engine is installed and cannot be imported ({type(error).__name__}:"
            f" {' '.join(str(error).split())[:200]}): tools/setup.sh --gpu --force builds it for this torch; tools/setup.sh"
            " --no-gpu does without it"
        ) from None
    return True


def has_apex() -> bool:
    """Return True if NVIDIA Apex is installed. Megatron uses its Adam if Transformer Engine is missing.

    Errors: UserError if Apex is installed without the kernels of this Adam.
    """
    try:
        importlib.import_module("apex.optimizers")
    except ImportError:  # Megatron too treats a failing import as absent
        return False
    if importlib.util.find_spec("amp_C") is None:
        raise UserError(
            "NVIDIA Apex is installed without its CUDA extensions, and Megatron would take its Adam, which needs them: build it"
            " with APEX_CPP_EXT=1 APEX_CUDA_EXT=1, or uninstall it (Transformer Engine's Adam needs neither)"
        )
    return True
