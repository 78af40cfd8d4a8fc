"""Peak memory of gpt-oss's passes as a function of tokens, experts and top-k: megatron_rl and transformers on one folder.

    python benchmarks/expert_memory.py --json docs/results/expert-memory.json

Measured are forward and backward of a micro-batch ("ours": `Trainer.update`) and a pass for log-probs
(`Trainer.compute_log_probs`), in fp32, on sequences of 32 tokens. The unit is bytes of torch's allocator, beyond those held
before the pass (`peak_memory.py`). Between runs the smallest peaks vary by 2 %, and the ratios to the plan by 0.1 %. Slopes
over the tokens are least squares fits. A slope per layer uses the difference between models of 4 and of 2 layers, so that it
includes neither the head nor temporaries of one layer. For two large sizes the resident memory of the process is measured too.

transformers: all expert implementations of the installed version that run on a CPU, and `repeat`. `repeat` is the code that
older releases used on GPUs in eval mode (huggingface/transformers, issue 40073); it repeats hidden states for every expert.
`batched_mm` copies an expert's weights for every token, so it gets fewer tokens.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
import transformers
from peak_memory import forward_and_backward, peak_bytes

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.checks.activations import CPU, GPU, Kernels, stage_activations
from megatron_rl.config import Config
from megatron_rl.config.load import build_config
from megatron_rl.data.sequence import Sequence
from megatron_rl.distributed import parallel
from megatron_rl.models.shape import Shape
from megatron_rl.trainer.trainer import build_trainer

from megatron.core import parallel_state  # isort: skip (after megatron_rl, which makes it importable without a GPU)

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from tools.make_tiny_model import Sizes, make_tiny_model  # noqa: E402

SIZES = Sizes(hidden=384, heads=4, kv_heads=2, head_dim=32, expert_intermediate=256, vocab=64)
"""Model sizes: experts are larger than attention and head, as in the released models."""
LENGTH = 32
TOKENS = (1024, 2048, 4096)
FEW_TOKENS = (32, 64, 96)
LAYERS = (2, 4)
SHAPES = [(16, 2), (4, 2), (8, 2), (32, 2), (16, 4), (16, 8)]
"""Pairs (experts, top-k). The first pair is measured with recomputation too."""
LARGEST, LARGEST_TOKENS = (32, 2), (4096, 8192)
PASSES = ("train", "log_probs")
RECOMPUTE = ("none", "selective", "full")
THEIRS = ("eager", "grouped_mm", "batched_mm", "repeat")
Peaks = dict[tuple[str, int], int]
"""Bytes by (pass, number of tokens)."""


# -- measuring ---------------------------------------------------------------------------------------------------------


def resident_bytes(run: Callable[[], object]) -> int:
    """Return the peak of the process's resident memory during `run`, beyond the memory before it."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak

    def of(name: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(name)).split()[1])

    before = of("VmRSS")
    run()
    return of("VmHWM") - before


def samples(count: int, vocab: int) -> list[Sequence]:
    """Return `count` new sequences of LENGTH inputs."""
    rng, found = np.random.default_rng(), []
    for _ in range(count):
        tokens = rng.integers(4, vocab, LENGTH + 1).tolist()
        found.append(Sequence.demonstration(tokens[: LENGTH // 2], tokens[LENGTH // 2 :]))
        found[-1]["rollout_log_probs"], found[-1]["advantages"] = -3.0, float(rng.normal())
    return found


def config_of(folder: Path, tokens: int, recompute: str) -> Config:
    return build_config(
        {
            "steps": 1000,
            "model": {"path": str(folder), "recompute": recompute},
            "batch": {"tokens_per_micro_batch": tokens, "updates_per_step": 1},
            "precision": {"train": "fp32"},
            "rollout": {"agreement_floor": None},  # log-probs are made up
        }
    )


@contextmanager
def our_passes(folder: Path, tokens: int, recompute: str) -> Iterator[Callable[[str, int], Callable[[], object]]]:
    """Return a function (pass, number of tokens) -> function that runs this pass once, on the trainer of this folder."""
    config = config_of(folder, tokens, recompute)
    ranks = parallel.initialize(config.parallel, config.seed)
    trainer = build_trainer(config, ranks, total_updates=config.steps, support=SamplingSupport())

    def passes(name: str, count: int) -> Callable[[], object]:
        batches = trainer.pack(samples(count // LENGTH, trainer.model.hf_config.vocab_size))
        assert len(batches) == 1
        if name == "log_probs":
            return lambda: trainer.compute_log_probs(batches)
        return forward_and_backward(trainer, batches)

    try:
        yield passes
    finally:
        parallel_state.destroy_model_parallel()


def repeat_forward(
    experts: torch.nn.Module, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """Compute GptOssExperts like older releases of transformers in eval mode on a GPU: every expert computes every token."""
    count = experts.num_experts
    dense = weights.new_zeros(len(hidden), count).scatter_(1, chosen, weights)
    repeated = hidden.repeat(count, 1).view(count, -1, experts.hidden_size)
    gate_up = torch.bmm(repeated, experts.gate_up_proj) + experts.gate_up_proj_bias[..., None, :]
    out = torch.bmm(experts._apply_gate(gate_up), experts.down_proj) + experts.down_proj_bias[..., None, :]
    return (out * dense.t()[..., None]).sum(dim=0)


@contextmanager
def their_passes(folder: Path, implementation: str) -> Iterator[Callable[[str, int], Callable[[], object]]]:
    """Do the same as `our_passes` with transformers' model. Gradient tensors exist before a pass, as in the trainer."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    if implementation == "repeat":
        ALL_EXPERTS_FUNCTIONS.register("repeat", repeat_forward)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation=implementation
    )
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)

    def passes(name: str, count: int) -> Callable[[], object]:
        ids = torch.randint(4, model.config.vocab_size, (count // LENGTH, LENGTH + 1))
        model.train(name == "train")

        def log_probs() -> torch.Tensor:
            logits = model(ids[:, :-1], use_cache=False).logits
            return torch.log_softmax(logits, -1).gather(-1, ids[:, 1:, None])

        return (lambda: log_probs().mean().backward()) if name == "train" else torch.no_grad()(log_probs)

    yield passes


def runs_of(implementation: str, folder: Path, tokens: int, recompute: str):
    return our_passes(folder, tokens, recompute) if implementation == "ours" else their_passes(folder, implementation)


def measure(implementation: str, folder: Path, tokens: tuple[int, ...], recompute: str = "none") -> Peaks:
    """Return the peaks of all passes. `repeat` is not trained, because no release used it for training."""
    found: Peaks = {}
    with runs_of(implementation, folder, tokens[-1], recompute) as passes:
        for name in PASSES if implementation != "repeat" else PASSES[1:]:
            passes(name, tokens[0])()  # creates moments and tables of rotary embeddings
            found |= {(name, count): peak_bytes(passes(name, count)) for count in tokens}
    gc.collect()
    return found


# -- slopes ------------------------------------------------------------------------------------------------------------


def slope(x: Items[int], y: Items[float]) -> float:
    """Return the slope of the least squares line through the points (x, y)."""
    return float(np.polyfit(x, y, 1)[0])


def predicted(folder: Path, recompute: str, kernels: Kernels) -> float:
    """Return the bytes per token and layer that `megatron-rl plan` computes."""
    shape = Shape.from_config(transformers.AutoConfig.from_pretrained(folder))
    tokens = 1 << 16
    config = config_of(folder, tokens, recompute)
    sections = recompute, config.parallel, config.precision.train
    more, less = (
        stage_activations(*sections, replace(shape, layers=n, moe_layers=tuple(range(n))), 0, tokens, 1, kernels)
        for n in (2, 1)
    )
    return (more - less) / tokens


def row_of(few: Peaks, many: Peaks, name: str) -> dict:
    """Return the slopes of a pass from the peaks of models with LAYERS layers."""
    tokens = sorted(count for of, count in many if of == name)
    layers = LAYERS[1] - LAYERS[0]
    return {
        "pass": name,
        "tokens": tokens,
        "peak_bytes": {n: [one[name, count] for count in tokens] for n, one in zip(LAYERS, (few, many), strict=True)},
        "per_token_per_layer": slope(tokens, [(many[name, c] - few[name, c]) / layers for c in tokens]),
        "per_token": slope(tokens, [many[name, c] for c in tokens]),
    }


def dependence(rows: list[dict], implementation: str, name: str) -> dict[str, float]:
    """Return how the slope per token and layer (for log-probs: per token) depends on experts and top-k.

    The result is per expert and per chosen expert, in bytes and in hidden states of a token.
    """
    mine = [r for r in rows if (r["implementation"], r["pass"], r["recompute"]) == (implementation, name, "none")]
    key = "per_token_per_layer" if name == "train" else "per_token"
    base = SHAPES[0]
    by_experts = [(r["experts"], r[key]) for r in mine if r["topk"] == base[1]]
    by_topk = [(r["topk"], r[key]) for r in mine if r["experts"] == base[0]]
    per_expert, per_choice = (slope(*map(list, zip(*points, strict=True))) for points in (by_experts, by_topk))
    state = 4 * SIZES.hidden
    return {
        "per_expert": per_expert,
        "per_expert_in_hidden_states": per_expert / state,
        "per_choice": per_choice,
        "per_choice_in_hidden_states": per_choice / state,
    }


def slopes(folder: Callable[[int, int, int], Path], implementations: list[str]) -> list[dict]:
    rows = []
    for implementation in implementations:
        tokens = FEW_TOKENS if implementation == "batched_mm" else TOKENS
        for experts, topk in SHAPES:
            ours = implementation == "ours"
            for recompute in RECOMPUTE if ours and (experts, topk) == SHAPES[0] else RECOMPUTE[:1]:
                few, many = (measure(implementation, folder(experts, topk, n), tokens, recompute) for n in LAYERS)
                for name in [name for name in PASSES if (name, tokens[0]) in many]:
                    row = {"implementation": implementation, "experts": experts, "topk": topk, "recompute": recompute}
                    row |= row_of(few, many, name)
                    if ours and name == "train":
                        of = folder(experts, topk, LAYERS[1])
                        row["predicted"] = predicted(of, recompute, CPU)
                        row["ratio"] = row["per_token_per_layer"] / row["predicted"]
                        row["predicted_on_gpus_in_fp32"] = predicted(of, recompute, GPU)
                    rows.append(row)
                    print(json.dumps({k: v for k, v in row.items() if k != "peak_bytes"}), file=sys.stderr, flush=True)
    return rows


def largest(folder: Path, implementations: list[str]) -> dict[str, dict[str, dict[str, float]]]:
    """Return the allocator's peaks and resident peaks of the largest size by implementation and pass, and both slopes."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    libc = ctypes.CDLL(None)
    for implementation in implementations:
        tokens = FEW_TOKENS[1:] if implementation == "batched_mm" else LARGEST_TOKENS
        with runs_of(implementation, folder, tokens[-1], "none") as passes:
            # Log-probs first: a backward leaves freed memory behind, which a later pass would reuse.
            for name in PASSES[::-1] if implementation != "repeat" else PASSES[1:]:
                passes(name, tokens[0])()
                allocated = [peak_bytes(passes(name, count)) for count in tokens]
                resident = []
                for run in [passes(name, count) for count in tokens]:
                    gc.collect(), libc.malloc_trim(0)
                    resident.append(resident_bytes(run))
                found.setdefault(implementation, {})[name] = {
                    "tokens": tokens[-1],
                    "allocated": allocated[-1],
                    "resident": resident[-1],
                    "allocated_per_token": slope(tokens, allocated),
                    "resident_per_token": slope(tokens, resident),
                }
        gc.collect()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--implementations", nargs="+", default=["ours", *THEIRS], choices=["ours", *THEIRS])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    ctypes.CDLL(None).mallopt(-3, 1 << 16)  # M_MMAP_THRESHOLD: freed tensors go back to the system at once
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as scratch:

        def folder(experts: int, topk: int, layers: int) -> Path:
            path = Path(scratch) / f"{experts}-{topk}-{layers}"
            sizes = replace(SIZES, experts=experts, topk=topk, layers=layers)
            return path if path.exists() else make_tiny_model("gpt_oss", path, sizes=sizes, tokenizer="numbers")

        rows = slopes(folder, args.implementations)
        peaks = largest(folder(*LARGEST, LAYERS[1]), args.implementations)
    result = {
        "sizes": {k: v for k, v in asdict(SIZES).items() if k not in ("layers", "experts", "topk", "intermediate")},
        "sequence": LENGTH,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "rows": rows,
        "dependence": {
            one: {name: dependence(rows, one, name) for name in PASSES if (one, name) != ("repeat", "train")}
            for one in args.implementations
        },
        "largest": {"experts": LARGEST[0], "topk": LARGEST[1], "layers": LAYERS[1], "peaks": peaks},
    }
    text = json.dumps(result, indent=2)
    if args.json:
        args.json.write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
