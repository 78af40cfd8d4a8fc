"""A table of policies that `megatron-rl eval` has scored: the mean of each reward part over the held-out prompts.

python examples/compare_policies.py SFT=runs/rlhf/scores/sft PPO=runs/rlhf/scores/ppo
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Column, Table

Row = dict[str, float]


def scores(folder: Path) -> Row:
    """Mean of each part of a run's last evaluation, sampled, and greedy."""
    file = max((folder / "evals").glob("step_*.jsonl"), default=None)
    if file is None:
        raise SystemExit(f"compare_policies: {folder} has no evaluation: megatron-rl eval CONFIG --name NAME")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    parts = [name for name in rows[0] if name.startswith("reward/")]
    found: Row = {}
    for greedy in (False, True):
        some = [row for row in rows if row["greedy"] is greedy]
        for part in parts if some else ():
            title = f"{part.removeprefix('reward/')}{', greedy' if greedy else ''}"
            found[title] = statistics.fmean(row[part] for row in some)
    return found


def table(policies: dict[str, Row]) -> Table:
    """One row a policy."""
    titles = list(dict.fromkeys(title for row in policies.values() for title in row))
    found = Table(Column("policy"), *(Column(title, justify="right") for title in titles), title_justify="left")
    for name, row in policies.items():
        found.add_row(name, *(f"{row[title]:.3f}" if title in row else "" for title in titles))
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("policies", nargs="+", metavar="NAME=RUN", help="title of a row, and folder of the run")
    pairs = [text.partition("=") for text in parser.parse_args(arguments).policies]
    Console().print(table({name: scores(Path(folder)) for name, _, folder in pairs}))


if __name__ == "__main__":
    main()
