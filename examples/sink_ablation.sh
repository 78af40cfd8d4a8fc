#!/usr/bin/env bash
# GRPO on a gpt-oss whose trainer trains its attention sinks, freezes them, or has none while SGLang applies them, and the cures
# that were tried before sinks were fixed; three seeds: a table, and KL, gradient norm and reward over steps. If it is
# interrupted, start it again to continue.  --help lists the options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/setup.sh
exec .venv/bin/python examples/sink_ablation.py "$@"
