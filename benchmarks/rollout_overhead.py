"""Seconds of rollouts of the same prompts in turns: whole vocabulary, pruned, and on a server with the trainer's operators.

`benchmarks/step.py --compare` starts this script if pruned or identical is one of the variants. It prints one JSON line. Every
response has its full length, so that all variants do the same work. The figures are computed as in `update_overhead.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

import numpy as np
from update_overhead import WARM_UP

from megatron_rl.algorithms.sampling_support import SamplingSupport
from megatron_rl.config import PruningConfig, ServerConfig
from megatron_rl.models.parallel_check import read_hf_config
from megatron_rl.servers.client import SGLangClient
from megatron_rl.servers.server import RolloutServer

FREE = SamplingSupport()
SUPPORTS = {"pruned": SamplingSupport(min_p=PruningConfig().rho), "identical": FREE}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    for name in ("prompts", "samples", "prompt-tokens", "new-tokens", "rounds"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--log", required=True, help="path of the servers' log")
    parser.add_argument("--variants", nargs="+", required=True, choices=SUPPORTS)
    args = parser.parse_args()

    sequence = args.prompt_tokens + args.new_tokens
    tokens = 2 * args.prompts * args.samples * sequence

    def make_server(*, identical: bool) -> RolloutServer:
        return RolloutServer(
            Path(args.model),
            ServerConfig(memory_fraction=0.3, max_total_tokens=tokens),
            dtype=args.precision,
            context_length=sequence + 16,
            processor="pruned" in args.variants,
            identical=identical,
            log_path=Path(f"{args.log}.identical" if identical else args.log),
        )

    vocab = read_hf_config(args.model).vocab_size
    prompts = np.random.default_rng(0).integers(4, vocab, (args.prompts, args.prompt_tokens)).tolist()

    async def seconds(server: RolloutServer, support: SamplingSupport) -> float:
        sampling = support.request() | {"max_new_tokens": args.new_tokens, "ignore_eos": True}
        async with SGLangClient([server.address], key=server.key, lost=lambda: not server.alive()) as client:
            start = time.perf_counter()
            every = [prompt for prompt in prompts for _ in range(args.samples)]
            await client.call(every, sampling, prefixes=prompts, options=support.options())
            return time.perf_counter() - start

    names = ["free", *args.variants]
    rounds = []
    with ExitStack() as stack:
        plain = stack.enter_context(make_server(identical=False))
        servers = dict.fromkeys(names, plain)
        if "identical" in servers:
            servers["identical"] = stack.enter_context(make_server(identical=True))
        for _ in range(WARM_UP + args.rounds):
            order = random.sample(names, len(names))
            rounds.append({name: asyncio.run(seconds(servers[name], SUPPORTS.get(name, FREE))) for name in order})
    rounds = rounds[WARM_UP:]
    result: dict[str, dict] = {"free": {"seconds": statistics.median(one["free"] for one in rounds)}}
    for name in args.variants:
        low, added, high = statistics.quantiles([one[name] - one["free"] for one in rounds], n=4)
        middle = statistics.median(one[name] for one in rounds)
        result[name] = {"seconds": middle, "added_s": added, "added_quartiles_s": [low, high]}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
