#!/usr/bin/env bash
# GRPO and VP2O without a clip, with and without the trust region, at two learning rates, three seeds: tables and curves.
# If it is interrupted, start it again to continue.  --help lists the options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/setup.sh
exec .venv/bin/python examples/vp2o_stability.py "$@"
