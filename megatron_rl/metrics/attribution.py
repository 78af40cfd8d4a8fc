"""How much of a mismatch each of its sources carries: the shares, and their table for the terminal and the report."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.table import Column, Table

if TYPE_CHECKING:  # the report reads what there is, without torch
    from torch import Tensor

    from megatron_rl.algorithms.segments import Segments

ATTRIBUTION_FILE = "attribution.json"


@dataclass(frozen=True)
class Source:
    """One thing in which trainer and engine differ, and what is left of the mismatch without it."""

    name: str
    """routes | gates | tail | attention | precision | all"""
    removed_by: str
    """The replacement with which it was removed; or why it could not be removed."""
    kl: float | None
    """k3 estimate of KL(engine || trainer) without it, nats per token; None: not removed."""
    share: float | None = None
    """Share of the whole KL that went with it; below 0 where the mismatch grew."""
    error: float | None = None
    """Standard error of the share, over the batch's sequences."""


@dataclass(frozen=True)
class Attribution:
    """Sources of the mismatch in one recorded step."""

    step: int
    tokens: int
    """Tokens of the loss, without those outside the run's safe set."""
    sequences: int
    left_out: int
    """Sequences that other weights have sampled too."""
    kl: float
    """KL of the run's own log-probs."""
    sources: list[Source]


def common_sums(before: Tensor, after: Tensor, segments: Segments) -> Tensor:
    """[3, S]: sums of `before` and of `after` [n] over a sequence's tokens that are finite in both, and their number.

    A token that a removal brings into the safe set, or takes out of it, says nothing of the source.
    """
    import torch

    common = before.isfinite() & after.isfinite()
    values = (torch.where(common, value, 0.0) for value in (before, after, torch.ones_like(before)))
    return torch.stack(segments.sums(*values))


def source(name: str, removed_by: str, before: Tensor, after: Tensor, tokens: Tensor) -> Source:
    """From the sums of k3 over each sequence [S], as it is and without the source, and over how many tokens [S] each.

    The shares of sources that act independently, the engine's own among them, add up to 1, as the KL is to second order
    half the variance of the difference of log-probs. The error is that of a ratio of two sums over independent sequences.
    """
    whole, kl = float(before.sum()), float(after.sum()) / max(float(tokens.sum()), 1.0)
    if whole <= 0:
        return Source(name, removed_by, kl)
    gone = before - after
    share = float(gone.sum()) / whole
    error = math.sqrt(float((gone - share * before).square().sum())) / whole
    return Source(name, removed_by, kl, share, error)


def save(found: Attribution, run: Path) -> None:
    """Write the run's attribution.json."""
    (run / ATTRIBUTION_FILE).write_text(json.dumps(asdict(found), indent=2) + "\n")


def load(run: Path) -> Attribution | None:
    """Read a run's attribution.json, if it has one."""
    path = run / ATTRIBUTION_FILE
    if not path.exists():
        return None
    values = json.loads(path.read_text())
    return Attribution(**values | {"sources": [Source(**one) for one in values["sources"]]})


HEADINGS = ("without", "which is", "KL, nats per token", "share of the KL")


def rows(found: Attribution) -> list[tuple[str, str, str, str]]:
    """The table's rows under HEADINGS."""
    rows = [("nothing", "as the run scores it", f"{found.kl:.3g}", "")]
    for one in found.sources:
        share = "" if one.share is None else f"{one.share:+.1%} ± {one.error:.1%}"
        rows.append((one.name, one.removed_by, "-" if one.kl is None else f"{one.kl:.3g}", share))
    return rows


def title(found: Attribution) -> str:
    """The table's title: which tokens it is of."""
    left_out = f", {found.left_out} sequences of several weights left out" if found.left_out else ""
    return f"Sources of the mismatch at step {found.step}: {found.tokens:,} tokens in {found.sequences} sequences{left_out}"


def table(found: Attribution) -> Table:
    """The table for the terminal."""
    words, numbers = HEADINGS[:2], [Column(heading, justify="right") for heading in HEADINGS[2:]]
    shown = Table(*words, *numbers, title=title(found), title_justify="left")
    for row in rows(found):
        shown.add_row(*row)
    return shown
