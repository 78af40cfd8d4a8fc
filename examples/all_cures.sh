#!/usr/bin/env bash
# Every cure alone and all of them together, with a noise floor, SGLang in bf16 and moving routers: a table of gain and cost,
# and curves. If it is interrupted, start it again to continue.  --help lists the options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/setup.sh
exec .venv/bin/python examples/all_cures.py "$@"
