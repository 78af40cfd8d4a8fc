#!/usr/bin/env bash
# GRPO, its controls and VP2O over 150 steps on prompts with 61 right answers, three seeds: tables and curves.
# If it is interrupted, start it again to continue.  --help lists the options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/setup.sh
exec .venv/bin/python examples/vp2o_diversity.py "$@"
