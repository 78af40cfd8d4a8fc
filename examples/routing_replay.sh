#!/usr/bin/env bash
# GRPO, R2, Pr2, R3 and Pr3 at 16 updates a rollout batch, three seeds: tables, paired differences and curves.
# Stopped, it goes on where it was when it is started again.  --help lists the options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/setup.sh
exec .venv/bin/python examples/routing_replay.py "$@"
