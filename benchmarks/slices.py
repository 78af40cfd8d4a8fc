"""Tokens/s, memory and a profile of some layers of a real model at full width: scoring and updates of a full micro-batch.

    python benchmarks/slices.py qwen3 --json docs/results/slice-qwen3.json
    python benchmarks/slices.py gpt_oss --json slice.json --profile FOLDER

qwen3: layers of Qwen3-30B-A3B with 16 of its 128 experts (the share of a rank with EP8), and its vocabulary of 151,936.
gpt_oss: layers of gpt-oss-20b, with windows and sinks, 8 of its 32 experts, and its vocabulary of 201,088. Weights are random.
Times are medians over the updates after the first. The profiler's kernels of one update show how the time is spent, and torch's
own warnings count how often the host waited for the GPU. planned_gb is the result of `megatron-rl plan`. --tiny tries the
script on a CPU.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.checks.memory_plan import estimate
from megatron_rl.config import Config
from megatron_rl.config.load import build_config
from megatron_rl.data.packing import Batch
from megatron_rl.data.sequence import Sequence
from megatron_rl.distributed import parallel
from megatron_rl.metrics.reduce import figures
from megatron_rl.models.moe import moe_layers
from megatron_rl.models.precision import TRAIN
from megatron_rl.run.update_hooks import update_hooks
from megatron_rl.trainer.objective import Policy
from megatron_rl.trainer.trainer import Trainer, build_trainer

TOKENS, TINY_TOKENS = 18_432, 288
"""Lengths of one micro-batch: one response of 16k tokens with its prompt, and short ones that fill the micro-batch."""


def qwen3(tiny: bool) -> transformers.PreTrainedConfig:
    sizes = (
        {"hidden_size": 64, "moe_intermediate_size": 32, "num_experts": 8, "vocab_size": 512, "num_hidden_layers": 2}
        if tiny
        else {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 16, "vocab_size": 151_936}
        | {"num_hidden_layers": 4}
    )
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16} if tiny else {}
    heads = heads or {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    return transformers.Qwen3MoeConfig(
        **sizes,
        **heads,
        intermediate_size=6 * sizes["moe_intermediate_size"],
        num_experts_per_tok=min(8, sizes["num_experts"] // 2),
        norm_topk_prob=True,
        max_position_embeddings=40_960,
        tie_word_embeddings=False,
    )


def gpt_oss(tiny: bool) -> transformers.PreTrainedConfig:
    sizes = (
        {"hidden_size": 64, "intermediate_size": 48, "num_local_experts": 8, "vocab_size": 512, "num_hidden_layers": 2}
        | {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "sliding_window": 8}
        if tiny
        else {"num_local_experts": 8, "num_hidden_layers": 4}  # all other values default to gpt-oss-20b
    )
    # As in the released folders: SGLang reads it, but not every release of transformers writes it.
    return transformers.GptOssConfig(**sizes, num_experts_per_tok=4, swiglu_limit=7.0, tie_word_embeddings=False)


MODELS = {"qwen3": qwen3, "gpt_oss": gpt_oss}


def make_folder(config: transformers.PreTrainedConfig, folder: Path) -> Path:
    """Make a Hugging Face folder with random bf16 weights."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    with torch.device(device):
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def make_samples(tokens: int, vocabulary: int) -> list[Sequence]:
    rng = np.random.default_rng(0)
    lengths = [tokens * 8 // 9, *[tokens // 36] * 4]
    samples = []
    for length in lengths:
        sample = Sequence(tokens=rng.integers(4, vocabulary, length).astype(np.int32), prompt_length=length // 8)
        sample["loss_mask"], sample["rollout_log_probs"] = True, -np.log(vocabulary)
        sample["advantages"] = float(rng.normal())
        samples.append(sample)
    return samples


class Device:
    """Measures time and memory of the device; on a CPU only time."""

    def __init__(self) -> None:
        self.gpu = torch.cuda.is_available()

    def now(self) -> float:
        if self.gpu:
            torch.cuda.synchronize()
        return time.perf_counter()

    def peak(self) -> dict[str, float]:
        """Return the peak memory since the last call, in gigabytes."""
        if not self.gpu:
            return {}
        found = {"peak": torch.cuda.max_memory_allocated(), "reserved": torch.cuda.max_memory_reserved()}
        torch.cuda.reset_peak_memory_stats()
        return {name: round(value / 1e9, 2) for name, value in found.items()}


def one_update(trainer: Trainer, batches: list[Batch]) -> dict[str, float]:
    return figures(trainer.update(batches, Policy(trainer.config)).metrics)


def synchronizations(trainer: Trainer, batches: list[Batch]) -> dict[str, int]:
    """Return how often one update waited for the GPU, by place in the source of megatron_rl or Megatron."""
    if not torch.cuda.is_available():
        return {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        one_update(trainer, batches)
        torch.cuda.set_sync_debug_mode("default")
    places = [f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)]
    return dict(Counter(places).most_common())


def profile(trainer: Trainer, batches: list[Batch], folder: Path | None) -> dict[str, Any]:
    """Return the number of kernel launches in one update, and milliseconds of the ten slowest kernels (CPU: operators).

    folder: receives the trace.
    """
    activities = [torch.profiler.ProfilerActivity.CPU]
    gpu = torch.cuda.is_available()
    if gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as found:
        one_update(trainer, batches)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        found.export_chrome_trace(str(folder / "update.json.gz"))
    own = "self_device_time_total" if gpu else "self_cpu_time_total"
    rows = sorted(found.key_averages(), key=lambda row: -getattr(row, own))
    return {
        "launches": sum(row.count for row in rows if "LaunchKernel" in row.key),
        "longest_ms": {row.key[:120]: round(getattr(row, own) / 1e3, 2) for row in rows[:10]},
    }


def measure(
    config: Config,
    hf_config: transformers.PreTrainedConfig,
    *,
    updates: int,
    plain: bool = False,
    trace: Path | None = None,
) -> dict[str, Any]:
    """Score and update a full micro-batch `updates` times; return seconds, gigabytes, launches and the slowest kernels.

    config: from `slice_config`. plain: use Megatron's local layers even if Transformer Engine is installed. trace: folder for
    the trace of one update. Starts the ranks, and ends them.
    """
    tokens, device = config.batch.tokens_per_micro_batch, Device()
    ranks = parallel.initialize(config.parallel, config.seed)
    support, hooks = SamplingSupport(), update_hooks(config)
    trainer = build_trainer(config, ranks, total_updates=config.steps, support=support, hooks=hooks, plain=plain)
    planned = estimate(config, hf_config, 1).usage
    device.peak()
    samples = make_samples(tokens, hf_config.vocab_size)
    batches = trainer.pack(samples)
    count = sum(sample.inputs for sample in samples)
    seconds: dict[str, list[float]] = {"score": [], "update": []}
    norms, skipped = [], 0.0
    for _ in range(updates):
        start = device.now()
        trainer.compute_log_probs(batches)
        middle = device.now()
        metrics = one_update(trainer, batches)
        seconds["score"].append(middle - start)
        seconds["update"].append(device.now() - middle)
        norms.append(metrics["update/grad_norm"])
        skipped += metrics["update/skipped"]
    memory = device.peak()
    median = {name: statistics.median(values[1:]) for name, values in seconds.items()}
    result = {
        "device": torch.cuda.get_device_name() if device.gpu else "CPU",
        "torch": torch.__version__,
        "precision": config.precision.train,
        "experts": sorted({type(layer.experts).__name__ for _, layer in moe_layers(trainer.chunks)}),
        "layers": hf_config.num_hidden_layers,
        "tokens": count,
        "micro_batches": len(batches),
        "recompute": config.model.recompute,
        "parameters": sum(p.numel() for chunk in trainer.chunks for p in chunk.parameters()),
        "score_s": round(median["score"], 4),
        "update_s": round(median["update"], 4),
        "tokens_per_s": round(count / sum(median.values()), 1),
        "memory_gb": memory,
        "grad_norm": norms,
        "skipped": skipped,
        "planned_gb": round(planned.total / 1e9, 2),
        "synchronizations": synchronizations(trainer, batches),
        **profile(trainer, batches, trace),
    }
    parallel.shutdown()
    return result


def slice_config(folder: Path, precision: str, *, tokens: int = TOKENS, recompute: str = "none") -> Config:
    """Return the config of the updates for a model folder."""
    return build_config(
        {
            "steps": 1_000_000,
            "model": {"path": str(folder), "recompute": recompute},
            "batch": {"tokens_per_micro_batch": tokens},
            "precision": {"train": precision},
            "rollout": {"agreement_floor": None},  # log-probs are made up
            "optimizer": {"lr": 1e-7},
        }
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=list(MODELS))
    parser.add_argument(
        "--updates", type=int, default=6, help="number of updates; the first is not counted (default 6)"
    )
    parser.add_argument("--precision", choices=list(TRAIN), default="bf16", help="precision.train (default bf16)")
    parser.add_argument("--recompute", choices=["none", "selective", "full"], default="none")
    parser.add_argument(
        "--plain", action="store_true", help="use Megatron's local layers even if Transformer Engine is installed"
    )
    parser.add_argument("--profile", type=Path, help="folder for the trace of one update")
    parser.add_argument("--tiny", action="store_true", help="use a tiny model, to try the script")
    parser.add_argument("--json", help="output file")
    options = parser.parse_args()
    if options.updates < 2:
        parser.error("--updates must be 2 or more: the first is not counted")
    hf_config = MODELS[options.model](options.tiny)
    with tempfile.TemporaryDirectory() as name:
        folder = make_folder(hf_config, Path(name))
        tokens = TINY_TOKENS if options.tiny else TOKENS
        config = slice_config(folder, options.precision, tokens=tokens, recompute=options.recompute)
        found = measure(config, hf_config, updates=options.updates, plain=options.plain, trace=options.profile)
    result = {"model": options.model, **found}
    if options.json:
        Path(options.json).write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({key: result[key] for key in ("model", "device", "tokens_per_s", "update_s", "memory_gb")}))


if __name__ == "__main__":
    main()
