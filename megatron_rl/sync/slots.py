"""Places of Hugging Face tensors in SGLang's own parameters: q, k, v in qkv_proj, experts in w13_weight, w2_weight.

SGLang fuses by rows: the parts of a parameter are stacked in the order of their positions. The rules go by names of
modules, which all supported families share (Llama, Qwen3, Qwen3-MoE, OLMoE, Mixtral, DeepSeek-V3, gpt-oss). The scales
of FP8 blocks are stacked like the weights that they belong to.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torch import Tensor

_FUSED = {
    "q_proj": ("qkv_proj", 0),
    "k_proj": ("qkv_proj", 1),
    "v_proj": ("qkv_proj", 2),
    "gate_proj": ("gate_up_proj", 0),
    "up_proj": ("gate_up_proj", 1),
    "q_a_proj": ("fused_qkv_a_proj_with_mqa", 0),
    "kv_a_proj_with_mqa": ("fused_qkv_a_proj_with_mqa", 1),
}
_EXPERT = {
    "gate_proj": ("w13_weight", 0),
    "w1": ("w13_weight", 0),
    "up_proj": ("w13_weight", 1),
    "w3": ("w13_weight", 1),
    "down_proj": ("w2_weight", 0),
    "w2": ("w2_weight", 0),
}
_ALL_EXPERTS = {"gate_up_proj": "w13_weight", "down_proj": "w2_weight"}
PREDICTOR_WEIGHT = ".predictor.weight"
"""The end of the names of route predictors (`megatron_rl_models`)."""
_ONE_CALL = "fused_qkv_a_proj_with_mqa"
"""The parameter that SGLang fuses inside a single load_weights call; it forgets a half that comes alone."""


@dataclass(frozen=True)
class Slot:
    """Place of a Hugging Face tensor in the engine."""

    parameter: str
    expert: int = 0
    part: int = 0
    """Order among the parts of one expert (or of a parameter without experts)."""
    parts: int = 1
    """How many parts make an expert; set for parameters with experts alone."""
    all_experts: bool = False
    """Whether the tensor holds every expert: [E, ...]."""
    transposed: bool = False
    """Whether the engine stores the last two dimensions in the other order (gpt-oss)."""


def locate(name: str, parameters: dict[str, tuple[int, ...]]) -> Slot | None:
    """The slot of Hugging Face tensor `name` among the engine's parameters (name -> local shape); None: it has none."""
    if name in parameters:
        return Slot(name)
    if match := re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)\.weight(_scale_inv)?", name):
        prefix, expert, module, scale = match.groups()
        fused, part = _EXPERT.get(module, ("", 0))
        slot = Slot(f"{prefix}.{fused}{scale or ''}", int(expert), part, parts=2 if fused == "w13_weight" else 1)
    elif match := re.fullmatch(r"(.+\.experts)\.(gate_up_proj|down_proj)(_bias)?", name):
        prefix, module, bias = match.groups()
        fused = f"{prefix}.{_ALL_EXPERTS[module]}{bias or ''}"
        slot = Slot(fused, all_experts=True, transposed=not bias and _experts_are_transposed(prefix, parameters))
    elif match := re.fullmatch(r"(.+)\.(\w+)\.(weight|bias|weight_scale_inv)", name):
        prefix, module, kind = match.groups()
        fused, part = _FUSED.get(module, ("", 0))
        slot = Slot(f"{prefix}.{fused}.{kind}", part=part)
        if slot.parameter not in parameters and prefix.endswith(".shared_experts"):
            # SGLang may serve the one shared expert as the last routed one.
            experts = prefix.removesuffix(".shared_experts") + ".experts"
            last = parameters.get(f"{experts}.w2_weight", (0,))[0] - 1
            return locate(f"{experts}.{last}.{module}.{kind}", parameters)
    else:
        return None
    return slot if slot.parameter in parameters else None


def _experts_are_transposed(prefix: str, parameters: dict[str, tuple[int, ...]]) -> bool:
    """Whether the engine turned gpt-oss's experts from [E, in, out] into [E, out, in]; its Triton kernels do not.

    Experts of all other families have no biases and are [E, out, in] on both sides.
    """
    if f"{prefix}.w13_weight_bias" not in parameters:
        return False
    twice_intermediate, hidden = parameters[f"{prefix}.w13_weight_bias"][1], parameters[f"{prefix}.w2_weight_bias"][1]
    if hidden != twice_intermediate:
        return parameters[f"{prefix}.w13_weight"][2] == hidden
    return parameters[f"{prefix}.w2_weight"][1] == hidden  # w13 is square, so w2 is not


def keep_together(
    named_tensors: Iterable[tuple[str, Tensor]], slot_of: Callable[[str], Slot | None]
) -> Iterator[list[tuple[str, Tensor]]]:
    """Groups of tensors that must reach the engine in one call: single ones, DeepSeek's low-rank halves as a pair."""
    waiting: dict[str, list[tuple[str, Tensor]]] = {}
    for name, tensor in named_tensors:
        slot = slot_of(name)
        if slot is None or _ONE_CALL not in slot.parameter:
            yield [(name, tensor)]
            continue
        group = waiting.setdefault(slot.parameter, [])
        group.append((name, tensor))
        if len(group) == 2:
            yield waiting.pop(slot.parameter)
    yield from waiting.values()
