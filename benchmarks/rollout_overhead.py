"""Rollouts of the same prompts from one SGLang server, over the whole vocabulary and pruned, in turns. One JSON line.

Started by `benchmarks/step.py --compare` where pruned is one of the variants. Every response has its full length, so that both
have as much to do; the figures are those of `update_overhead.py`.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import time

import numpy as np
from update_overhead import WARM_UP

from megatron_rl.config import PruningConfig, ServerConfig
from megatron_rl.models.parallel_check import read_hf_config
from megatron_rl.rollout.client import SGLangClient
from megatron_rl.rollout.sampling import SamplingSupport
from megatron_rl.rollout.server import RolloutServer
from megatron_rl.sync.weight_sync import SERVER_PYTHONPATH

SUPPORTS = {"free": SamplingSupport(), "pruned": SamplingSupport(min_p=PruningConfig().rho)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    for name in ("prompts", "samples", "prompt-tokens", "new-tokens", "rounds"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--precision", required=True)
    parser.add_argument("--log", required=True, help="the server's")
    args = parser.parse_args()

    sequence = args.prompt_tokens + args.new_tokens
    tokens = 2 * args.prompts * args.samples * sequence
    server = RolloutServer(
        args.model,
        ServerConfig(memory_fraction=0.3, max_total_tokens=tokens),
        dtype=args.precision,
        context_length=sequence + 16,
        pruning=True,
        pythonpath=[SERVER_PYTHONPATH],
        log_path=args.log,
    )
    vocab = read_hf_config(args.model).vocab_size
    prompts = np.random.default_rng(0).integers(4, vocab, (args.prompts, args.prompt_tokens)).tolist()

    async def seconds(support: SamplingSupport) -> float:
        sampling = support.request() | {"max_new_tokens": args.new_tokens, "ignore_eos": True}
        async with SGLangClient([server.address], lost=lambda: not server.alive()) as client:
            start = time.perf_counter()
            every = [prompt for prompt in prompts for _ in range(args.samples)]
            await client.call(every, sampling, prefixes=prompts, options=support.options())
            return time.perf_counter() - start

    rounds = []
    with server:
        for _ in range(WARM_UP + args.rounds):
            order = random.sample(list(SUPPORTS), len(SUPPORTS))
            rounds.append({name: asyncio.run(seconds(SUPPORTS[name])) for name in order})
    rounds = rounds[WARM_UP:]
    low, added, high = statistics.quantiles([one["pruned"] - one["free"] for one in rounds], n=4)
    result = {name: statistics.median(one[name] for one in rounds) for name in SUPPORTS}
    print(json.dumps(result | {"added_s": added, "added_quartiles_s": [low, high]}))


if __name__ == "__main__":
    main()
