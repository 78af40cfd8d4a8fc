"""Memory and time of a conversion to a checkpoint and back, by one process on the CPU, compared bit for bit.

    python benchmarks/convert_memory.py --json docs/results/convert-memory.json
    python benchmarks/convert_memory.py --gb 1 --compared-gb 0.5

The model is a qwen3_moe in bf16 whose weights are random bits, written and compared one tensor at a time. Each conversion is
`megatron-rl convert` in a separate process. Its peak is VmHWM in /proc: resident memory, including mapped pages of files.
`imports_mib` is the peak of a process that only imports. A smaller model is converted in two ways: tensor by tensor, as now,
and completely in memory, as before and as several processes still do. The lower bound of the time is a copy of the folder.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors import safe_open
from transformers import Qwen3MoeConfig

from megatron_rl.models.hf_folder import ShardWriter

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))  # Python searches only the script's own folder

from tools.make_tiny_model import numbers_tokenizer  # noqa: E402

EXPERTS, HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 32, 1024, 1024, 16, 4, 64, 32768
CHILD = """
import re, sys
from pathlib import Path
from megatron_rl.config import ParallelConfig
from megatron_rl.models import convert
if sys.argv[1] == "in-memory":
    convert._streams = lambda: False
if len(sys.argv) > 2:
    convert.convert(Path(sys.argv[2]), Path(sys.argv[3]), ParallelConfig())
print("peak", re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])
"""


def shapes(layers: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield names and shapes of the Hugging Face tensors of the model."""
    yield "model.embed_tokens.weight", (VOCAB, HIDDEN)
    for layer in (f"model.layers.{i}" for i in range(layers)):
        attention = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
        for name, rows in attention.items():
            yield f"{layer}.self_attn.{name}_proj.weight", (rows, HIDDEN)
        yield f"{layer}.self_attn.o_proj.weight", (HIDDEN, HEADS * HEAD_DIM)
        for name, size in (("self_attn.q_norm", HEAD_DIM), ("self_attn.k_norm", HEAD_DIM)):
            yield f"{layer}.{name}.weight", (size,)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{name}.weight", (HIDDEN,)
        yield f"{layer}.mlp.gate.weight", (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for name, shape in (
                ("gate_proj", (INTERMEDIATE, HIDDEN)),
                ("up_proj", (INTERMEDIATE, HIDDEN)),
                ("down_proj", (HIDDEN, INTERMEDIATE)),
            ):
                yield f"{layer}.mlp.experts.{expert}.{name}.weight", shape
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCAB, HIDDEN)


def make_model(folder: Path, gb: float) -> Path:
    """Make a model folder of about `gb` GB (10^9 bytes) with random bits; a conversion does not compute with them."""
    numbers = [sum(torch.Size(shape).numel() for _, shape in shapes(layers)) for layers in (0, 1)]
    layers = max(1, round((gb * 5e8 - numbers[0]) / (numbers[1] - numbers[0])))
    config = Qwen3MoeConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INTERMEDIATE,
        moe_intermediate_size=INTERMEDIATE,
        num_hidden_layers=layers,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        tie_word_embeddings=False,
        dtype="bfloat16",
        architectures=["Qwen3MoeForCausalLM"],
    )
    config.save_pretrained(folder)
    numbers_tokenizer(64).save_pretrained(folder)
    generator, writer = torch.Generator().manual_seed(0), ShardWriter(folder, 2**29)
    for name, shape in shapes(layers):
        bits = torch.randint(-(2**15), 2**15, shape, generator=generator, dtype=torch.int16)
        writer.add(name, bits.view(torch.bfloat16))
    writer.close()
    return folder


def run_child(mode: str, *folders: Path) -> dict[str, float]:
    """Convert in a separate process; return its peak in MiB and its seconds, including imports."""
    start = time.monotonic()
    command = [sys.executable, "-c", CHILD, mode, *map(str, folders)]
    done = subprocess.run(command, cwd=REPOSITORY, stdout=subprocess.PIPE, text=True, timeout=3000, check=True)
    seconds = time.monotonic() - start
    figures = {"peak_mib": int(done.stdout.split("peak ")[1]) / 1024, "seconds": seconds}
    print(mode, *folders, figures, file=sys.stderr)
    return figures


def there_and_back(source: Path, mode: str, repeats: int) -> dict[str, dict[str, float]]:
    """Return medians of conversions to a checkpoint and back; each result is compared with the source."""
    runs: dict[str, list[dict[str, float]]] = {"to_checkpoint": [], "to_folder": []}
    checkpoint, back = source.with_name("checkpoint"), source.with_name("back")
    for _ in range(repeats):
        runs["to_checkpoint"].append(run_child(mode, source, checkpoint))
        runs["to_folder"].append(run_child(mode, checkpoint, back))
        check_same(source, back)
        shutil.rmtree(checkpoint)
        shutil.rmtree(back)
    return {way: {k: statistics.median(run[k] for run in of) for k in of[0]} for way, of in runs.items()}


def check_same(folder: Path, other: Path) -> None:
    """Compare every tensor's bits, one at a time."""
    places = [
        {name: file for file in each.glob("*.safetensors") for name in safe_open(file, "pt").keys()}  # noqa: SIM118
        for each in (folder, other)
    ]
    if places[0].keys() != places[1].keys():
        raise SystemExit(f"benchmarks/convert_memory.py: the tensors in {other} differ from those in {folder}")
    for name, file in places[0].items():
        with safe_open(file, "pt") as ours, safe_open(places[1][name], "pt") as theirs:
            a, b = ours.get_tensor(name), theirs.get_tensor(name)
            if a.dtype != b.dtype or not torch.equal(a.view(torch.int16), b.view(torch.int16)):
                raise SystemExit(f"benchmarks/convert_memory.py: {name} is not the same in {other}")


def size_of(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def copy_seconds(source: Path) -> float:
    """Return the seconds for a copy of the folder."""
    copy, start = source.with_name("copy"), time.monotonic()
    shutil.copytree(source, copy)
    seconds = time.monotonic() - start
    shutil.rmtree(copy)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb", type=float, default=8.0, help="size of the model in GB of 10^9 bytes (default 8)")
    parser.add_argument("--compared-gb", type=float, default=1.0, help="size in GB of the smaller model (default 1)")
    parser.add_argument(
        "--repeats", type=int, default=1, help="conversions each way; the result is the median (default 1)"
    )
    parser.add_argument("--folder", type=Path, help="folder for models, 3.5 x --gb (default: a temporary folder)")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        large = make_model(Path(scratch, "large", "model"), args.gb)
        floor = copy_seconds(large)
        result = {
            "model_gb": size_of(large) / 1e9,
            "imports_mib": run_child("streamed")["peak_mib"],
            "converted": there_and_back(large, "streamed", args.repeats),
            "copy_seconds": floor,
            "bit_exact": True,
        }
        shutil.rmtree(large.parent)
        small = make_model(Path(scratch, "small", "model"), args.compared_gb)
        compared = {mode: there_and_back(small, mode, args.repeats) for mode in ("streamed", "in-memory")}
        result["compared"] = {"model_gb": size_of(small) / 1e9, **compared}
    for way, figures in result["converted"].items():
        figures["seconds_per_copy"] = figures["seconds"] / floor
        figures["peak_per_model"] = figures["peak_mib"] * 2**20 / (result["model_gb"] * 1e9)
        now, before = (compared[mode][way] for mode in ("streamed", "in-memory"))
        figures["compared_peak_ratio"] = now["peak_mib"] / before["peak_mib"]
        figures["compared_seconds_ratio"] = now["seconds"] / before["seconds"]
    text = json.dumps(result, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
