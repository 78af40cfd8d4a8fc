#!/usr/bin/env bash
# SmolLM2-135M with SGLang in bf16 and FP8, dense and with experts, one run each: a table and curves.
# If it is interrupted, start it again to continue.  --help lists the options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/setup.sh
exec .venv/bin/python examples/smollm2_ablation.py "$@"
