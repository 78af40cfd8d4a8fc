#!/usr/bin/env bash
# GRPO on a gpt-oss whose trainer trains its attention sinks, freezes them, or has none while the engine applies them, and the cures
# that were tried before sinks were mended; three seeds: a table, and KL, gradient norm and reward over steps. Stopped, it goes on
# where it was when it is started again.  --help lists the options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/setup.sh
exec .venv/bin/python examples/sink_ablation.py "$@"
