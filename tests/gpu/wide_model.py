"""Makes a Hugging Face folder of layers of a real model at its real widths, with all its experts: random weights in bf16.

    python tests/gpu/wide_model.py qwen3 FOLDER --layers 4

Models are those of benchmarks/slices.py, which have the experts of one rank. The tokenizer knows numbers and arithmetic
(tools/make_tiny_model.py); the rest of the vocabulary is reserved.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import transformers

from benchmarks.slices import MODELS, make_folder
from tools.make_tiny_model import numbers_tokenizer

EXPERTS = {"qwen3": ("num_experts", 128), "gpt_oss": ("num_local_experts", 32)}
"""Key of config.json and number, of Qwen3-30B-A3B and gpt-oss-20b."""


def wide_config(name: str, layers: int, tiny: bool) -> transformers.PreTrainedConfig:
    config = MODELS[name](tiny)
    if not tiny:
        key, experts = EXPERTS[name]
        setattr(config, key, experts)
        config.num_hidden_layers = layers
        if getattr(config, "layer_types", None):
            config.layer_types = config.layer_types[:layers]
    return config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tiny", action="store_true", help="a tiny model of the same kind, to try it on a CPU")
    options = parser.parse_args()
    config = wide_config(options.model, options.layers, options.tiny)
    tokenizer = numbers_tokenizer(config.vocab_size)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(config, name, getattr(tokenizer, name))
    make_folder(config, options.folder)
    tokenizer.save_pretrained(options.folder)


if __name__ == "__main__":
    main()
