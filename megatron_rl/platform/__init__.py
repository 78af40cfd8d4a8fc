"""Lets Megatron-Core and SGLang run without a GPU, or without packages that Megatron takes for granted.

With a GPU only the few swaps for missing packages are active, and nothing at all where Transformer Engine is installed.
`python -m megatron_rl.platform` prints every replaced place of Megatron and why.
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
"""ModelOpt's layers for Transformer Engine's: where that is installed without a GPU, Megatron has none that go with them."""


def activate(*, gpu: bool | None = None) -> frozenset[Missing]:
    """Make `megatron.*` importable and usable with what this machine has. Call it before the first import of Megatron.

    gpu: whether Megatron is to find a GPU; None: as torch says. `activate(gpu=True)` on a machine without one leaves
    Megatron's device code as it is and swaps for missing packages alone: for tests that import what a GPU machine
    imports, or build it on the meta device. It does not change torch.cuda.is_available(), which megatron_rl.models and
    the trainer ask.

    Returns what the platform stands in for, nothing where it is inactive. The first call decides for the process.
    Errors: UserError where there is a GPU and a Transformer Engine or an Apex that cannot work; RuntimeError when
    Megatron was imported before.
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
            "else Megatron looks for what does not exist here"
        )
    from megatron_rl.platform.megatron import loader

    if "GPU" in missing:
        from sglang_on_cpu import matmul

        from megatron_rl.platform.megatron import quiet

        matmul.install()
        quiet.silence()
        sys.modules.setdefault(_MODELOPTS, None)  # pyright: ignore[reportArgumentType]: as Python says of what is absent
    loader.install(missing)
    return missing


def missing_parts(gpu: bool | None = None) -> frozenset[Missing]:
    """The things that Megatron takes for granted and that are missing here. gpu and errors: as for `activate`.

    Without a GPU all of it is: packages that compute on a GPU alone are then left alone even where they are installed.
    """
    import torch

    if not (torch.cuda.is_available() if gpu is None else gpu):
        from megatron_rl.platform.megatron.rules import EVERYTHING

        return EVERYTHING
    if has_transformer_engine():
        return frozenset()
    return frozenset({"Transformer Engine"} if has_apex() else {"Transformer Engine", "fused Adam"})


def has_transformer_engine() -> bool:
    """True if Transformer Engine is installed and works; it is imported.

    Errors: UserError where it is installed and broken: Megatron would take some of it for present and some for absent.
    """
    if importlib.util.find_spec("transformer_engine") is None:
        return False
    try:
        importlib.import_module("transformer_engine.pytorch")
    except Exception as error:
        raise UserError(
            f"Transformer Engine is installed and cannot be imported ({type(error).__name__}:"
            f" {' '.join(str(error).split())[:200]}): tools/setup.sh --gpu --force builds it for this torch, tools/setup.sh"
            " --no-gpu leaves it out"
        ) from None
    return True


def has_apex() -> bool:
    """True if NVIDIA Apex is installed, from which Megatron takes its Adam where Transformer Engine is not.

    Errors: UserError where it is installed without that Adam's kernels.
    """
    try:
        importlib.import_module("apex.optimizers")
    except ImportError:  # what cannot be imported is absent to Megatron too
        return False
    if importlib.util.find_spec("amp_C") is None:
        raise UserError(
            "NVIDIA Apex is installed without its CUDA extensions, and Megatron would take its Adam, which needs them: build it"
            " with APEX_CPP_EXT=1 APEX_CUDA_EXT=1, or uninstall it (Transformer Engine's Adam needs neither)"
        )
    return True
