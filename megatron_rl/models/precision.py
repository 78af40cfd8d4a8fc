"""Precision recipes of trainer and engine: one table, and one answer to the question which of them can run where.

`trainer_recipes` and `rollout_recipes` answer for every recipe on a given machine; the refusal at start
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
"""Compute capability of a GPU, e.g. (9, 0) for Hopper."""


@dataclass(frozen=True)
class PrecisionRecipe:
    """Number formats of the trainer. fp8 recipes have the parameters, optimizer and master weights of bf16."""

    dtype_name: str
    """torch's name for the type of the parameters."""
    fp8_recipe: str = ""
    """Megatron's fp8_recipe; empty: no FP8."""
    fp8: Literal["", "e4m3", "hybrid"] = ""
    """Megatron's fp8: e4m3 for all tensors; hybrid: gradients in e5m2."""
    capability: Capability = (0, 0)
    """Lowest capability on which Transformer Engine's products of this recipe run."""
    below: Capability = (99, 0)
    """First higher capability on which they do not run."""
    cuda: str = "0"
    """Oldest CUDA of torch with which Transformer Engine takes the recipe."""
    transformer_engine: str = "0"
    """Oldest release of Transformer Engine with which Megatron takes the recipe (`megatron/core/fp8_utils.py`)."""
    multiple: int = 1
    """Number whose multiples of tokens FP8 products take (Megatron's get_fp8_align_size)."""
    block: int | None = None
    """Edge of the blocks that share a scale in the simulation without a GPU; 0: whole tensors; None: not simulated."""
    near: tuple[str, ...] = ()
    """Other recipes, the nearest first."""

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
    """The type that torch has under a name."""
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
"""torch's name for the type in which the engine computes and holds whatever is not FP8."""
ROLLOUT_CAPABILITY: Capability = (8, 9)
"""Lowest capability for SGLang's block FP8: below it Marlin lays the weights out in a way that no push fills."""
SLOW_BF16 = (
    "this processor has no instructions for bf16 (AVX-512 BF16 or AMX) and is many times slower in it than in fp32"
)
_CARDS = {(8, 9): "Ada", (9, 0): "Hopper", (10, 0): "Blackwell"}


@dataclass(frozen=True)
class Machine:
    """The facts that decide; versions are None where a package is not installed."""

    gpu: Capability | None
    transformer_engine: str | None
    modelopt: str | None
    cuda: str | None
    """CUDA with which torch was built."""
    fused_adam: bool = False
    """True if Megatron's Adam is that of Transformer Engine or Apex; otherwise it is torch's."""
    fast_bf16: bool = True
    """True if GPU or processor multiply bf16 in hardware."""


def this_machine() -> Machine:
    """The facts about this machine."""
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
    """True if /proc/cpuinfo has the flags of AVX-512 BF16, AMX, or Arm's; what cannot be read is given credit."""
    flags = {
        flag for line in cpuinfo.splitlines() if line.lower().startswith(("flags", "features")) for flag in line.split()
    }
    return not flags or not flags.isdisjoint(("avx512_bf16", "amx_bf16", "bf16"))


def slow_bf16(
    precision: PrecisionConfig, machine: Machine, *, trains: bool = True, rolls_out: bool = True
) -> str | None:
    """A line for the user where bf16 is asked for and slow; None where all is well."""
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
    """Answer to the question if a recipe can run on a machine."""

    recipe: str
    state: Literal["runs", "simulated", "cannot"]
    reason: str = ""
    """The simulation's arithmetic, or what is missing."""
    nearest: str = ""
    """The recipe to take instead of one that cannot run."""


def trainer_recipes(machine: Machine) -> dict[str, Answer]:
    """The answer for each recipe of precision.train."""
    answers = {name: _trainer(name, recipe, machine) for name, recipe in TRAIN.items()}
    return {name: _with_nearest(answer, TRAIN[name].near, answers) for name, answer in answers.items()}


def rollout_recipes(machine: Machine) -> dict[str, Answer]:
    """The answer for each recipe of precision.rollout."""
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
    """Refuse a recipe that cannot run here. Errors: UserError naming the key, the reason and the nearest recipe that can."""
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
    """A capability as it is written: 9.0."""
    return ".".join(map(str, capability))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
