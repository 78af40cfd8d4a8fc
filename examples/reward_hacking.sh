#!/usr/bin/env bash
# PPO against a reward model with a planted flaw, with and without a KL to the reference, three seeds: table and curves.
# Stopped, it goes on where it was when it is started again.  --help lists the options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/setup.sh
exec .venv/bin/python examples/reward_hacking.py "$@"
