"""Turn scored responses into preferences: pairs of a better and a worse response to the same prompt, as JSON lines.

    megatron-rl rollout CONFIG --name candidates --batch.prompts_per_step 512
    python tools/make_preferences.py runs/candidates/rollouts/step_000000.jsonl preferences.jsonl

Responses are compared by their `reward`, or by one of its parts (--by reward/correct). Responses with equal texts or equal
scores form no pair. At most --pairs pairs are drawn per prompt, so that all responses are used about equally often.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterable, Iterator
from itertools import product
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def pairs_of(responses: list[Row], by: str, count: int, rng: random.Random) -> Iterator[tuple[Row, Row]]:
    """Yield at most `count` (better, worse) pairs of different responses to one prompt."""
    different = list({row["response"]: row for row in responses}.values())
    found = [(a, b) for a, b in product(different, different) if a[by] > b[by]]
    used: dict[str, int] = {}
    rng.shuffle(found)
    for _ in range(min(count, len(found))):
        pair = min(found, key=lambda pair: sum(used.get(row["response"], 0) for row in pair))
        found.remove(pair)
        for row in pair:
            used[row["response"]] = used.get(row["response"], 0) + 1
        yield pair


def preferences(rows: Iterable[Row], by: str, count: int, seed: int) -> Iterator[Row]:
    """Yield rows of a preference file, prompt by prompt. Errors: KeyError for a response without a score."""
    prompts: dict[str, list[Row]] = {}
    for row in rows:
        prompts.setdefault(row["prompt_id"], []).append(row)
    for prompt, responses in prompts.items():
        for better, worse in pairs_of(responses, by, count, random.Random(f"{seed}/{prompt}")):
            texts = {"chosen": better["response"], "rejected": worse["response"]}
            asked = better.get("asked", better["prompt"])  # without the chat template, which training applies again
            yield {"prompt": asked, **texts, "gap": better[by] - worse[by]}


def main(arguments: list[str] | None = None) -> int:
    """Run the tool and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "responses", type=Path, nargs="+", help="JSON lines from `megatron-rl rollout`, or from a run's evals/"
    )
    parser.add_argument("out", type=Path, help="output file")
    parser.add_argument("--by", default="reward", metavar="COLUMN", help="score to compare by: reward, or reward/PART")
    parser.add_argument(
        "--pairs", type=int, default=4, metavar="N", help="largest number of pairs per prompt (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    try:
        rows = [json.loads(line) for file in options.responses for line in file.read_text().splitlines()]
        found = list(preferences(rows, options.by, options.pairs, options.seed))
    except (OSError, ValueError) as error:
        print(f"make_preferences: error: {error}", file=sys.stderr)
        return 2
    except KeyError as error:
        print(f"make_preferences: error: a response has no {error}; choose another column with --by", file=sys.stderr)
        return 2
    if not found:
        print(
            f"make_preferences: error: no prompt has responses with different {options.by}; choose another column with"
            " --by",
            file=sys.stderr,
        )
        return 2
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in found))
    print(f"{len(found)} pairs of {len({str(row['prompt']) for row in found})} prompts in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
