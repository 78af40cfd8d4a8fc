"""Is there a noise floor in real engines? A trainer in fp32 against SGLang in fp32, bf16 and FP8, over all tokens.

SGLang samples responses. Then SGLang and the model in fp32 (transformers, at most 5e-7 from the trainer) compute
log-probs of tokens that are drawn evenly from the vocabulary, at every position. By the probability of a token, the
script reports how far the two differ, in which direction, and the largest ratio. A floor would show as a bias that
grows as tokens get less likely (figure 2 of "Taming the Tail", Li et al.). Proposition 4.2 there bounds the
difference of a token by twice the error of the logits, however unlikely the token is.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import requests
import torch
from ablations import CLI, REPOSITORY, call, flags
from curves import write_probability
from digit_sums import write
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_rl.config import ServerConfig
from megatron_rl.models.fp8 import quantized
from megatron_rl.servers.server import RolloutServer

ENGINES = {
    "fp32": (None, "fp32"),
    "weights in bf16": ("bf16", "fp32"),
    "bf16": (None, "bf16"),
    "fp8": ("fp8", "bf16"),
}
"""Name -> format to which the weights are rounded first, and format of the server's computation."""
TOKENS = 512
"""Number of tokens that are drawn from the vocabulary, the same at every position."""
RESPONSES = 48
LONGEST = 48
BELOW = (1e-15, 1e-12, 1e-9, 1e-6, 1e-3, 1.0)
"""Upper ends of the classes of a token's probability."""


def rounded(source: Path, to: str) -> Path:
    """Return a copy of the folder with weights rounded to bf16; if `to` is fp8, matrices are first rounded to FP8 in blocks.

    A push to such a server does the same on a machine without a GPU.
    """
    out = source.with_name(f"{source.name}_{to}")
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(source, out, ignore=shutil.ignore_patterns("*.safetensors"))
    for path in source.glob("*.safetensors"):
        weights = load_file(path)
        if to == "fp8":
            weights = dict(quantized(weights.items(), simulate=True))
        halved = {name: weight.bfloat16() for name, weight in weights.items()}
        save_file(halved, out / path.name, metadata={"format": "pt"})
    return out


def ask(server: RolloutServer, body: dict) -> dict:
    """Send one request. Errors: requests.HTTPError."""
    answer = requests.post(f"{server.address}/generate", headers=server.headers, json=body, timeout=300)
    answer.raise_for_status()
    return answer.json()


def serve(folder: Path, dtype: str) -> RolloutServer:
    config = ServerConfig(max_total_tokens=16384)
    options = {"log_path": folder.parent / f"{dtype}.log", "context_length": 512}
    return RolloutServer(folder, config, dtype=dtype, **options)


def sampled(server: RolloutServer, prompts: Sequence[list[int]]) -> list[tuple[list[int], int]]:
    """Return (tokens, length of the prompt) of one response to each prompt, at temperature 1."""
    sampling = {"temperature": 1.0, "max_new_tokens": LONGEST, "min_p": 0.0, "top_k": -1, "top_p": 1.0}
    found = [ask(server, {"input_ids": prompt, "sampling_params": sampling}) for prompt in prompts]
    return [(prompt + answer["output_ids"], len(prompt)) for prompt, answer in zip(prompts, found, strict=True)]


def engine_log_probs(server: RolloutServer, tokens: list[int], start: int, ids: list[int]) -> np.ndarray:
    """Return [positions, TOKENS + 1]: SGLang's log-probs of the ids, and of the actual token, at every position of
    the response.
    """
    body = {
        "input_ids": tokens,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": 0,
        "token_ids_logprob": ids,
    }
    told = ask(server, body)["meta_info"]
    of_ids = [[entry[0] for entry in place] for place in told["input_token_ids_logprobs"][start:]]
    there = [entry[0] for entry in told["input_token_logprobs"][start:]]
    return np.concatenate([np.array(of_ids), np.array(there)[:, None]], 1)


@torch.no_grad()
def exact_log_probs(model: torch.nn.Module, tokens: list[int], start: int, ids: list[int]) -> np.ndarray:
    """Return the same log-probs from the model in fp32."""
    logits = model(torch.tensor([tokens])).logits[0, start - 1 : -1].double().log_softmax(-1)
    there = logits.gather(1, torch.tensor(tokens[start:])[:, None])
    return torch.cat([logits[:, ids], there], 1).numpy()


def by_class(engine: np.ndarray, exact: np.ndarray) -> dict[str, dict[str, float]]:
    """Return statistics of SGLang's log-prob - exact log-prob by exact probability, for the drawn and for the actual tokens."""
    classes = {}
    d, p = (engine - exact)[:, :-1].ravel(), np.exp(exact[:, :-1]).ravel()
    for low, high in zip((0.0, *BELOW), BELOW, strict=False):
        of = d[(p >= low) & (p < high)]
        if len(of):
            classes[f"p<{high:g}"] = statistics_of(of)
    return classes | {"sampled": statistics_of((engine - exact)[:, -1])}


def statistics_of(d: np.ndarray) -> dict[str, float]:
    """Return statistics of d, differences of log-probs in nats."""
    size = np.abs(d)
    names = {"bias": d.mean(), "abs": size.mean(), "abs_median": np.median(size)}
    names |= {"abs_p99": np.quantile(size, 0.99), "abs_max": size.max(), "tokens": len(d)}
    return {name: float(value) for name, value in names.items()}


def models(runs: Path, trained: Path | None = None) -> dict[str, tuple[Path, list[list[int]]]]:
    """Return name -> folder and prompts: SmolLM2, and the quickstart's model with Qwen3's vocabulary size after some SFT.

    trained: a folder of SmolLM2 after RL, which comes last.
    """
    python = CLI[0]
    smollm2 = runs / "smollm2"
    if not smollm2.is_dir():
        call([python, "tools/upcycle.py", str(smollm2)], runs / "smollm2.log")
    write(runs)
    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    rows = [json.loads(line) for line in (runs / "train.jsonl").read_text().splitlines()]
    chats = [[{"role": "user", "content": row["prompt"]}] for row in rows]
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True)["input_ids"] for chat in chats]
    large = runs / "sft" / "hf"
    if not large.is_dir():
        call(
            [python, "tools/make_tiny_model.py", "--preset", "quickstart", "--vocab", "151936", str(runs / "model")],
            runs / "model.log",
        )
        settings = {"name": "sft", "runs_dir": runs, "model.path": runs / "model", "steps": 80}
        call([*CLI, "sft", "configs/quickstart_sft.yaml", *flags(settings)], runs / "sft.log")
    numbers = AutoTokenizer.from_pretrained(large)
    rng = np.random.default_rng(0)
    lists = [f"<{' '.join(map(str, rng.integers(0, 20, 6)))}:" for _ in range(RESPONSES)]
    sums = [prompts[i % len(prompts)] for i in range(RESPONSES)]
    return {
        "SmolLM2-135M, 49,152 tokens": (smollm2, sums),
        "quickstart's, 151,936 tokens": (large, [numbers.encode(text) for text in lists]),
    } | ({"SmolLM2-135M after RL": (trained, sums)} if trained else {})


def main() -> None:
    parser = argparse.ArgumentParser(prog="tail_mismatch.sh", description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=Path, default=Path("runs/tail_mismatch"), help="folder of the models")
    parser.add_argument("--out", type=Path, default=Path("docs/results"), help="folder of the results")
    parser.add_argument("--trained", type=Path, help="Hugging Face folder of SmolLM2 after RL, measured too")
    args = parser.parse_args()
    if args.trained and not (args.trained / "config.json").is_file():
        parser.error(
            f"--trained {args.trained} is not a Hugging Face folder; create one from a checkpoint with megatron-rl"
            " convert"
        )
    os.environ.setdefault("OMP_NUM_THREADS", str(os.cpu_count() or 1))  # settings of the servers
    runs = (REPOSITORY / args.runs).resolve()
    runs.mkdir(parents=True, exist_ok=True)
    results: dict[str, dict] = {}
    for name, (folder, prompts) in models(runs, args.trained and args.trained.resolve()).items():
        exact = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        ids = np.random.default_rng(0).choice(exact.config.vocab_size, TOKENS, replace=False).tolist()
        responses: list[tuple[list[int], int]] = []
        for engine, (weights, dtype) in ENGINES.items():
            with serve(rounded(folder, weights) if weights else folder, dtype) as server:
                responses = responses or sampled(server, prompts)
                pairs = [
                    (engine_log_probs(server, tokens, start, ids), exact_log_probs(exact, tokens, start, ids))
                    for tokens, start in responses
                ]
            results.setdefault(name, {})[engine] = by_class(
                *(np.concatenate(side) for side in zip(*pairs, strict=True))
            )
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "tail-mismatch.json").write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    (args.out / "tail-mismatch.md").write_text(table(results) + "\n")
    title = "Difference of log-probs by probability"
    write_probability(panels(results), args.out / "tail-mismatch.svg", title=title)


def panels(results: Mapping[str, Mapping[str, Mapping]]) -> dict[str, dict[float, Mapping]]:
    """Return model and server -> upper end of a class -> statistics, without the sampled tokens."""
    return {
        f"{model}, {engine}": {float(name.removeprefix("p<")): of for name, of in classes.items() if name != "sampled"}
        for model, engines in results.items()
        for engine, classes in engines.items()
    }


def table(results: dict[str, dict]) -> str:
    """Return a table with a row per model, server and class of probability."""
    lines = [
        "| model | engine | tokens | number | mean of engine - trainer | median of the size | 99 % | largest ratio |",
        "|---" * 8 + "|",
    ]
    for model, engines in results.items():
        for engine, classes in engines.items():
            for name, s in classes.items():
                cells = (
                    model,
                    engine,
                    name,
                    f"{s['tokens']:,.0f}",
                    f"{s['bias']:+.2g}",
                    f"{s['abs_median']:.2g}",
                    f"{s['abs_p99']:.2g}",
                    f"{math.exp(s['abs_max']):.3g}",
                )
                lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
