"""Precision recipes of trainer and engine: a table of the recipes, and a check of which recipe can run on which machine.

`trainer_recipes` and `rollout_recipes` give an answer for every recipe on a given machine. The check at start
(`check_precision`) and `megatron-rl doctor` print the same answers. `experts.py` (trainer) and `fp8.py` (weights of the
engine) have the arithmetic that replaces FP8 products on a machine without a GPU.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from packaging.version import Version

from megatron_rl.config import PrecisionConfig
from megatron_rl.errors import UserError

if TYPE_CHECKING:  # the plan of a run needs no torch
    import torch

Capability = tuple[int, int]
"""Compute capability of a GPU, for example (9, 0) for Hopper."""


@dataclass(frozen=True)
class PrecisionRecipe:
    """Number formats of the trainer. FP8 recipes have the same parameters, optimizer and master weights as bf16."""

    dtype_name: str
    """torch's name of the parameters' dtype."""
    fp8_recipe: str = ""
    """Megatron's fp8_recipe; empty for no FP8."""
    fp8: Literal["", "e4m3", "hybrid"] = ""
    """Megatron's fp8: e4m3 for all tensors; hybrid for gradients in e5m2."""
    capability: Capability = (0, 0)
    """Lowest capability on which Transformer Engine's matrix multiplications run with this recipe."""
    below: Capability = (99, 0)
    """First higher capability on which Transformer Engine's matrix multiplications do not run with this recipe."""
    cuda: str = "0"
    """Oldest CUDA version of torch with which Transformer Engine supports the recipe."""
    transformer_engine: str = "0"
    """Oldest release of Transformer Engine with which Megatron supports the recipe (`megatron/core/fp8_utils.py`)."""
    multiple: int = 1
    """Required divisor of the number of tokens in FP8 matrix multiplications (Megatron's get_fp8_align_size)."""
    block: int | None = None
    """Edge length of blocks with a common scale in the simulation without a GPU; 0: whole tensors; None: not simulated."""
    near: tuple[str, ...] = ()
    """Other recipes to suggest if this one cannot run, the most similar first."""

    @property
    def dtype(self) -> torch.dtype:
        """Type of the parameters."""
        return torch_dtype(self.dtype_name)

    @property
    def width(self) -> int:
        """Bytes of a parameter."""
        return WIDTHS[self.dtype_name]


WIDTHS = {"bfloat16": 2, "float32": 4}
"""Bytes of a number, by torch's name for its type."""


def torch_dtype(name: str) -> torch.dtype:
    """Return the torch dtype of this name."""
    import torch

    return getattr(torch, name)


_FP8: dict[str, Any] = {"dtype_name": "bfloat16", "multiple": 16}
TRAIN: dict[str, PrecisionRecipe] = {
    "bf16": PrecisionRecipe("bfloat16"),
    "fp32": PrecisionRecipe("float32"),
    "fp8_delayed": PrecisionRecipe(
        **_FP8, fp8_recipe="delayed", fp8="hybrid", capability=(8, 9), near=("fp8_tensorwise", "fp8_blockwise")
    ),
    "fp8_tensorwise": PrecisionRecipe(
        **_FP8,
        fp8_recipe="tensorwise",
        fp8="hybrid",
        capability=(8, 9),
        transformer_engine="2.2",
        block=0,
        near=("fp8_delayed", "fp8_blockwise"),
    ),
    "fp8_blockwise": PrecisionRecipe(
        **_FP8,
        fp8_recipe="blockwise",
        fp8="e4m3",
        capability=(9, 0),
        transformer_engine="2.3",
        cuda="12.9",
        block=128,
        near=("fp8_tensorwise", "fp8_delayed"),
    ),
    "mxfp8": PrecisionRecipe(
        **{**_FP8, "multiple": 32},
        fp8_recipe="mxfp8",
        fp8="e4m3",
        capability=(10, 0),
        below=(12, 0),
        transformer_engine="2.1",
        near=("fp8_blockwise", "fp8_tensorwise", "fp8_delayed"),
    ),
}
ROLLOUT_DTYPES = {"bf16": "bfloat16", "fp32": "float32", "fp8": "bfloat16"}
"""torch's name of the dtype in which the engine computes and stores everything that is not FP8."""
ROLLOUT_CAPABILITY: Capability = (8, 9)
"""Lowest capability for SGLang's block FP8. On older GPUs, SGLang's Marlin kernels use another layout of the weights, which
weight sync cannot write."""
SLOW_BF16 = (
    "this processor has no instructions for bf16 (AVX-512 BF16 or AMX) and is many times slower in it than in fp32"
)
_CARDS = {(8, 9): "Ada", (9, 0): "Hopper", (10, 0): "Blackwell"}


@dataclass(frozen=True)
class Machine:
    """Properties of a machine that decide which recipes run. The version of a package that is not installed is None."""

    gpu: Capability | None
    transformer_engine: str | None
    modelopt: str | None
    cuda: str | None
    """CUDA version with which torch was built."""
    fused_adam: bool = False
    """True if Megatron's Adam comes from Transformer Engine or Apex; otherwise it is torch's."""
    fast_bf16: bool = True
    """True if the GPU or the processor multiplies bf16 in hardware."""


def this_machine() -> Machine:
    """Return the properties of this machine."""
    import torch

    gpu = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    fused_adam = any(importlib.util.find_spec(name) for name in ("transformer_engine", "apex"))
    return Machine(
        gpu,
        _version("transformer-engine"),
        _version("nvidia-modelopt"),
        torch.version.cuda,
        fused_adam,
        gpu is not None or has_bf16_instructions(_cpuinfo()),
    )


def has_bf16_instructions(cpuinfo: str) -> bool:
    """Return True if /proc/cpuinfo has a flag of AVX-512 BF16, AMX or Arm's bf16, or if it has no flags at all."""
    flags = {
        flag for line in cpuinfo.splitlines() if line.lower().startswith(("flags", "features")) for flag in line.split()
    }
    return not flags or not flags.isdisjoint(("avx512_bf16", "amx_bf16", "bf16"))


def slow_bf16(
    precision: PrecisionConfig, machine: Machine, *, trains: bool = True, rolls_out: bool = True
) -> str | None:
    """Return a warning for the user if a recipe uses bf16 and the machine is slow in bf16; None otherwise."""
    asked = [("train", precision.train)] * trains + [("rollout", precision.rollout)] * rolls_out
    keys = [f"precision.{side}: fp32" for side, recipe in asked if recipe == "bf16"]
    if machine.fast_bf16 or not keys:
        return None
    return f"{SLOW_BF16}; set {' and '.join(keys)}"


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""


@dataclass(frozen=True)
class Answer:
    """Answer to the question whether a recipe can run on a machine."""

    recipe: str
    state: Literal["runs", "simulated", "cannot"]
    reason: str = ""
    """Description of the simulation's arithmetic, or of a requirement that the machine does not meet."""
    nearest: str = ""
    """The most similar recipe that can run, with "can run" or "can be simulated"; empty if the recipe itself can."""


def trainer_recipes(machine: Machine) -> dict[str, Answer]:
    """Return the answer for each recipe of precision.train."""
    answers = {name: _trainer(name, recipe, machine) for name, recipe in TRAIN.items()}
    return {name: _with_nearest(answer, TRAIN[name].near, answers) for name, answer in answers.items()}


def rollout_recipes(machine: Machine) -> dict[str, Answer]:
    """Return the answer for each recipe of precision.rollout."""
    answers = {name: Answer(name, "runs") for name in ("bf16", "fp32")}
    if not machine.modelopt:
        fp8 = Answer("fp8", "cannot", "needs nvidia-modelopt, which quantizes the weights")
    elif machine.gpu is None:
        fp8 = Answer("fp8", "simulated", "weights are rounded to FP8 when they are pushed, products are bf16")
    elif machine.gpu < ROLLOUT_CAPABILITY:
        fp8 = Answer("fp8", "cannot", f"needs {_card(ROLLOUT_CAPABILITY)}, this one has {dotted(machine.gpu)}")
    else:
        fp8 = Answer("fp8", "runs")
    return answers | {"fp8": _with_nearest(fp8, (), answers)}


def check_precision(
    precision: PrecisionConfig, machine: Machine, *, trains: bool = True, rolls_out: bool = True
) -> None:
    """Refuse a recipe that cannot run on the machine. Errors: UserError with key, reason and the nearest usable recipe."""
    asked = [("train", trainer_recipes(machine)[precision.train])] if trains else []
    asked += [("rollout", rollout_recipes(machine)[precision.rollout])] if rolls_out else []
    for key, answer in asked:
        if answer.state == "cannot":
            raise UserError(f"config: precision.{key} = {answer.recipe} {answer.reason}; here {answer.nearest}")


def _trainer(name: str, recipe: PrecisionRecipe, machine: Machine) -> Answer:
    if not recipe.fp8_recipe:
        return Answer(name, "runs")
    if machine.gpu is None:
        if recipe.block is None:
            return Answer(name, "cannot", f"needs Transformer Engine and {_card(recipe.capability)}")
        if not machine.modelopt:
            return Answer(
                name, "cannot", f"needs nvidia-modelopt, or Transformer Engine and {_card(recipe.capability)}"
            )
        return Answer(name, "simulated", "inputs and weights are rounded to FP8, products and gradients are bf16")
    if not machine.transformer_engine or Version(machine.transformer_engine) < Version(recipe.transformer_engine):
        oldest = "" if recipe.transformer_engine == "0" else f" {recipe.transformer_engine} or later"
        return Answer(
            name, "cannot", f"needs Transformer Engine{oldest} (found: {machine.transformer_engine or 'none'})"
        )
    if not recipe.capability <= machine.gpu < recipe.below:
        limit = f" and below {dotted(recipe.below)}" if machine.gpu >= recipe.below else ""
        return Answer(name, "cannot", f"needs {_card(recipe.capability)}{limit}, this one has {dotted(machine.gpu)}")
    if Version(machine.cuda or "0") < Version(recipe.cuda):
        return Answer(name, "cannot", f"needs torch with CUDA {recipe.cuda} or later (found: {machine.cuda or 'none'})")
    return Answer(name, "runs")


def _with_nearest(answer: Answer, near: tuple[str, ...], answers: dict[str, Answer]) -> Answer:
    if answer.state != "cannot":
        return answer
    other = next(name for name in (*near, "bf16") if answers[name].state != "cannot")
    can = "can be simulated" if answers[other].state == "simulated" else "can run"
    return Answer(answer.recipe, "cannot", answer.reason, f"{other} {can}")


def _card(capability: Capability) -> str:
    return f"a GPU of compute capability {dotted(capability)} ({_CARDS[capability]})"


def dotted(capability: Capability) -> str:
    """Return a capability as it is usually written, for example 9.0."""
    return ".".join(map(str, capability))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
