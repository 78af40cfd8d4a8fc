"""How far SGLang in bf16 lags behind the trainer's fp32 weights: compare two Hugging Face folders, before and after training.

The weights of a released model lie on bf16's grid, and a change of less than half a grid step rounds back to the old
value. SGLang does not see such a change, so its policy stays between the old and the new policy. The slope of
(rounded - after) over (before - after) tells how far back it stays. It is computed for the weights and for the
log-probs of sampled tokens, both in fp32. Stochastic rounding, with probabilities by the distance to the two
neighbors, is right on average; its figures are a comparison that tells lag from noise.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

Rounding = Literal["nearest", "stochastic"]
LONGEST = 24


def rounded(weight: Tensor, how: Rounding, generator: torch.Generator | None = None) -> Tensor:
    """Return an fp32 tensor with the values of bf16."""
    if how == "nearest":
        return weight.bfloat16().float()
    below = torch.randint(0, 1 << 16, weight.shape, generator=generator, dtype=torch.int32)
    return ((weight.contiguous().view(torch.int32) + below) & ~0xFFFF).view(torch.float32)


def lag(before: Tensor, after: Tensor, seen: Tensor) -> dict[str, float]:
    """Return how far `seen`, which stands for `after`, lags: slope and cosine against the way back, and root mean
    squares of both.
    """
    gap, back = (seen - after).double().flatten(), (before - after).double().flatten()
    product, squares = float(gap @ back), (float(gap @ gap), float(back @ back))
    lengths = (squares[0] * squares[1]) ** 0.5
    return {
        "slope": product / squares[1] if squares[1] else 0.0,
        "cosine": product / lengths if lengths else 0.0,
        "rms": (squares[0] / len(gap)) ** 0.5,
        "rms_of_the_way": (squares[1] / len(gap)) ** 0.5,
    }


def of_weights(before: PreTrainedModel, after: PreTrainedModel) -> dict[str, float]:
    """Return the slope of all weights in bf16, and the share of changed weights that look unchanged."""
    old, new = dict(before.named_parameters()), dict(after.named_parameters())
    a = torch.cat([old[name].detach().flatten() for name in new])
    b = torch.cat([weight.detach().flatten() for weight in new.values()])
    seen, moved = rounded(b, "nearest"), a != b
    return {
        "slope": lag(a, b, seen)["slope"],
        "unseen": float(((seen == rounded(a, "nearest")) & moved).sum() / moved.sum().clamp(min=1)),
        "on_the_grid": float((rounded(a, "nearest") == a).float().mean()),
    }


@torch.no_grad()
def sampled(model: PreTrainedModel, prompts: Sequence[Tensor]) -> list[tuple[Tensor, int]]:
    """Return (tokens [1, T], length of the prompt) of one response to each prompt, at temperature 1."""
    options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": LONGEST}
    return [
        (model.generate(prompt, attention_mask=torch.ones_like(prompt), pad_token_id=0, **options), prompt.shape[1])
        for prompt in prompts
    ]


@torch.no_grad()
def log_probs(model: PreTrainedModel, texts: Sequence[tuple[Tensor, int]]) -> Tensor:
    """Return the log-probs [tokens] of all responses."""
    found = []
    for tokens, start in texts:
        logits = model(tokens).logits[0, start - 1 : -1].double().log_softmax(-1)
        found.append(logits.gather(1, tokens[0, start:, None])[:, 0])
    return torch.cat(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="Hugging Face folder from which training started")
    parser.add_argument(
        "after", type=Path, help="Hugging Face folder of a checkpoint, as megatron-rl convert writes it"
    )
    parser.add_argument(
        "--prompts", type=Path, required=True, help="file of JSON lines with a prompt each, which are asked as a chat"
    )
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    for folder in (args.before, args.after):
        if not (folder / "config.json").is_file():
            parser.error(
                f"{folder} is not a Hugging Face folder; create one from a checkpoint with megatron-rl convert"
            )
    if not args.prompts.is_file():
        parser.error(f"--prompts {args.prompts} is not a file; give a file of JSON lines with a prompt each")
    tokenizer = AutoTokenizer.from_pretrained(args.before)
    before, after, seen = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for folder in (args.before, args.after, args.after)
    )
    chats = [[{"role": "user", "content": json.loads(line)["prompt"]}] for line in args.prompts.open()]
    options = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    prompts = [tokenizer.apply_chat_template(chat, **options)["input_ids"] for chat in chats]
    torch.manual_seed(0)
    texts = [*sampled(before, prompts), *sampled(after, prompts)]
    old, new = log_probs(before, texts), log_probs(after, texts)
    found: dict[str, dict[str, float]] = {"weights": of_weights(before, after)}
    generator = torch.Generator().manual_seed(0)
    for how in ("nearest", "stochastic"):
        with torch.no_grad():
            for weight, exact in zip(seen.parameters(), after.parameters(), strict=True):
                weight.copy_(rounded(exact, how, generator))
        found[how] = lag(old, new, log_probs(seen, texts)) | {"tokens": len(new)}
    for name, figures in found.items():
        print(f"{name}: " + ", ".join(f"{figure} {value:.4g}" for figure, value in figures.items()))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
