"""Model families: each module of this folder is one, and describes it whole in its `FAMILY`."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Iterable, Mapping

from transformers import PreTrainedConfig

from megatron_rl.models.families.family import Family, Linear, Moe, Stack, TinySizes

__all__ = [
    "CLASSIFIER",
    "EXPERT_LINEARS",
    "FAMILIES",
    "LINEARS",
    "STACKS",
    "Family",
    "Linear",
    "Moe",
    "Stack",
    "TinySizes",
    "architecture",
    "expert_count",
    "expert_intermediate",
    "family_named",
    "family_of",
    "is_classifier",
    "linear_of",
    "moe_layers",
    "stack_of",
]

CLASSIFIER = "ForSequenceClassification"
"""How Hugging Face's names of models with a head of labels end."""


def _families() -> dict[str, Family]:
    modules = sorted(info.name for info in pkgutil.iter_modules(__path__) if info.name != "family")
    found = [importlib.import_module(f"{__name__}.{name}").FAMILY for name in modules]
    return {family.architecture: family for family in found}


def together[Entry: (Linear, Stack)](tables: Iterable[Mapping[str, Entry]]) -> dict[str, Entry]:
    """One table of several, which may say a thing twice but not in two ways. Errors: ValueError."""
    found: dict[str, Entry] = {}
    for table in tables:
        for name, entry in table.items():
            if found.setdefault(name, entry) != entry:
                raise ValueError(f"two model families disagree on {name}: {found[name]} and {entry}")
    return found


FAMILIES: dict[str, Family] = _families()
"""Hugging Face's architecture -> family."""
_MOES = [family.moe for family in FAMILIES.values() if family.moe]
LINEARS: dict[str, Linear] = together(family.linears for family in FAMILIES.values())
"""Linear layers outside of experts, of all families, by their names in files: a stream of tensors names no family."""
EXPERT_LINEARS: dict[str, Linear] = together(moe.linears for moe in _MOES)
"""Linear layers of one expert."""
STACKS: dict[str, Stack] = together(moe.stacks for moe in _MOES)
"""Tensors that hold a linear layer of all experts."""
_STACK = re.compile(rf".+\.experts\.({'|'.join(STACKS)})(_\w+)?")


def linear_of(name: str) -> Linear | None:
    """The linear layer to which a tensor of a Hugging Face file belongs; None: to none."""
    *path, module, _ = ["", "", *name.split(".")]
    return (EXPERT_LINEARS if path[-2] == "experts" and path[-1].isdigit() else LINEARS).get(module)


def stack_of(name: str) -> tuple[str, str] | None:
    """Name in `STACKS`, and what follows it (such as _bias), of a tensor that holds all experts; None: it does not."""
    match = _STACK.fullmatch(name)
    return match and (match[1], match[2] or "")


def architecture(config: PreTrainedConfig) -> str:
    """The one entry of `architectures`, e.g. LlamaForCausalLM; of a classifier, the language model that it is built on."""
    return _named(config).replace(CLASSIFIER, "ForCausalLM")


def is_classifier(config: PreTrainedConfig) -> bool:
    """True if the folder has a head of one number (`score.weight`): a reward model or a critic."""
    return _named(config).endswith(CLASSIFIER)


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a config that `read_hf_config` has accepted. Errors: KeyError for one that is not supported."""
    return FAMILIES[architecture(config)]


def family_named(architectures: Iterable[str] | None) -> Family | None:
    """The family of a config.json's `architectures`; None: it is not supported."""
    return next((FAMILIES[name] for name in architectures or () if name in FAMILIES), None)


def expert_count(config: PreTrainedConfig) -> int:
    """Routed experts of a MoE layer; 0 for a dense model."""
    moe = family_of(config).moe
    return (getattr(config, moe.experts) or 0) if moe else 0


def expert_intermediate(config: PreTrainedConfig) -> int:
    """Inner size of one expert; 0 for a dense model."""
    moe = family_of(config).moe
    return getattr(config, moe.intermediate) if moe else 0


def moe_layers(config: PreTrainedConfig) -> tuple[int, ...]:
    """Layers that have experts."""
    moe = family_of(config).moe
    return tuple(moe.layers(config)) if moe else ()


def _named(config: PreTrainedConfig) -> str:
    return (config.architectures or ["none"])[0]
