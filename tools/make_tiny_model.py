"""Create a tiny random model folder of a supported family: config.json, safetensors, tokenizer, generation_config.json.

    python tools/make_tiny_model.py qwen3_moe OUT
    python tools/make_tiny_model.py gpt_oss OUT --layers 2 --experts 8 --dtype bfloat16
    python tools/make_tiny_model.py --preset quickstart OUT

The folder loads in transformers, in SGLang and in the trainer. No network is needed, because the tokenizer is built here:

- text: byte-level BPE trained on the Python manual that comes with every Python, with a ChatML chat template.
- numbers: one token per number, for arithmetic tasks.
- calls: one token per piece of a calculator call in Qwen's format.
- harmony: the tokenizer of gpt-oss (201,088 ids).
- harmony_calls: one token per piece of a calculator call in Harmony's format.
"""

from __future__ import annotations

import argparse
import base64
import re
import shutil
import sys
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from pydoc_data import topics

import torch
from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils.logging import disable_progress_bar

from megatron_rl.dialects.harmony_ids import MARKS, unpacked_ranks
from megatron_rl.models import families
from megatron_rl.models.families import TinySizes as Sizes

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


FAMILIES = {family.model_type: family.tiny for family in families.FAMILIES.values()}

DEFAULT = Sizes()
QUICKSTART = Sizes(hidden=192, heads=4, kv_heads=2, head_dim=48, expert_intermediate=256, vocab=64, max_position=512)
"""Sizes of a model with 5.2 M parameters, which learns number sorting in minutes on two cores."""
PRESETS = {
    "quickstart": ("qwen3_moe", QUICKSTART),
    # YaRN and windows as in the released models, except for the length of the window.
    "gptoss_quickstart": ("gpt_oss", replace(QUICKSTART, max_position=131072, window=32)),
}
"""Models of examples/NAME.sh: family and sizes."""


SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


@cache
def _trained_bpe(vocab: int) -> str:
    # Cached as text: callers may change their tokenizer, and training takes longer than parsing.
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFC()
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=[*SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(topics.topics.values(), trainer)
    return bpe.to_str()


def text_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE tokenizer of exactly `vocab` tokens (at least 260: 256 bytes and special tokens), with ChatML."""
    bpe = Tokenizer.from_str(_trained_bpe(vocab))
    if bpe.get_vocab_size() != vocab:
        raise ValueError(f"--vocab {vocab}: the text tokenizer has {bpe.get_vocab_size()} tokens; choose 260 to 4096")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=SPECIAL[0], eos_token=SPECIAL[2], clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def numbers_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token for each number 0 to 19, each of + - * / ( ) = : < >, and pad, bos, eos: 33 tokens.

    Reserved tokens fill the vocabulary up to a size that tensor parallelism divides. No text maps to them, and they
    are visible when decoded. Text outside the vocabulary becomes <pad>.
    """
    words = ["<pad>", "<bos>", "<eos>", *(str(n) for n in range(20)), *"+-*/()=:<>"]
    if vocab < len(words):
        raise ValueError(f"--vocab {vocab}: the numbers tokenizer needs {len(words)}")
    words += [f"<reserved_{i}>" for i in range(len(words), vocab)]
    level = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    level.pre_tokenizer = pre_tokenizers.Split(Regex(r"\d+|\S"), behavior="removed", invert=True)
    return PreTrainedTokenizerFast(
        tokenizer_object=level,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        clean_up_tokenization_spaces=False,
    )


CALLS_TEMPLATE = (
    "{% if tools %}<tools>{% endif %}{% for message in messages %}"
    "{% if message['role'] == 'tool' %}<tool_response>{{ message['content'] }}</tool_response>"
    "{% elif message['role'] == 'assistant' %}<assistant>{{ message['content'] }}<eos>"
    "{% else %}<user>{{ message['content'] }}{% endif %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def calls_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with one token per digit, for + - and =, and per piece of a calculator call in Qwen's format.

    Its chat template shows tools only as <tools>, so that conversations are short. Other text becomes <pad>.
    """
    roles = ["<user>", "<assistant>", "<tools>", "<tool_response>", "</tool_response>"]
    pieces = [
        "<tool_call>",
        "</tool_call>",
        '{"name": "',
        "calculator",
        '", "arguments": {"expression": "',
        '"}}',
        "\n",
    ]
    words = ["<pad>", "<eos>", *roles, *pieces, *"0123456789+-=", "Error"]
    if vocab < len(words):
        raise ValueError(f"--vocab {vocab}: the calls tokenizer needs {len(words)}")
    words += [f"<reserved_{i}>" for i in range(len(words), vocab)]
    level = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    longest_first = sorted(pieces, key=len, reverse=True)
    level.pre_tokenizer = pre_tokenizers.Split(
        Regex("|".join(map(re.escape, longest_first)) + r"|Error|[\s\S]"), "isolated"
    )
    level.decoder = decoders.Fuse()
    level.add_special_tokens(["<pad>", "<eos>", *roles])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=level, pad_token="<pad>", eos_token="<eos>", clean_up_tokenization_spaces=False
    )
    tokenizer.chat_template = CALLS_TEMPLATE
    return tokenizer


HARMONY_SPECIAL = {
    199998: "<|startoftext|>",
    199999: "<|endoftext|>",
    200002: "<|return|>",
    200003: "<|constrain|>",
    200005: "<|channel|>",
    200006: "<|start|>",
    200007: "<|end|>",
    200008: "<|message|>",
    200012: "<|call|>",
    200018: "<|endofprompt|>",
}
"""Special tokens of gpt-oss's tokenizer; the ids between them are reserved."""
HARMONY_PATTERN = "|".join(
    [
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    ]
)
"""Pattern by which o200k_base splits a text before merges."""


def harmony_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Return gpt-oss's tokenizer, built from o200k_base's ranks in the package bpe-openai; it has no chat template.

    It has 200,019 tokens, while the models have 201,088 rows. The dialect harmony renders with openai-harmony and
    needs no template.
    """
    if vocab <= max(HARMONY_SPECIAL):
        raise ValueError(
            f"--vocab {vocab}: the harmony tokenizer is gpt-oss's; use --vocab 201088, or --tokenizer harmony_calls"
        )
    ranks: dict[bytes, int] = {}
    for line in unpacked_ranks().splitlines():
        token, rank = line.split()
        ranks[base64.b64decode(token)] = int(rank)
    letters = bytes_to_unicode()
    name = {token: "".join(letters[byte] for byte in token) for token in ranks}
    merges = []
    for token in ranks:  # a merge is any pair of tokens that forms a token; lower ranks come first
        pairs = [(token[:i], token[i:]) for i in range(1, len(token)) if token[:i] in ranks and token[i:] in ranks]
        merges += [(name[a], name[b]) for a, b in sorted(pairs, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))]
    vocabulary = {name[token]: rank for token, rank in ranks.items()}
    bpe = Tokenizer(models.BPE(vocabulary, merges, ignore_merges=True))
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(HARMONY_PATTERN), behavior="isolated"), bytes_only]
    )
    bpe.decoder, bpe.post_processor = decoders.ByteLevel(), processors.ByteLevel(trim_offsets=False)
    first, last = min(HARMONY_SPECIAL), max(HARMONY_SPECIAL)
    bpe.add_special_tokens([HARMONY_SPECIAL.get(i, f"<|reserved_{i}|>") for i in range(first, last + 1)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token="<|endoftext|>",
        bos_token="<|startoftext|>",
        eos_token="<|return|>",
        clean_up_tokenization_spaces=False,
    )


def harmony_calls_tokenizer(vocab: int) -> PreTrainedTokenizerFast:
    """Return a tokenizer with Harmony's special tokens by name, and one token for each digit, for + - * =, and for call pieces.

    Call pieces are the parts of a calculator call. The fixed text of the system message, the fixed text of the tool
    declarations, and any other text between tokens are also one token each, so that conversations are short.
    """
    pieces = [
        *("system", "developer", "user", "assistant", "analysis", "commentary", "final"),
        *(
            " to=functions.",
            " to=assistant",
            "functions.",
            "calculator",
            "json",
            '{"expression":"',
            '"}',
            " ",
            "\n",
            "Error",
        ),
    ]
    sections = {
        "<system>": r"You are ChatGPT[\s\S]*for every message\.(?:\nCalls to these tools[^\n]*)?",
        "<tools>": r"# Tools[\s\S]*// namespace functions",
    }
    words, special = ["<text>", *sections, *pieces, *"0123456789+-*="], ["<|endoftext|>", *MARKS]
    spare = vocab - len(words) - len(special)
    if spare < 0:
        raise ValueError(f"--vocab {vocab}: the harmony_calls tokenizer needs {len(words) + len(special)}")
    words += [f"<reserved_{i}>" for i in range(spare)]
    level = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<text>"))
    level.normalizer = normalizers.Sequence(
        [normalizers.Replace(Regex(section), word) for word, section in sections.items()]
    )
    longest_first = sorted([*sections, *pieces], key=len, reverse=True)
    known = "|".join(map(re.escape, longest_first)) + r"|[0-9+\-*=]"
    level.pre_tokenizer = pre_tokenizers.Split(Regex(rf"{known}|(?:(?!{known})[\s\S])+"), "isolated")
    level.decoder = decoders.Fuse()
    level.add_special_tokens(special)  # special tokens are not words, so plain text cannot produce them
    return PreTrainedTokenizerFast(
        tokenizer_object=level, pad_token="<|endoftext|>", eos_token="<|return|>", clean_up_tokenization_spaces=False
    )


TOKENIZERS = {
    "text": text_tokenizer,
    "numbers": numbers_tokenizer,
    "calls": calls_tokenizer,
    "harmony": harmony_tokenizer,
    "harmony_calls": harmony_calls_tokenizer,
}


def make_tiny_model(
    family: str,
    out: str | Path,
    *,
    sizes: Sizes = DEFAULT,
    tokenizer: str = "text",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    vector_noise: float = 0.1,
) -> Path:
    """Write the model folder and return its path. The folder appears complete or not at all.

    vector_noise: std of the noise that is added to norm weights, biases, sinks and expert biases, which start as
    constants. With noise, the output changes if a converter forgets or swaps such a vector.
    """
    out = Path(out)
    tok = TOKENIZERS[tokenizer](sizes.vocab)
    config = FAMILIES[family](sizes)
    special = {name: getattr(tok, name) for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    config.update(special)
    generator_state = torch.get_rng_state()
    torch.manual_seed(seed)
    try:
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        with torch.no_grad():
            # Expert biases are [experts, size], so they are found by name. DeepSeek-V3's router correction bias is a buffer.
            tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            for name, tensor in tensors.items():
                vector = tensor.dim() == 1 and "inv_freq" not in name
                if vector or name.endswith("_bias"):
                    tensor += vector_noise * torch.randn_like(tensor)
    finally:
        torch.set_rng_state(generator_state)
    model = model.to(dtype)
    for buffer in model.buffers():
        buffer.data = buffer.data.float()  # expert biases are fp32 in the released models; other buffers are not saved
    model.generation_config = GenerationConfig(do_sample=True, **special)
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tok.save_pretrained(partial)
    shutil.rmtree(out, ignore_errors=True)
    partial.rename(out)
    return out


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family", nargs="?", choices=list(FAMILIES), help="model family; leave it out with --preset")
    parser.add_argument("out", help="output folder; an existing folder is replaced if it is a model folder or empty")
    parser.add_argument("--preset", choices=list(PRESETS), help="use the 5.2 M parameter model of examples/PRESET.sh")
    parser.add_argument("--tokenizer", choices=list(TOKENIZERS))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--vector-noise", type=float, help="std of noise on norms and biases (default 0.1; with --preset 0)"
    )
    for name, default in asdict(Sizes()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=f"default {default}")
    options = parser.parse_args(arguments)
    if (options.family is None) == (options.preset is None):
        parser.error("give either a family or --preset")
    return options


def main(arguments: list[str] | None = None) -> int:
    disable_progress_bar()
    options = parse_arguments(sys.argv[1:] if arguments is None else arguments)
    preset = options.preset is not None
    family, sizes = PRESETS[options.preset] if preset else (options.family, Sizes())
    given = {name: value for name in asdict(Sizes()) if (value := getattr(options, name)) is not None}
    if options.tokenizer == "harmony":
        given.setdefault("vocab", 201_088)
    out = Path(options.out)
    if out.exists() and any(out.iterdir()) and not (out / "config.json").exists():
        print(f"make_tiny_model: {out} exists and is not a model folder; choose another folder", file=sys.stderr)
        return 2
    noise = options.vector_noise
    try:
        make_tiny_model(
            family,
            out,
            sizes=replace(sizes, **given),
            tokenizer=options.tokenizer or ("numbers" if preset else "text"),
            dtype=getattr(torch, options.dtype),
            seed=options.seed,
            vector_noise=noise if noise is not None else (0.0 if preset else 0.1),
        )
    except ValueError as error:
        print(f"make_tiny_model: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
