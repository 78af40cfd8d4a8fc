#!/usr/bin/env bash
# RLOO with an FP8 trainer against a bf16 engine: naive, TIS, MIS, DVP and MIS + DVP, three seeds: a table, and KL and score over
# steps. Within 75 minutes on two cores. Stopped, it goes on where it was when it is started again.  --help lists the options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/setup.sh
exec .venv/bin/python examples/mismatch_ablation.py "$@"
