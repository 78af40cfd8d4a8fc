#!/usr/bin/env bash
# Can routes be predicted at all? One R2 run per seed, in which a hook stores router data. Then many predictors, the trainer's
# own and least-squares fits, are computed on the same tokens without effect: a table of the route KL that each leaves.
# If it is interrupted, start it again to continue.  --help lists the other options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/setup.sh
exec .venv/bin/python examples/route_shadow.py "$@"
