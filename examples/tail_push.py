"""How a run has lowered the tail of the vocabulary: compare the folders of the warm start and of a run of noise_floor.sh.

The log-prob of a tail token is a product of the hidden state and the token's row of the head. There are two ways to
lower it. Hidden states can turn away from the direction that all these rows share; this moves the whole tail at once
and leaves less of the state for anything else. Or single rows can move, each when its token is sampled. The script
computes how far the tail lies below the likeliest token with hidden states and rows of either folder, which tells the
two ways apart. RMSNorm fixes the length of a hidden state, so the first way ends when states point opposite to the
rows: a cosine of -1.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

LISTS = 256
NUMBERS = 20
TOKENS = 64
"""Number of tokens of the tokenizer; all later ids are never right."""


@torch.no_grad()
def hidden_states(folder: Path) -> tuple[Tensor, Tensor]:
    """Return hidden states [T, d] before the head for the right answers to LISTS lists, and the head's rows [V, d]."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    rng = random.Random(0)
    found = []
    for _ in range(LISTS):
        numbers = [rng.randrange(NUMBERS) for _ in range(rng.randint(4, 6))]
        prompt = tokenizer.encode(f"<{' '.join(map(str, numbers))}:")
        answer = tokenizer.encode(" ".join(map(str, sorted(numbers))))
        states = model(torch.tensor([prompt + answer]), output_hidden_states=True).hidden_states[-1][0]
        found.append(states[len(prompt) - 1 :])
    return torch.cat(found), model.lm_head.weight.detach()


def gap(hidden: Tensor, head: Tensor) -> float:
    """Return the nats from the likeliest token to the mean of the tail."""
    logits = hidden @ head.T
    return float((logits.max(1).values - logits[:, TOKENS:].mean(1)).mean())


def compare(before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> dict[str, float]:
    """Compare two folders. Each argument has hidden states and rows, as from `hidden_states`."""
    found = {}
    for name, (hidden, head) in {"before": before, "after": after}.items():
        shared = head[TOKENS:].mean(0)
        found[f"hidden norm, {name}"] = float(hidden.norm(dim=1).mean())
        cosine = torch.nn.functional.cosine_similarity(hidden, shared[None])
        found[f"cosine of hidden state and shared direction, {name}"] = float(cosine.mean())
        centered = hidden - hidden.mean(0)
        found[f"share of hidden states that differs by token, {name}"] = float(
            centered.square().sum() / hidden.square().sum()
        )
    found["nats below the likeliest, before"] = gap(*before)
    found["with the hidden states of after"] = gap(after[0], before[1])
    found["with the rows of after"] = gap(before[0], after[1])
    found["nats below the likeliest, after"] = gap(*after)
    moved = (after[1][TOKENS:] - before[1][TOKENS:]).norm(dim=1)
    found["how far a row moved, of its norm"] = float((moved / before[1][TOKENS:].norm(dim=1)).mean())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("before", type=Path, help="Hugging Face folder of the warm start")
    parser.add_argument("after", type=Path, help="Hugging Face folder of the run, as megatron-rl convert writes it")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    found = compare(hidden_states(args.before), hidden_states(args.after))
    for name, value in found.items():
        print(f"{name}: {value:.3f}")
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
