#!/usr/bin/env bash
# GRPO, R2, Pr2, R3 and Pr3 at 16 updates per rollout batch, three seeds: tables, paired differences and curves.
# If it is interrupted, start it again to continue.  --help lists the options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/setup.sh
exec .venv/bin/python examples/routing_replay.py "$@"
