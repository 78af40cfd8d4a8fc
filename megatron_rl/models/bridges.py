"""Megatron-Bridge's bridges for all families (`families`), extended for our layer spec.

A subclass of each family's bridge is registered instead of the original. The subclass maps additional weight names, because
our layer spec keeps each norm separate from the linear layer after the norm.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any, ClassVar, cast

import torch
import transformers
from megatron.bridge.models.conversion.mapping_registry import MegatronMappingRegistry
from megatron.bridge.models.conversion.model_bridge import (
    MegatronModelBridge,
    WeightConversionTask,
    get_model_bridge,
)
from megatron.bridge.models.conversion.param_mapping import AutoMapping
from megatron.bridge.models.hf_pretrained.causal_lm import PreTrainedCausalLM
from megatron.core.models.gpt import GPTModel

from megatron_rl.errors import UserError, together
from megatron_rl.models import fp8
from megatron_rl.models.families import FAMILIES, Family, architecture
from megatron_rl.models.freeze import HEAD
from megatron_rl.models.hf_folder import OpenFiles


class OurSpec(MegatronModelBridge):
    """A bridge with the weight names of our layer spec. Unlike Megatron-Bridge, it raises an error if a tensor is missing."""

    EXTRA: ClassVar = {
        "decoder.layers.*.input_layernorm.weight": "model.layers.*.input_layernorm.weight",
        "decoder.layers.*.pre_mlp_layernorm.weight": "model.layers.*.post_attention_layernorm.weight",
    }

    value_head = False
    """True if the model's head is a `ValueHead`."""

    def mapping_registry(self) -> MegatronMappingRegistry:
        """Return the original bridge's mappings of weight names, plus mappings for our norms and for route predictors."""
        # `_register` creates subclasses of this class and a family's bridge, so super() is the family's bridge.
        mappings = super().mapping_registry().get_all_mappings()  # pyright: ignore[reportAbstractUsage]
        if self.value_head:
            mappings = [AutoMapping(HEAD, SCORE) if m.megatron_param == HEAD else m for m in mappings]
        known = {mapping.megatron_param for mapping in mappings}
        extra = [AutoMapping(ours, theirs) for ours, theirs in self.EXTRA.items() if ours not in known]
        predictors = [
            AutoMapping(_predictor_of(mapping.megatron_param), _predictor_of(str(mapping.hf_param)))
            for mapping in mappings
            if mapping.megatron_param == ROUTER
        ]
        return MegatronMappingRegistry(*mappings, *extra, *predictors)

    def build_conversion_tasks(self, *args: Any, **kwargs: Any) -> list[WeightConversionTask | None]:
        """Return the original bridge's tasks, without its cache of parameter names: routers may have gotten predictors."""
        self.__dict__.pop("_cached_param_names", None)
        return super().build_conversion_tasks(*args, **kwargs)

    def load_into(self, chunks: list[GPTModel], source: PreTrainedCausalLM) -> Iterator[str]:
        """Copy the folder's weights into the chunks; yield the name of each Megatron parameter after its weight is copied.

        Collective. Errors: IncompleteWeights, on all ranks, before anything is copied. This method replaces
        `load_weights_hf_to_megatron`, which only warns about missing tensors and keeps all read expert tensors in memory.
        """
        tasks, weight_of = self.complete_tasks(chunks, source), Weights(self, source)
        for task in tasks:
            weight = weight_of(task)
            if weight is not None and task.param_weight is not None:
                with torch.no_grad():
                    task.param_weight.copy_(weight)
            yield task.global_param_name
        self._broadcast_shared_embeddings(chunks)

    def complete_tasks(self, chunks: list[GPTModel], source: PreTrainedCausalLM) -> list[WeightConversionTask]:
        """Return the conversion tasks that produce the Megatron parameters from the folder's tensors.

        Collective. Errors: IncompleteWeights, on all ranks.
        """
        keys = set(source.state.source.get_all_keys())
        tasks = [task for task in self.build_conversion_tasks(source, chunks) if task is not None]
        if self.value_head and SCORE not in keys:  # folder of a language model: the head keeps its initial weights
            tasks = [task for task in tasks if task.mapping.hf_param != SCORE]

        def check() -> None:
            if problem := self._incomplete(tasks, chunks, keys):
                raise IncompleteWeights(problem)

        together(check)
        return tasks

    def _incomplete(self, tasks: list[WeightConversionTask], chunks: list, keys: set[str]) -> str | None:
        """Return an error message if the tensors of the files and the parameters of the model do not match one to one."""
        tied = self._share_embeddings_and_output_weights(chunks[0].config)
        fresh = self.value_head and SCORE not in keys
        names = {
            n
            for n in self._megatron_global_param_names_all_pp_ranks(chunks)
            if not ((tied or fresh) and "output_layer" in n)
        }
        unmapped = sorted(names - {task.global_param_name for task in tasks})
        if unmapped:
            return f"no rule says which tensor gives parameter {unmapped[0]}"
        used: set[str] = set()
        for task in tasks:
            hf_param = task.mapping.hf_param
            for name in [hf_param] if isinstance(hf_param, str) else hf_param.values():
                parts = {name} if name in keys else {f"{name}_blocks", f"{name}_scales"}  # MXFP4
                if not parts <= keys:
                    return f"tensor {name} is missing"
                used |= parts
        # Other expert-parallel ranks check their own experts.
        used = {_EXPERT.sub(".experts.*.", name) for name in used}
        layers = cast("Any", self.hf_config).num_hidden_layers
        for name in sorted(keys):
            layer = _LAYER.match(name)
            ignored = (
                name.endswith("rotary_emb.inv_freq")
                or (name.endswith(fp8.SCALE) and name.removesuffix(fp8.SCALE) in keys)
                or ((tied or self.value_head) and name == "lm_head.weight")
                or (layer is not None and int(layer[1]) >= layers)  # draft layers for multi-token prediction
            )
            if not ignored and _EXPERT.sub(".experts.*.", name) not in used:
                return f"tensor {name} has no place in the model that config.json describes"
        return None

    def _with_progress_tracking(self, tasks: list, description: str, show_progress: bool = True) -> Iterable:
        return iter(tasks)


class IncompleteWeights(UserError):
    """Raised if the safetensors files do not match the model. The message names the tensor or the parameter."""


class Weights:
    """Reads the weights of a folder one at a time and converts each to a Megatron parameter of this rank."""

    def __init__(self, bridge: OurSpec, source: PreTrainedCausalLM) -> None:
        self._bridge = bridge
        files = cast("Any", source.state.source)  # has the folder and the index of the safetensors files
        self._tensors = fp8.Dequantized(OpenFiles(files.path, files.key_to_filename_map))
        self._recent: OrderedDict[str, Any] = OrderedDict()  # gpt-oss: one tensor holds all experts of a layer

    def __call__(self, task: WeightConversionTask) -> torch.Tensor | None:
        """Return the weight for a task's parameter; None if this rank lacks the parameter. Collective.

        Errors: IncompleteWeights.
        """
        if task.megatron_module is None or task.param_weight is None:
            return None
        key, recent = str(task.mapping.hf_param), self._recent
        if key not in recent:
            recent[key] = self._bridge.maybe_modify_loaded_hf_weight(task.mapping.hf_param, self._tensors)
            while len(recent) > 4:
                recent.popitem(last=False)
        weight = task.mapping.hf_to_megatron(recent[key], task.megatron_module)
        if weight is not None and weight.shape != task.param_weight.shape:
            raise IncompleteWeights(
                f"tensor {task.mapping.hf_param} has shape {list(weight.shape)} for a parameter of shape"
                f" {list(task.param_weight.shape)} ({task.global_param_name})"
            )
        return weight


ROUTER = "decoder.layers.*.mlp.router.weight"
SCORE = "score.weight"
"""Hugging Face's name for the head weight of a classifier with one label."""


def _predictor_of(router: str) -> str:
    return router.removesuffix("weight") + "predictor.weight"


_EXPERT = re.compile(r"\.experts\.\d+\.")
_LAYER = re.compile(r"model\.layers\.(\d+)\.")


AutoMapping.register_module_type("CoreAttention", "column")  # sinks, one per head
for _name in ("ReplayRouter", "RoutePredictor", "ValueHead"):
    AutoMapping.register_module_type(_name, "replicated")


def _register(family: Family) -> None:
    """Register our subclass of the family's bridge with Megatron-Bridge, under the family's class in transformers."""
    bridge = type(f"Our{family.architecture}", (OurSpec, family.bridge()), {})
    options = {"provider": family.provider()} if family.provider else {}
    register: Any = MegatronModelBridge.register_bridge  # declared for instances, but it takes classes
    source = getattr(transformers, family.architecture)
    register(source=source, target=GPTModel, model_type=family.model_type, **options)(bridge)


for _family in FAMILIES.values():
    _register(_family)


def make_bridge(hf_config: transformers.PreTrainedConfig, *, value_head: bool = False) -> OurSpec:
    """Return the bridge for a model's config. The architecture must be supported (families.FAMILIES)."""
    found = get_model_bridge(getattr(transformers, architecture(hf_config)), hf_config=hf_config)
    bridge = cast("OurSpec", found)  # a class that _register registered
    bridge.value_head = value_head
    return bridge
