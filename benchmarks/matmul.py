"""fp32 matrix products on the CPU: oneDNN, called as in sglang_plugin/sglang_on_cpu/matmul.py, compared with torch's choice.

    python benchmarks/matmul.py --json docs/results/matmul.json

The shapes come from the upcycled SmolLM2 MoE: weights [out, in], and the rows of a decode and of a micro-batch. Each product
runs over many weights, so that no weight is in a cache, and the two kernels take turns. The results are medians in GFLOP/s,
and their ratio.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path

import torch
from sglang_on_cpu import matmul

WEIGHTS = {"experts, up and gate": (3072, 576), "experts, down": (576, 1536), "attention, qkv": (960, 576)}
ROWS = (4, 16, 32, 128, 1024)
CACHE_BYTES = 1 << 28
"""Total size of all copies of a weight."""


def torchs_own(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return a @ b by the kernel of mm.out, which is never replaced."""
    return torch.mm(a, b, out=a.new_empty(0))


def measure(rows: int, shape: tuple[int, int], repeats: int) -> dict:
    """Measure GFLOP/s: forward and input gradient by both kernels, weight gradient by torch's kernel, which is always used."""
    outputs, inputs = shape
    count = max(2, CACHE_BYTES // (4 * outputs * inputs))
    weights = [torch.randn(shape) for _ in range(count)]
    x, grad = torch.randn(rows, inputs), torch.randn(rows, outputs)
    products = {
        "forward": [lambda w, mm=mm: mm(x, w.t()) for mm in (matmul.mm, torchs_own)],
        "input_gradient": [lambda w, mm=mm: mm(grad, w) for mm in (matmul.mm, torchs_own)],
        "weight_gradient": [lambda w: torchs_own(grad.t(), x)],
    }
    result: dict = {"rows": rows, "weight": list(shape)}
    for name, functions in products.items():
        seconds: list[list[float]] = [[] for _ in functions]
        for repeat in range(repeats + 1):
            for taken, function in zip(seconds, functions, strict=True):
                start = time.perf_counter()
                for weight in weights:
                    function(weight)
                if repeat:  # the first one warms up
                    taken.append(time.perf_counter() - start)
        speeds = [2e-9 * rows * outputs * inputs * count / statistics.median(taken) for taken in seconds]
        result[name] = {"gflops": round(speeds[0], 1)} if len(speeds) == 1 else {
            "onednn_gflops": round(speeds[0], 1), "torch_gflops": round(speeds[1], 1), "ratio": round(speeds[0] / speeds[1], 2)
        }  # fmt: skip
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--json", help="output file (default: standard output)")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    result = {
        "machine": {"processor": model.partition(":")[2].strip(), "threads": args.threads, "torch": torch.__version__},
        "date": time.strftime("%Y-%m-%d"),
        "products": {
            name: [measure(rows, shape, args.repeats if rows < 512 else 2) for rows in ROWS]
            for name, shape in WEIGHTS.items()
        },
    }
    text = json.dumps(result, indent=2)
    if args.json:
        Path(args.json).write_text(text + "\n")
    print(text)


if __name__ == "__main__":
    main()
