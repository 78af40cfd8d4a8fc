"""Time and memory of the distillation divergence: computed in chunks, and with all logits at once; forward and backward.

    python benchmarks/linear_kl.py --rounds 3 --threads 1 --json docs/results/linear-kl.json

All implementations take turns in one process, and each time is the median over the rounds. "modelopt" is ModelOpt's
LogitsDistillationLoss on the fp32 logits of both heads. "eager" is the definition in torch, "compile" the same compiled.
"ours, one chunk" keeps its logits for the backward, "ours" computes them again, and "ours, top 64" uses recorded log-probs of
the teacher instead of the teacher's head. The floor is the time of the four unavoidable matrix products: both heads in the
forward, and the student's gradients in the backward. Peak memory is the largest amount that torch holds beyond the arguments
(`peak_memory.py`), including gradients; its floor is the gradients alone.

Without a GPU the heads are those from SmolLM2-135M and its teacher of 360M parameters; with a GPU, Qwen3-1.7B and 8B.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path

import torch
from kernels import DTYPES, clock, ratios, take_turns, timed
from peak_memory import peak_bytes

from megatron_rl.ops import linear_kl, linear_topk_kl
from megatron_rl.ops.distillation_kl import Direction, kl_reference

from modelopt.torch.distill.losses import LogitsDistillationLoss  # isort: skip (imports Megatron, so after megatron_rl)


def case(
    tokens: int,
    width: int,
    teacher_width: int,
    vocabulary: int,
    dtype: str,
    direction: Direction,
    device: torch.device,
    rounds: int,
) -> dict:
    """Measure logits with standard deviation 2 at temperature 1; a chunk is a quarter of the tokens."""

    def head(width: int) -> list[torch.Tensor]:
        hidden = torch.randn(tokens, width, device=device)
        return [x.to(DTYPES[dtype]) for x in (hidden, 2 * torch.randn(vocabulary, width, device=device) / width**0.5)]

    student, teacher = [x.requires_grad_() for x in head(width)], head(teacher_width)
    sent = torch.randn(tokens, device=device)
    top = (teacher[0] @ teacher[1].t()).float().log_softmax(1).topk(64, dim=1)
    chunk_tokens = tokens // 4

    def whole(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[[], torch.Tensor]:
        def forward() -> torch.Tensor:
            with torch.no_grad():
                teacher_logits = (teacher[0] @ teacher[1].t()).float()
            return loss((student[0] @ student[1].t()).float(), teacher_logits)

        return forward

    eager = whole(lambda z, t: kl_reference(z, t, direction=direction))
    forwards = {
        "ours": lambda: linear_kl(*student, *teacher, direction=direction, chunk_tokens=chunk_tokens),
        "ours, one chunk": lambda: linear_kl(*student, *teacher, direction=direction, chunk_tokens=tokens),
        "eager": eager,
        "compile": torch.compile(eager),
    }
    if direction == "forward":
        forwards["modelopt"] = whole(LogitsDistillationLoss(1.0, reduction="none"))
    if direction != "jensen_shannon":
        options = {"direction": direction, "chunk_tokens": chunk_tokens}
        forwards["ours, top 64"] = lambda: linear_topk_kl(*student, top.indices, top.values, **options)

    @torch.no_grad()
    def floor() -> tuple[float, float]:
        start = clock(device)
        grad_logits = teacher[0] @ teacher[1].t()
        torch.mm(student[0], student[1].t(), out=grad_logits)
        middle = clock(device)
        torch.mm(grad_logits, student[1]), torch.mm(grad_logits.t(), student[0])
        return middle - start, clock(device) - middle

    contenders = {name: timed(forward, student, sent) for name, forward in forwards.items()}
    times = take_turns(contenders | {"floor": floor}, rounds)
    peaks = {name: peak_bytes(run) for name, run in contenders.items()}
    peaks["floor"] = sum(x.numel() * x.element_size() for x in student)
    product = 2 * tokens * vocabulary
    return {
        "times": times,
        "ratios": ratios(times),
        "GFLOP of the floor": round(product * (3 * width + teacher_width) / 1e9, 1),
        "GFLOP of ours": round(product * (4 * width + 2 * teacher_width) / 1e9, 1),
        "peak MB": {name: round(peak / 1e6, 1) for name, peak in peaks.items()},
        "peak / ours": {name: round(peak / peaks["ours"], 2) for name, peak in peaks.items() if name != "ours"},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", help="output file")
    parser.add_argument("--rounds", type=int, default=5, help="number of counted rounds (default 5)")
    parser.add_argument("--threads", type=int, default=None, help="CPU threads (default: torch's)")
    parser.add_argument("--tokens", type=int, default=None, help="number of tokens (default 512; on a GPU 4,096)")
    parser.add_argument("--only", default="", help="run only cases whose name contains this text")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    if torch.cuda.is_available():
        device, name = torch.device("cuda"), torch.cuda.get_device_name()
        tokens, width, teacher_width, vocabulary, dtypes = 4096, 2048, 4096, 151936, ["bf16"]
    else:
        device = torch.device("cpu")
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line for line in lines if line.startswith("model name")), "").partition(":")[2].strip()
        tokens, width, teacher_width, vocabulary, dtypes = 512, 576, 960, 49152, ["fp32", "bf16"]
    tokens = args.tokens or tokens
    result = {
        "machine": {"device": name, "threads": torch.get_num_threads(), "torch": torch.__version__},
        "date": time.strftime("%Y-%m-%d"),
        "rounds": args.rounds,
        "cases": {},
    }
    kinds: list[tuple[str, Direction]] = [(dtype, "forward") for dtype in dtypes]
    kinds += [(dtypes[0], "reverse"), (dtypes[0], "jensen_shannon")]
    for dtype, direction in kinds:
        title = f"{direction} T={tokens} H={width}/{teacher_width} V={vocabulary} {dtype}"
        if args.only in title:
            found = case(tokens, width, teacher_width, vocabulary, dtype, direction, device, args.rounds)
            result["cases"][title] = found
            print(title, json.dumps(found["ratios"]), json.dumps(found["peak MB"]), flush=True)
            if args.json:
                Path(args.json).write_text(json.dumps(result, indent=2) + "\n")
    if not result["cases"]:
        parser.error(f"--only {args.only}: no name of a case contains it")


if __name__ == "__main__":
    main()
