"""Speed of the operators of megatron_rl/ops, compared with eager torch, torch.compile and a floor; forward and backward.

    python benchmarks/kernels.py --json docs/results/kernels-cpu.json

All implementations of a case take turns in one process, and each figure is the median over the rounds. The floor is the time
of the unavoidable work. For the masked log-softmax it is one read of the logits (forward) and one copy into existing memory
(backward). For attention it is a copy of inputs and outputs; on a GPU the same flash attention without sinks is a better
reference. For the head it is the three matrix products. If there is a GPU, the script uses it and stores its name.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from megatron_rl.ops import linear_log_probs, masked_log_softmax, sink_attention

Run = Callable[[], tuple[float, float]]
"""Function that runs one forward and backward and returns the seconds of each."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def clock(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def timed(forward: Callable[[], torch.Tensor], leaves: list[torch.Tensor], direction: torch.Tensor) -> Run:
    """Return a timed run: forward() returns a tensor, from which `direction` is propagated back to `leaves`."""

    def run() -> tuple[float, float]:
        start = clock(direction.device)
        out = forward()
        middle = clock(direction.device)
        torch.autograd.grad(out, leaves, direction)
        return middle - start, clock(direction.device) - middle

    return run


def take_turns(contenders: dict[str, Run], rounds: int) -> dict[str, dict[str, float]]:
    """Return medians in ms; the first round is not counted."""
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(rounds + 1):
        for name, run in contenders.items():
            times[name].append(run())
    result = {}
    for name, pairs in times.items():
        forward, backward = (1e3 * statistics.median(part) for part in zip(*pairs[1:], strict=True))
        total = 1e3 * statistics.median(sum(pair) for pair in pairs[1:])
        result[name] = {"forward_ms": round(forward, 3), "backward_ms": round(backward, 3), "total_ms": round(total, 3)}
    return result


def ratios(times: dict[str, dict[str, float]]) -> dict[str, float]:
    ours = times["ours"]["total_ms"]
    return {
        f"{name} / ours" if name != "floor" else "ours / floor": round(
            t["total_ms"] / ours if name != "floor" else ours / t["total_ms"], 2
        )
        for name, t in times.items()
        if name != "ours"
    }


def eager_log_probs(logits: torch.Tensor, targets: torch.Tensor, log_rho: float) -> torch.Tensor:
    """Compute log-probs in the obvious way, without coverage."""
    z = logits.float()
    outside = z < z.max(-1, keepdim=True).values + log_rho
    return z.masked_fill(outside, -torch.inf).log_softmax(-1).gather(1, targets[:, None])[:, 0]


def masked_log_softmax_case(tokens: int, vocabulary: int, dtype: str, device: torch.device, rounds: int) -> dict:
    """Measure logits with standard deviation 2, and targets among the eight largest of a row."""
    source = (2 * torch.randn(tokens, vocabulary, device=device)).to(DTYPES[dtype])
    targets = source.topk(8, dim=1).indices.gather(1, torch.randint(0, 8, (tokens, 1), device=device))[:, 0]
    direction = torch.randn(tokens, device=device)
    workspace, leaf = torch.empty_like(source), source.detach().requires_grad_()
    compiled = torch.compile(eager_log_probs)

    def ours(inplace: bool) -> Run:
        def run() -> tuple[float, float]:
            logits = leaf * 1  # not timed; a result of an operation, so that the backward may overwrite it
            forward = lambda: masked_log_softmax(logits, targets, log_rho=-13.0, inplace_backward=inplace).log_probs  # noqa: E731
            return timed(forward, [logits], direction)()

        return run

    def torchs(function: Callable) -> Run:
        return timed(lambda: function(leaf, targets, -13.0), [leaf], direction)

    def floor() -> tuple[float, float]:
        start = clock(device)
        source.view(torch.int32).amax()
        middle = clock(device)
        workspace.copy_(source)
        return middle - start, clock(device) - middle

    contenders = {
        "ours": ours(inplace=True),
        "ours, fresh gradient": ours(inplace=False),
        "eager": torchs(eager_log_probs),
        "compile": torchs(compiled),
        "floor": floor,
    }
    times = take_turns(contenders, rounds)
    extra = extra_memory(workspace, ours(inplace=True))
    return {"times": times, "ratios": ratios(times), "peak memory beyond the logits": extra}


def extra_memory(logits: torch.Tensor, run: Run) -> float:
    """Return the peak of one forward and backward without the logits, as a share of the bytes of the logits."""
    size = logits.numel() * logits.element_size()
    if logits.is_cuda:
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        run()
        return round((torch.cuda.max_memory_allocated() - before) / size - 1, 4)

    def status(key: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current value
    before = status("VmRSS")
    run()
    return round((status("VmHWM") - before) / size - 1, 4)


def eager_attention(q, k, v, sinks, window: int | None, scale: float) -> torch.Tensor:
    """Compute attention of one sequence like transformers for gpt-oss: all scores, and the sink as one more column."""
    length, groups = q.shape[0], q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(groups, dim=1).transpose(0, 1) for x in (k, v))
    i, j = torch.arange(length, device=q.device)[:, None], torch.arange(length, device=q.device)[None]
    hidden = (j > i) if window is None else (j > i) | (j <= i - window)
    scores = (q.transpose(0, 1) @ keys.transpose(1, 2) * scale).masked_fill(hidden, -torch.inf)
    column = sinks.to(scores.dtype)[:, None, None].expand(-1, length, 1)
    weights = torch.cat([scores, column], dim=-1).softmax(-1)[..., :-1]
    return (weights @ values).transpose(0, 1)


def torch_attention(q, k, v, window: int | None, scale: float) -> torch.Tensor:
    """Compute attention with torch's own kernel, which has no sinks."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)[0].transpose(0, 1)


def sink_attention_case(
    length: int,
    heads: int,
    kv_heads: int,
    width: int,
    window: int | None,
    dtype: str,
    device: torch.device,
    rounds: int,
) -> dict:
    q = torch.randn(length, heads, width, device=device).to(DTYPES[dtype]).requires_grad_()
    k, v = (torch.randn(length, kv_heads, width, device=device).to(DTYPES[dtype]).requires_grad_() for _ in range(2))
    sinks = torch.randn(heads, device=device).requires_grad_()
    direction = torch.randn_like(q)
    cu_seqlens, scale = torch.tensor([0, length]), width**-0.5
    compiled = torch.compile(eager_attention)

    def ours(sinks: torch.Tensor | None) -> Run:
        leaves = [q, k, v] + ([] if sinks is None else [sinks])
        return timed(lambda: sink_attention(q, k, v, sinks, cu_seqlens=cu_seqlens, window=window), leaves, direction)

    read, written = torch.empty_like(q), torch.empty_like(k)

    def floor() -> tuple[float, float]:
        start = clock(device)
        read.copy_(q), written.copy_(k), written.copy_(v)
        middle = clock(device)
        read.copy_(q), read.copy_(direction), written.copy_(k), written.copy_(v)
        return middle - start, clock(device) - middle

    contenders = {"ours": ours(sinks), "ours, no sinks": ours(None), "floor": floor}
    if length <= 4096:  # these implementations hold the scores of all pairs
        contenders["eager"] = timed(lambda: eager_attention(q, k, v, sinks, window, scale), [q, k, v, sinks], direction)
        contenders["compile"] = timed(lambda: compiled(q, k, v, sinks, window, scale), [q, k, v, sinks], direction)
    if window is None:
        contenders["torch's, no sinks"] = timed(lambda: torch_attention(q, k, v, None, scale), [q, k, v], direction)
    times = take_turns(contenders, rounds)
    pairs = (
        length * (length + 1) // 2
        - (max(0, length - (window or length)) * max(0, length - (window or length) + 1)) // 2
    )
    flops = 7 * 2 * pairs * width * heads  # two products forward, five backward
    return {"times": times, "ratios": ratios(times), "ours GFLOP/s": round(flops / times["ours"]["total_ms"] / 1e6, 1)}


def linear_log_probs_case(
    tokens: int, width: int, vocabulary: int, dtype: str, device: torch.device, rounds: int
) -> dict:
    """Measure the head in chunks: gradients in the forward ("ours"), logits computed twice, and eager torch without chunks."""
    hidden = torch.randn(tokens, width, device=device).to(DTYPES[dtype]).requires_grad_()
    weight = (torch.randn(vocabulary, width, device=device) / width**0.5).to(DTYPES[dtype]).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), device=device)
    advantages = torch.randn(tokens, device=device)
    leaves, direction = [hidden, weight], torch.ones((), device=device)

    def loss(log_probs: torch.Tensor, entropy: torch.Tensor | None, rows: torch.Tensor) -> torch.Tensor:
        return -(log_probs * advantages[rows]).sum() / tokens

    def chunked(token_loss: Callable | None) -> Run:
        def forward() -> torch.Tensor:
            out = linear_log_probs(
                hidden, weight, targets, log_rho=None, chunk_tokens=max(1, tokens // 2), token_loss=token_loss
            )
            return loss(out.log_probs, None, torch.arange(tokens, device=device))

        return timed(forward, leaves, direction)

    def eager() -> torch.Tensor:
        log_probs = (hidden @ weight.t()).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
        return loss(log_probs, None, torch.arange(tokens, device=device))

    compiled = torch.compile(eager)
    with torch.no_grad():
        grad_logits = torch.randn(tokens, vocabulary, device=device).to(hidden.dtype)

    @torch.no_grad()
    def floor() -> tuple[float, float]:
        start = clock(device)
        torch.mm(hidden, weight.t())
        middle = clock(device)
        torch.mm(grad_logits, weight), torch.mm(grad_logits.t(), hidden)
        return middle - start, clock(device) - middle

    contenders = {
        "ours": chunked(loss),
        "ours, logits twice": chunked(None),
        "eager": timed(eager, leaves, direction),
        "compile": timed(compiled, leaves, direction),
        "floor": floor,
    }
    times = take_turns(contenders, min(rounds, 5))
    return {"times": times, "ratios": ratios(times)}


def cases(device: torch.device, rounds: int) -> dict[str, Callable[[], dict]]:
    options = {"device": device, "rounds": rounds}
    if device.type == "cuda":
        tokens, vocabulary, length, heads, kv_heads, dtypes = 8192, 201088, 8192, 64, 8, ["bf16"]
        head = (8192, 2880, 201088)
    else:
        tokens, vocabulary, length, heads, kv_heads, dtypes = 512, 151936, 2048, 8, 8, ["fp32", "bf16"]
        head = (2048, 576, 49152)
    found: dict[str, Callable[[], dict]] = {}
    for dtype in dtypes:
        name = f"masked_log_softmax [{tokens}, {vocabulary}] {dtype}"
        found[name] = lambda dtype=dtype: masked_log_softmax_case(tokens, vocabulary, dtype, **options)
        for window in (None, 128):
            name = f"sink_attention S={length} H={heads}/{kv_heads} D=64 {f'window {window}' if window else 'causal'} {dtype}"
            found[name] = lambda window=window, dtype=dtype: sink_attention_case(
                length, heads, kv_heads, 64, window, dtype, **options
            )
        name = f"linear_log_probs T={head[0]} H={head[1]} V={head[2]} {dtype}"
        found[name] = lambda dtype=dtype: linear_log_probs_case(*head, dtype, **options)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", help="output file")
    parser.add_argument("--rounds", type=int, default=15, help="number of counted rounds (default 15)")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (default: torch's)")
    parser.add_argument("--only", default="", help="run only cases whose name contains this text")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    name = torch.cuda.get_device_name() if device.type == "cuda" else None
    model = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), "")
    result = {
        "machine": {
            "device": name or model.partition(":")[2].strip(),
            "isa": torch.backends.cpu.get_cpu_capability(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
        },
        "date": time.strftime("%Y-%m-%d"),
        "rounds": args.rounds,
        "cases": {},
    }
    for name, case in cases(device, args.rounds).items():
        if args.only in name:
            result["cases"][name] = case()
            print(name, json.dumps(result["cases"][name]["ratios"]), flush=True)
            if args.json:
                Path(args.json).write_text(json.dumps(result, indent=2) + "\n")
    if not result["cases"]:
        parser.error(f"--only {args.only}: no name of a case contains it; the cases are {', '.join(cases(device, 1))}")


if __name__ == "__main__":
    main()
