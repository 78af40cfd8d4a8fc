"""Silences messages of Megatron at start-up that a user without a GPU cannot act on, with one narrow filter each."""

from __future__ import annotations

import logging
import warnings

WARNINGS = (
    r"Transformer Engine and Apex are not installed\. Falling back",
    r"Apex is not installed\. Falling back to Torch Norm",
    r"Only transformer-engine>=1\.7\.0 supports MoE experts, but your version is 0\.0\.0",
    r"full scope is deprecated\. Use empty cuda_graph_modules",
    r"`torch\.jit\.script` is deprecated",
    r"MimoModelConfig is experimental",
    r"The \.grad attribute of a Tensor that is not a leaf Tensor is being accessed",
    r"`torch\.distributed\.\w+` is deprecated",
    r"torch\.distributed is disabled, unavailable or uninitialized, assuming the intent is to load in a single process",
    r"The argument order of load has been changed",
    r"Please use DTensor instead and we are deprecating ShardedTensor",
)
LOG_LINES = {
    "torch.utils.cpp_extension": "No CUDA runtime is found",
    "megatron.bridge.utils.import_utils": "Import of",
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.bridge.utils.fusions": "gradient_accumulation_fusion requires",
    "megatron.bridge.models.gemma.gemma2_provider": "Gemma2:",
    "transformers.configuration_utils": "`torch_dtype` is deprecated",
}
"""Logger -> beginning of the line."""


def silence() -> None:
    """Install the filters in this process."""
    for message in WARNINGS:
        warnings.filterwarnings("ignore", message)
    for name, start in LOG_LINES.items():
        logging.getLogger(name).addFilter(lambda record, start=start: not str(record.msg).startswith(start))
