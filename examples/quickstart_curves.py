"""Draw the README's picture from runs of the quickstart: python examples/quickstart_curves.py RUN [RUN ...] OUT.svg

Each RUN is a folder such as runs/quickstart-seed0/grpo. The line is the mean of the runs, in a band from the smallest to the
largest value.
"""

from __future__ import annotations

import sys
from pathlib import Path

from curves import Panel, write_curves

if __name__ == "__main__":
    *runs, out = sys.argv[1:]
    if not runs or not out.endswith(".svg"):
        sys.exit(__doc__)
    panels = [
        Panel("Score of the responses that train (share of right answers)", "reward/mean"),
        Panel("KL divergence between engine and trainer (nats per token)", "mismatch/kl", log=True),
    ]
    write_curves({f"{len(runs)} seeds": runs}, panels, Path(out), title="Quickstart", columns=1)
