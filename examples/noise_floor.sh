#!/usr/bin/env bash
# Naive RLOO, TIS, MIS, DVP and MIS + DVP with a floor under the engine's tail, three seeds: tables, paired differences and curves.
# Stopped, it goes on where it was when it is started again.  --help lists the options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/setup.sh
exec .venv/bin/python examples/noise_floor.py "$@"
