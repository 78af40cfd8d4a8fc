"""Checks of a model folder's config.json: supported architectures, and parallel sizes that fit it. Needs no Megatron."""

from __future__ import annotations

from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from megatron_rl.config import ParallelConfig
from megatron_rl.config.plan import expert_tensor_size
from megatron_rl.errors import UserError
from megatron_rl.models.families import (
    FAMILIES,
    architecture,
    expert_count,
    expert_intermediate,
    family_of,
    is_classifier,
)


def read_hf_config(path: str | Path) -> PreTrainedConfig:
    """Read config.json of a local model folder.

    Errors: UserError if the folder or the file is missing. UserError if the file is not JSON, describes an unsupported model,
    or needs code from the folder (such code is never run).
    """
    folder = Path(path)
    if not str(path):
        raise UserError("config: model.path is empty; give a Hugging Face model folder")
    if not folder.is_dir():
        raise UserError(f"model folder {folder}: does not exist; model.path must be a local folder")
    if not (folder / "config.json").is_file():
        raise UserError(f"model folder {folder}: has no config.json")
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f"model folder {folder}: config.json cannot be read ({reason(error)})") from None
    _check_supported(config, folder)
    return config


def check_parallel(config: PreTrainedConfig, parallel: ParallelConfig, world_size: int) -> None:
    """Refuse parallel sizes that do not divide the model or the processes. Errors: UserError that names key and remedy."""
    experts, expert_tensor = expert_count(config), expert_tensor_size(parallel)
    copies = {
        "tensor x pipeline x context": parallel.tensor * parallel.pipeline * parallel.context,
        "expert x expert_tensor x pipeline": parallel.expert * expert_tensor * parallel.pipeline,
    }
    for what, size in copies.items():
        if world_size % size:
            raise UserError(
                f"config: parallel.{what} = {size} does not divide the {world_size} processes;"
                f" start a multiple of {size}"
            )
    if parallel.expert > 1 and not experts:
        raise UserError(
            f"config: parallel.expert = {parallel.expert}, but {architecture(config)} is dense; set it to 1"
        )
    if parallel.virtual_pipeline > 1 and parallel.pipeline == 1:
        raise UserError("config: parallel.virtual_pipeline needs parallel.pipeline above 1")

    if expert_tensor > 1 and experts and family_of(config).bias:
        raise UserError(
            f"config: parallel.expert_tensor = {expert_tensor} (by default parallel.tensor), but the experts of"
            f" {architecture(config)} have biases, and cannot be split; set parallel.expert_tensor to 1"
        )

    kv_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    divides = [
        ("tensor", parallel.tensor, "attention heads", config.num_attention_heads),
        ("tensor", parallel.tensor, "key-value heads", kv_heads),
        ("tensor", parallel.tensor, "intermediate size", config.intermediate_size),
        ("pipeline", parallel.pipeline, "layers", config.num_hidden_layers),
    ]
    if experts:
        divides += [
            ("expert", parallel.expert, "experts", experts),
            ("expert_tensor", expert_tensor, "expert intermediate size", expert_intermediate(config)),
        ]
    for key, size, what, total in divides:
        if total % size:
            raise UserError(
                f"config: parallel.{key} = {size} does not divide the model's {total} {what}; {_choices(total)}"
            )
    chunks = parallel.pipeline * parallel.virtual_pipeline
    if config.num_hidden_layers % chunks:
        per_stage = config.num_hidden_layers // parallel.pipeline
        raise UserError(
            f"config: parallel.virtual_pipeline = {parallel.virtual_pipeline} does not divide the {per_stage}"
            f" layers of a pipeline stage; {_choices(per_stage)}"
        )


def _check_supported(config: PreTrainedConfig, folder: Path) -> None:
    """Refuse settings that change the results without changing any tensor's name or shape. Errors: UserError."""
    name = architecture(config)
    if name not in FAMILIES:
        raise UserError(
            f"model folder {folder}: architecture {name} is not supported; supported: {', '.join(sorted(FAMILIES))}"
        )

    def refuse(key: str, why: str) -> None:
        raise UserError(f"model folder {folder}: config.json has {key} = {getattr(config, key)!r}: {why}")

    if is_classifier(config) and config.num_labels != 1:
        refuse("num_labels", "reward models and critics have 1; classifiers of several classes are not supported")
    if config.hidden_act != "silu":
        refuse("hidden_act", "only silu is supported")
    if getattr(config, "use_sliding_window", False):
        refuse("use_sliding_window", "sliding windows of this architecture are not supported")
    if getattr(config, "clip_qkv", None) is not None:
        refuse("clip_qkv", "clipping of queries, keys and values is not supported")
    family = FAMILIES[name]
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in family.rope_types:
        refuse("rope_parameters", f"rope_type {kind} is not supported for {name}")
    if refused := family.unsupported(config):
        refuse(*refused)


def _choices(total: int) -> str:
    divisors = [str(n) for n in range(1, min(total, 1024) + 1) if total % n == 0]
    return f"choose one of {', '.join(divisors[:12])}"


def reason(error: BaseException) -> str:
    """Return an error of transformers' Auto classes in one line, without their advice to run the folder's own code."""
    if "trust_remote_code" in str(error):
        return "it names code in the folder itself (auto_map), which is never run; save it with a class of transformers"
    return one_line(error)


def one_line(error: BaseException | str) -> str:
    """Return an error's message in one line of at most 300 characters."""
    return " ".join(str(error).split())[:300] or type(error).__name__
