#!/usr/bin/env bash
# GRPO with LoRA of several ranks, with LoRA of attention only, and with all weights, three seeds; also in bf16: tables and curves.
# If it is interrupted, start it again to continue.  --help lists the options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/setup.sh
exec .venv/bin/python examples/lora_ablation.py "$@"
