"""Model families. Each module in this folder describes one family completely in its `FAMILY`."""

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
"""Ending of Hugging Face's class names for models whose head predicts labels."""


def _families() -> dict[str, Family]:
    modules = sorted(info.name for info in pkgutil.iter_modules(__path__) if info.name != "family")
    found = [importlib.import_module(f"{__name__}.{name}").FAMILY for name in modules]
    return {family.architecture: family for family in found}


def together[Entry: (Linear, Stack)](tables: Iterable[Mapping[str, Entry]]) -> dict[str, Entry]:
    """Merge the families' tables. Errors: ValueError if two tables have different entries for a name."""
    found: dict[str, Entry] = {}
    for table in tables:
        for name, entry in table.items():
            if found.setdefault(name, entry) != entry:
                raise ValueError(f"two model families disagree on {name}: {found[name]} and {entry}")
    return found


FAMILIES: dict[str, Family] = _families()
"""Hugging Face's architecture name -> family."""
_MOES = [family.moe for family in FAMILIES.values() if family.moe]
LINEARS: dict[str, Linear] = together(family.linears for family in FAMILIES.values())
"""Linear layers outside of experts, by name in files. All families share one table, for tensors whose family is not known."""
EXPERT_LINEARS: dict[str, Linear] = together(moe.linears for moe in _MOES)
"""Linear layers of one expert, by name in files."""
STACKS: dict[str, Stack] = together(moe.stacks for moe in _MOES)
"""Tensors that hold one linear layer for all experts, by name in files."""
_STACK = re.compile(rf".+\.experts\.({'|'.join(STACKS)})(_\w+)?")


def linear_of(name: str) -> Linear | None:
    """Return the linear layer to which a tensor of a Hugging Face file belongs; None if there is none."""
    *path, module, _ = ["", "", *name.split(".")]
    return (EXPERT_LINEARS if path[-2] == "experts" and path[-1].isdigit() else LINEARS).get(module)


def stack_of(name: str) -> tuple[str, str] | None:
    """Return (name in `STACKS`, suffix such as _bias) of a tensor that holds all experts; None for other tensors."""
    match = _STACK.fullmatch(name)
    return match and (match[1], match[2] or "")


def architecture(config: PreTrainedConfig) -> str:
    """Return the entry of `architectures`, such as LlamaForCausalLM; for a classifier, the underlying language model."""
    return _named(config).replace(CLASSIFIER, "ForCausalLM")


def is_classifier(config: PreTrainedConfig) -> bool:
    """Return True if the folder has a head with one number (`score.weight`): a reward model or a critic."""
    return _named(config).endswith(CLASSIFIER)


def family_of(config: PreTrainedConfig) -> Family:
    """Return the family of a config that `read_hf_config` has accepted. Errors: KeyError for an unsupported config."""
    return FAMILIES[architecture(config)]


def family_named(architectures: Iterable[str] | None) -> Family | None:
    """Return the family of a config.json's `architectures`; None if the architecture is not supported."""
    return next((FAMILIES[name] for name in architectures or () if name in FAMILIES), None)


def expert_count(config: PreTrainedConfig) -> int:
    """Return the number of routed experts in a MoE layer; 0 for a dense model."""
    moe = family_of(config).moe
    return (getattr(config, moe.experts) or 0) if moe else 0


def expert_intermediate(config: PreTrainedConfig) -> int:
    """Return the inner size of one expert; 0 for a dense model."""
    moe = family_of(config).moe
    return getattr(config, moe.intermediate) if moe else 0


def moe_layers(config: PreTrainedConfig) -> tuple[int, ...]:
    """Return the layers that have experts."""
    moe = family_of(config).moe
    return tuple(moe.layers(config)) if moe else ()


def _named(config: PreTrainedConfig) -> str:
    return (config.architectures or ["none"])[0]
