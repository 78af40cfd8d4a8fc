"""Seconds that the client needs to decode 1,000 responses with routes, in SGLang's format and in the plugin's format.

    python benchmarks/route_decoding.py --json docs/results/route-decoding.json

Each measurement decodes one reply as the client receives it: JSON, base64, checks, trajectory table. `before` is the decoding
of commit 0fa4b9e (rows of four-byte integers, which were sorted to find repeated experts). `int32` is today's decoding of a
server without the plugin, and `compact` of a server with the plugin. The results are medians of measurements in turns, with one
thread, because Python's global interpreter lock would allow little more.
"""

from __future__ import annotations

import argparse
import base64
import json
import platform
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from megatron_rl_plugin.routes import compact

from megatron_rl.data.engine_routes import EngineRoutes
from megatron_rl.servers.reply import parse_reply

WARM_UP = 2


def reply(tokens: int, prompt: int, routes: torch.Tensor) -> bytes:
    """Return SGLang's reply with one response."""
    meta = {
        "finish_reason": {"type": "length", "length": tokens},
        "weight_version": "1",
        "weight_versions": [{"version": "1", "start": 0, "end": tokens}],
        "output_token_logprobs": [[-0.5 - i / 7, i, None] for i in range(tokens)],
        "routed_experts": base64.b64encode(routes.numpy().tobytes()).decode(),
    }
    return json.dumps([{"output_ids": list(range(tokens)), "meta_info": meta}]).encode()


def decode_before(layout: EngineRoutes, encoded: str, tokens: int) -> np.ndarray:
    """Decode routes like the earlier EngineRoutes.decode."""
    raw = base64.b64decode(encoded, validate=True)
    table = np.frombuffer(raw, np.int32).reshape(tokens, layout.layers, layout.topk)[:, layout.moe_layers]
    assert not (table.min() < 0 or table.max() >= layout.experts)
    ordered = np.sort(table, -1)
    assert not (ordered[..., 1:] == ordered[..., :-1]).any()
    return table.astype(layout.shape.dtype)


def in_turns(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, dict]:
    """Return the seconds of each function. They take turns, because the speed of the machine changes over time."""
    taken: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(WARM_UP + rounds):
        for name, work in works.items():
            start = time.perf_counter()
            work()
            taken[name].append(time.perf_counter() - start)
    found = {name: statistics.quantiles(seconds[WARM_UP:], n=4) for name, seconds in taken.items()}
    return {
        name: {"median_s_per_1000": 1000 * middle, "quartiles_s_per_1000": [1000 * low, 1000 * high]}
        for name, (low, middle, high) in found.items()
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("tokens", 4096), ("layers", 48), ("experts", 128), ("topk", 8), ("rounds", 41)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    layout = EngineRoutes(args.layers, tuple(range(args.layers)), args.experts, args.topk)
    generator = np.random.default_rng(0)
    order = generator.random((args.tokens, args.layers, args.experts), np.float32).argsort(-1)[..., : args.topk]
    table = torch.from_numpy(order.astype(np.int32))  # one prompt token, and all response tokens except the last
    answers = {"int32": reply(args.tokens, 1, table), "compact": reply(args.tokens, 1, compact(table))}

    def whole(answer: bytes) -> object:
        return parse_reply(json.loads(answer)[0], 1, layout, False)

    def before(answer: bytes) -> object:
        part = json.loads(answer)[0]
        return parse_reply(part, 1, None, False), decode_before(
            layout, part["meta_info"]["routed_experts"], args.tokens
        )

    encoded = {name: json.loads(answer)[0]["meta_info"]["routed_experts"] for name, answer in answers.items()}
    result = {
        "settings": {name: value for name, value in vars(args).items() if name != "json"},
        "machine": {"processor": platform.processor() or platform.machine(), "numpy": np.__version__},
        "megabytes_per_reply": {name: len(answer) / 1e6 for name, answer in answers.items()},
        "routes_alone": in_turns(
            {"before": lambda: decode_before(layout, encoded["int32"], args.tokens)}
            | {name: partial(layout.decode, text, args.tokens) for name, text in encoded.items()},
            args.rounds,
        ),
        "whole_reply": in_turns(
            {"before": lambda: before(answers["int32"])}
            | {name: partial(whole, answer) for name, answer in answers.items()},
            args.rounds,
        ),
    }
    text = json.dumps(result, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
