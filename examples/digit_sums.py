"""Sums up to nine as two data files: `python examples/digit_sums.py OUT` writes OUT/train.jsonl and OUT/test.jsonl.

Eight of the 20 pairs of numbers are held out, in both orders.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

HELD_OUT = 8


def write(folder: Path) -> None:
    """Write both files."""
    pairs = [(a, b) for a in range(1, 9) for b in range(a, 10 - a)]
    random.Random(0).shuffle(pairs)
    for split, part in {"test": pairs[:HELD_OUT], "train": pairs[HELD_OUT:]}.items():
        sums = sorted({(x, y) for a, b in part for x, y in ((a, b), (b, a))})
        rows = [{"prompt": f"Answer with a single digit. What is {x} + {y}?", "answer": str(x + y)} for x, y in sums]
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    write(Path(sys.argv[1]))
