"""Model families: each module of this folder is one, and describes it whole in its `FAMILY`."""

from __future__ import annotations

import importlib
import pkgutil

from transformers import PreTrainedConfig

from megatron_rl.models.families.family import Family, TinySizes

__all__ = ["CLASSIFIER", "FAMILIES", "Family", "TinySizes", "architecture", "family_of", "is_classifier"]

CLASSIFIER = "ForSequenceClassification"
"""How Hugging Face's names of models with a head of labels end."""


def _families() -> dict[str, Family]:
    modules = sorted(info.name for info in pkgutil.iter_modules(__path__) if info.name != "family")
    found = [importlib.import_module(f"{__name__}.{name}").FAMILY for name in modules]
    return {family.architecture: family for family in found}


FAMILIES: dict[str, Family] = _families()
"""Hugging Face's architecture -> family."""


def architecture(config: PreTrainedConfig) -> str:
    """The one entry of `architectures`, e.g. LlamaForCausalLM; of a classifier, the language model that it is built on."""
    return _named(config).replace(CLASSIFIER, "ForCausalLM")


def is_classifier(config: PreTrainedConfig) -> bool:
    """True if the folder has a head of one number (`score.weight`): a reward model or a critic."""
    return _named(config).endswith(CLASSIFIER)


def family_of(config: PreTrainedConfig) -> Family:
    """The family of a config that `read_hf_config` has accepted. Errors: KeyError for one that is not supported."""
    return FAMILIES[architecture(config)]


def _named(config: PreTrainedConfig) -> str:
    return (config.architectures or ["none"])[0]
