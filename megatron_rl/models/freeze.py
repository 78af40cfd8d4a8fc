"""Frozen weights, chosen by glob patterns over the names of Megatron's parameters. Needs no Megatron, so checks can use it.

Patterns use plain names: the names in Megatron's local layers (without Transformer Engine), with layers and experts numbered
over the whole model, not per rank. So a list freezes the same weights on every machine and under every parallel layout.
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
"""Names of norms that Transformer Engine fuses with the next layer -> their names as separate layers."""
_GROUPED = re.compile(r"\.experts\.(linear_fc[12])\.(weight|bias)(\d+)$")
"""Names of expert weights in Transformer Engine's layers, where one layer holds all experts."""
EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
SINKS = "*.softmax_offset"
EXPERTS = ".mlp.experts."
ADAPTER = ".adapter."
"""Part of the name of every adapter parameter."""
_WEIGHT_AND_BIAS = ".linear_qkv.weight", ".linear_qkv.bias"


def plain_name(name: str, *, tied: bool) -> str:
    """Return the name that a parameter has without Transformer Engine. tied: head and embedding share one weight."""
    for fused, plain in _FUSED.items():
        if name.endswith(fused):
            return name.removesuffix(fused) + plain
    if tied and name == HEAD:
        return EMBEDDING
    return _GROUPED.sub(r".experts.local_experts.\3.\1.\2", name)


def is_frozen(name: str, patterns: Iterable[str]) -> bool:
    """Return True if a pattern matches the whole (plain) name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def is_target(name: str, targets: Iterable[str]) -> bool:
    """Return True if the weight with this (plain) name gets an adapter (`lora.targets`)."""
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
    """Refuse patterns that match no parameter, leave nothing to train, or conflict with other settings.

    names: plain names of all parameters of the model. vp2o: True if VP2O is on, which needs the gradients of all experts.
    in_all_layers: a weight must be frozen in all layers and experts, or in none. all_may: check only that each pattern matches
    a parameter. key: config key, for messages.
    Errors: UserError that names the pattern or the parameter.
    """
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise UserError(f"config: {key}: '{pattern}' matches no parameter of the model; {_near(pattern, names)}")
    frozen = {name for name in names if is_frozen(name, patterns)}
    if all_may:
        return
    if len(frozen) == len(names):
        raise UserError(f"config: {key} leaves no parameter to train; remove a pattern")
    weight, bias = _WEIGHT_AND_BIAS
    for name in sorted(frozen):
        of_layer = name.removesuffix(weight) + bias
        if name.endswith(weight) and of_layer in names and of_layer not in frozen:
            raise UserError(
                f"config: {key} has {name} and not {of_layer}: in Megatron's layers a bias gets no gradient if the weight is"
                f" frozen; freeze both (*{weight.removesuffix('weight')}*)"
            )
    trained = {any_number(name): name for name in names - frozen}
    if in_all_layers and (single := sorted(name for name in frozen if any_number(name) in trained)):
        raise UserError(
            f"config: {key} has {single[0]} and not {trained[any_number(single[0])]}: without the distributed optimizer,"
            " Megatron's checkpoints hold such a weight for all layers and experts, or for none; set"
            " parallel.distributed_optimizer: true"
        )
    if vp2o and (experts := sorted(name for name in frozen if EXPERTS in name)):
        raise UserError(
            f"config: {key} with vp2o.enabled: {experts[0]} would have no gradient for VP2O to transform; do not freeze"
            " experts, or set vp2o.enabled: false"
        )


def any_number(name: str) -> str:
    """Return the name with * in place of its layer and expert numbers."""
    return re.sub(r"\.\d+\.", ".*.", name)


def _near(pattern: str, names: Set[str]) -> str:
    """Return a hint for a pattern that matches nothing: the closest names, or patterns that contain one part of a name."""
    every = sorted({any_number(name) for name in names})
    parts = [name.split(".") for name in every]
    every += sorted({f"*.{part}.*" for name in parts for part in name[:-1]} | {f"*.{name[-1]}" for name in parts})
    near = difflib.get_close_matches(pattern, every, 3, 0.4)
    return f"did you mean {' or '.join(near)}?" if near else f"an example of a name is {every[0]}"
