#!/usr/bin/env bash
# GRPO by LoRA of several ranks and of attention alone, beside all weights, three seeds; and in bf16: tables and curves.
# Stopped, it goes on where it was when it is started again.  --help lists the options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/setup.sh
exec .venv/bin/python examples/lora_ablation.py "$@"
