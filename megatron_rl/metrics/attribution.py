"""Sources of a mismatch: each source's share, and a table of the shares for the terminal and the report."""

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
    """A cause of differences between trainer and engine, and the mismatch that remains when the cause is removed."""

    name: str
    """Name of the source: routes | gates | tail | attention | precision | all."""
    removed_by: str
    """Description of the replacement that removed the source, or the reason why it could not be removed."""
    kl: float | None
    """k3 estimate of KL(engine || trainer) without the source, nats per token; None if it was not removed."""
    share: float | None = None
    """Share of the whole KL that disappears when the source is removed; below 0 if the mismatch grows."""
    error: float | None = None
    """Standard error of the share, over the batch's sequences."""


@dataclass(frozen=True)
class Attribution:
    """Result of the attribution: the sources of the mismatch in one recorded step."""

    step: int
    tokens: int
    """Number of tokens in the loss that lie in the run's safe set."""
    sequences: int
    left_out: int
    """Number of sequences that are excluded, because more than one version of the weights sampled them."""
    kl: float
    """KL with the run's own log-probs, before any source is removed."""
    sources: list[Source]


def common_sums(before: Tensor, after: Tensor, segments: Segments) -> Tensor:
    """Return sums for each sequence, [3, S]: of `before`, of `after`, and of the number of tokens. before, after: [n].

    Only tokens that are finite in both are included. A token that enters or leaves the safe set when a source is removed says
    nothing about this source.
    """
    import torch

    common = before.isfinite() & after.isfinite()
    values = (torch.where(common, value, 0.0) for value in (before, after, torch.ones_like(before)))
    return torch.stack(segments.sums(*values))


def source(name: str, removed_by: str, before: Tensor, after: Tensor, tokens: Tensor) -> Source:
    """Return a source with its KL, share and error. before, after: sums of k3 per sequence [S], with and without the source.

    tokens: number of tokens of each sequence, [S]. To second order, the KL is half the variance of the difference of log-probs.
    So the shares of independent sources add up to 1, if the engine's own sources are included. The error is the standard error
    of a ratio of two sums over independent sequences.
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


HEADINGS = ("without", "by", "KL, nats per token", "share of the KL")


def rows(found: Attribution) -> list[tuple[str, str, str, str]]:
    """Return the rows of the table, whose columns have the names HEADINGS."""
    rows = [("nothing", "log-probs as in the run", f"{found.kl:.3g}", "")]
    for one in found.sources:
        share = "" if one.share is None else f"{one.share:+.1%} ± {one.error:.1%}"
        rows.append((one.name, one.removed_by, "-" if one.kl is None else f"{one.kl:.3g}", share))
    return rows


def title(found: Attribution) -> str:
    """Return the title of the table, with step and number of tokens."""
    left_out = f", without {found.left_out} sequences of several weight versions" if found.left_out else ""
    return f"Sources of the mismatch at step {found.step}: {found.tokens:,} tokens in {found.sequences} sequences{left_out}"


def table(found: Attribution) -> Table:
    """Return the table for the terminal."""
    words, numbers = HEADINGS[:2], [Column(heading, justify="right") for heading in HEADINGS[2:]]
    shown = Table(*words, *numbers, title=title(found), title_justify="left")
    for row in rows(found):
        shown.add_row(*row)
    return shown
