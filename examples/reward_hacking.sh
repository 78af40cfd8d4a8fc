#!/usr/bin/env bash
# PPO against a reward model with a planted flaw, with and without a KL to the reference, three seeds: table and curves.
# If it is interrupted, start it again to continue.  --help lists the options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/setup.sh
exec .venv/bin/python examples/reward_hacking.py "$@"
