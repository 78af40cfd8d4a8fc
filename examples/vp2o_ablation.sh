#!/usr/bin/env bash
# GRPO against VP2O and its parts one at a time (attraction, repulsion, orthogonality, trust region, event-driven refresh) on a
# task of several right answers, three seeds: a table of score and diversity, and curves. Within 75 minutes on two cores. Stopped,
# it goes on where it was when it is started again.  --help lists the options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/setup.sh
exec .venv/bin/python examples/vp2o_ablation.py "$@"
