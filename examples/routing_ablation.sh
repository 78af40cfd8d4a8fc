#!/usr/bin/env bash
# GRPO, GSPO, R2, Pr2, R3 and Pr3 at off-2, off-4 and off-8 on the quickstart's task: a table and the paper's pictures.
# Default: off-4 with three seeds, the others with one, within 75 minutes on two cores. --full: three seeds everywhere.
# Stopped, it goes on where it was when it is started again.  --help lists the other options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/setup.sh
exec .venv/bin/python examples/routing_ablation.py "$@"
