"""Weights that are not trained, chosen by glob patterns over the names of Megatron's parameters; without Megatron, for checks.

The names are those of Megatron's own layers without Transformer Engine, over the whole model (layers and experts are counted
from its first, not from a rank's): the same list freezes the same weights on every machine and under every parallel layout.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence, Set
from fnmatch import fnmatchcase

from megatron_rl.errors import UserError

_FUSED = {
    ".self_attention.linear_qkv.layer_norm_weight": ".input_layernorm.weight",
    ".self_attention.linear_q_up_proj.layer_norm_weight": ".self_attention.q_layernorm.weight",
    ".self_attention.linear_kv_up_proj.layer_norm_weight": ".self_attention.kv_layernorm.weight",
    ".mlp.linear_fc1.layer_norm_weight": ".pre_mlp_layernorm.weight",
}
"""Norms that Transformer Engine keeps with the layer behind them -> their names as layers of their own."""
_GROUPED = re.compile(r"\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")
"""Transformer Engine's experts: all in one layer."""
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
SINKS = "*.softmax_offset"
EXPERTS = ".mlp.experts."
ADAPTER = ".adapter."
"""In the names of all parameters of adapters."""
_WEIGHT_AND_BIAS = ".linear_qkv.weight", ".linear_qkv.bias"


def plain_name(name: str, *, tied: bool) -> str:
    """The name of a parameter without Transformer Engine; tied: head and embedding are one."""
    for fused, plain in _FUSED.items():
        if name.endswith(fused):
            return name.removesuffix(fused) + plain
    if tied and name == HEAD:
        return EMBEDDING
    return _GROUPED.sub(r".experts.local_experts.\3.\1.\2", name)


def is_frozen(name: str, patterns: Iterable[str]) -> bool:
    """True if a pattern matches the whole (plain) name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_target(name: str, targets: Iterable[str]) -> bool:
    """True if the weight of this (plain) name gets an adapter (`lora.targets`)."""
    return is_frozen(name, targets) and name.endswith(".weight") and (".linear_" in name or ".router." in name)


def check_patterns(
    patterns: Sequence[str],
    names: Set[str],
    *,
    vp2o: bool = False,
    in_all_layers: bool = False,
    all_may: bool = False,
    key: str = "model.freeze",
) -> None:
    """Refuse a list that misses the model, leaves nothing to train, or that other parts cannot train beside.

    names: (plain) of all parameters of the model. vp2o: it changes gradients of experts, which then have to be there.
    in_all_layers: a weight of one layer or expert is frozen with those of all others, or not at all. all_may: nothing
    need be left. key: the config's.
    Errors: UserError naming the pattern.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(f"config: {key}: '{pattern}' matches no parameter of the model; {_near(pattern, names)}")
    frozen = {name for name in names if is_frozen(name, patterns)}
    if all_may:
        return
    if len(frozen) == len(names):
        raise UserError(f"config: {key} leaves no parameter to train; take a pattern out")
    weight, bias = _WEIGHT_AND_BIAS
    for name in sorted(frozen):
        of_layer = name.removesuffix(weight) + bias
        if name.endswith(weight) and of_layer in names and of_layer not in frozen:
            raise UserError(
                f"config: {key} has {name} and not {of_layer}: Megatron's layers with a frozen weight give their bias no"
                f" gradient; freeze both (*{weight.removesuffix('weight')}*)"
            )
    trained = {any_number(name): name for name in names - frozen}
    if in_all_layers and (single := sorted(name for name in frozen if any_number(name) in trained)):
        raise UserError(
            f"config: {key} has {single[0]} and not {trained[any_number(single[0])]}: Megatron's checkpoints of an"
            " optimizer that is not distributed hold those of all layers and experts, or none; set"
            " parallel.distributed_optimizer: true"
        )
    if vp2o and (experts := sorted(name for name in frozen if EXPERTS in name)):
        raise UserError(
            f"config: {key} with vp2o.enabled: {experts[0]} would have no gradient that VP2O could transform; leave"
            " experts out, or set vp2o.enabled: false"
        )


def any_number(name: str) -> str:
    """The name with * for the numbers of layer and expert."""
    return re.sub(r"\.\d+\.", ".*.", name)


def _near(pattern: str, names: Set[str]) -> str:
    """A hint with the patterns nearest to one that matches nothing: of whole names, and of their parts."""
    every = sorted({any_number(name) for name in names})
    parts = [name.split(".") for name in every]
    every += sorted({f"*.{part}.*" for name in parts for part in name[:-1]} | {f"*.{name[-1]}" for name in parts})
    near = difflib.get_close_matches(pattern, every, 3, 0.4)
    return f"did you mean {' or '.join(near)}?" if near else f"names are such as {every[0]}"
