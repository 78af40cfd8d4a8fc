#!/usr/bin/env bash
# Naive RLOO, TIS, MIS, DVP and MIS + DVP with a floor under SGLang's tail, three seeds: tables, paired differences and curves.
# If it is interrupted, start it again to continue.  --help lists the options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/setup.sh
exec .venv/bin/python examples/noise_floor.py "$@"
