#!/usr/bin/env bash
# Can routes be predicted at all? One R2 run a seed, in which a hook keeps what routers see, and then many predictors that were
# never used, the trainer's own and fits by least squares, on the same tokens: a table of what each leaves of the route KL.
# Stopped, it goes on where it was when it is started again.  --help lists the other options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/setup.sh
exec .venv/bin/python examples/route_shadow.py "$@"
