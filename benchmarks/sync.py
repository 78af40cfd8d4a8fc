"""Seconds of one weight push per transport, including checksums, compared with a copy of the same bytes.

    python benchmarks/sync.py MODEL                  # MODEL: Hugging Face folder; starts an SGLang server for it
    python benchmarks/sync.py MODEL --address URL    # a running server with the checksum plugin
    python benchmarks/sync.py MODEL --json           # one JSON object

If other programs run on the machine, use the smallest time of the repetitions, and the processor seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch
from megatron_rl_plugin.fingerprint import fingerprint
from safetensors.torch import load_file

from megatron_rl.config import ServerConfig, SyncConfig
from megatron_rl.servers.server import RolloutServer
from megatron_rl.sync.transports import TRANSPORTS
from megatron_rl.sync.weight_sync import WeightSync


def seconds(work: Callable[[], object], repeat: int) -> dict[str, float]:
    """Return wall-clock seconds (minimum, median) and processor seconds of this process (mean), after one warm-up run."""
    work()
    wall, cpu = [], time.process_time()
    for _ in range(repeat):
        start = time.perf_counter()
        work()
        wall.append(time.perf_counter() - start)
    cpu = (time.process_time() - cpu) / repeat
    return {"min_s": min(wall), "median_s": statistics.median(wall), "trainer_cpu_s": cpu}


def measure(model: Path, address: str, dtype: str, transports: list[str], bucket_mb: float, repeat: int) -> dict:
    served = {"bf16": torch.bfloat16, "fp32": torch.float32}[dtype]
    weights = {k: v.to(served) for file in sorted(model.glob("*.safetensors")) for k, v in load_file(file).items()}
    copies = [torch.empty_like(tensor) for tensor in weights.values()]

    result = {
        "model": str(model),
        "tensors": len(weights),
        "bytes": sum(tensor.nbytes for tensor in weights.values()),
        "memcpy": seconds(lambda: [a.copy_(b) for a, b in zip(copies, weights.values(), strict=True)], repeat),
        "checksum": seconds(lambda: [fingerprint(tensor) for tensor in weights.values()], repeat),
    }
    for transport in transports:
        config = SyncConfig(transport=transport, bucket_mb=bucket_mb)
        with (
            tempfile.TemporaryDirectory() as folder,
            WeightSync(config, [address], rollout_dtype=dtype, folder=folder) as sync,
        ):
            push = seconds(lambda: sync.push(iter(weights.items()), "benchmark"), repeat)
            stats = sync.push(iter(weights.items()), "benchmark")
        result[transport] = push | {"buckets": stats.buckets, "times_memcpy": push["min_s"] / result["memcpy"]["min_s"]}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--address", help="address of a running server (default: start a server)")
    parser.add_argument("--dtype", choices=["bf16", "fp32"], default="fp32")
    parser.add_argument("--transports", nargs="+", choices=TRANSPORTS, default=list(TRANSPORTS))
    parser.add_argument("--bucket-mb", type=float, default=SyncConfig().bucket_mb)
    parser.add_argument("--repeat", type=int, default=10)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    with ExitStack() as stack:
        address = options.address
        if address is None:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            server = RolloutServer(
                options.model,
                ServerConfig(threads=1, max_total_tokens=2048, memory_fraction=0.3),
                dtype=options.dtype,
                context_length=256,
                log_path=Path(folder) / "sglang.log",
            )
            address = stack.enter_context(server).address
        result = measure(options.model, address, options.dtype, options.transports, options.bucket_mb, options.repeat)
    if options.json:
        print(json.dumps(result))
        return
    print(f"{result['model']}: {result['tensors']} tensors, {result['bytes'] / 1e6:.1f} MB")
    for name in ("memcpy", "checksum", *options.transports):
        row = result[name]
        rate = result["bytes"] / row["min_s"] / 1e9
        times = f"min {row['min_s'] * 1e3:8.1f} ms   median {row['median_s'] * 1e3:8.1f} ms"
        print(f"{name:12s} {times}   {rate:6.2f} GB/s")


if __name__ == "__main__":
    main()
