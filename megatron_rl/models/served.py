"""Which model folders SGLang serves with the very weights that the trainer pushes or that the folder holds."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedConfig

from megatron_rl.config import Config
from megatron_rl.errors import UserError
from megatron_rl.models import fp8
from megatron_rl.models.parallel_check import architecture
from megatron_rl.models.precision import ROLLOUT_DTYPES

TIED_IN_SGLANG = ("DeepseekV3ForCausalLM", "LlamaForCausalLM", "Qwen3ForCausalLM")
"""Architectures for which SGLang 0.5.23 heeds tie_word_embeddings."""
OF_THE_FOLDERS_DTYPE = ("GptOssForCausalLM",)
"""Architectures whose layers SGLang 0.5.23 makes in the dtype of config.json, whatever --dtype says."""


def check_served(config: Config, hf_config: PreTrainedConfig, *, pushes: bool) -> None:
    """Check that SGLang can serve a folder and take pushes to it.

    Errors: UserError for a folder whose weights SGLang would hold in another form than the trainer pushes them, or with
    which it would die at the first request.
    """
    path, rollout, name = config.model.path, config.precision.rollout, architecture(hf_config)
    on_gpu = torch.cuda.is_available()
    if rollout == "fp8":
        server = config.rollout.server
        fp8.check_folder(Path(path), server.tensor, server.expert, simulate=not on_gpu)
    if getattr(hf_config, "tie_word_embeddings", False) and name not in TIED_IN_SGLANG:
        raise UserError(
            f"model: SGLang serves {name} without tied embeddings: write the embedding as lm_head.weight too, and set"
            " tie_word_embeddings to false in config.json"
        )
    quantized = getattr(hf_config, "quantization_config", None)
    method = quantized and quantized["quant_method"]
    if method and (pushes or (method == "fp8" and not on_gpu)):
        reason = "which a push does not fill" if pushes else "whose products need a GPU"
        raise UserError(
            f"model {path}: SGLang would hold its weights as {method} (quantization_config in config.json), {reason}; write"
            f" plain ones: megatron-rl convert {path} CHECKPOINT, then megatron-rl convert CHECKPOINT FOLDER"
        )
    dtype = getattr(hf_config, "dtype", None)
    if name in OF_THE_FOLDERS_DTYPE and dtype not in (None, ROLLOUT_DTYPES[rollout]):
        found = str(dtype).removeprefix("torch.")
        raise UserError(
            f"model {path}: SGLang serves {name} in the dtype of config.json alone, which is {found}, but precision.rollout is"
            f" {rollout}: set it to match, or dtype in config.json"
        )
