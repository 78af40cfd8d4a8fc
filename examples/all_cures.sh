#!/usr/bin/env bash
# Every cure alone and all of them together on one run with a noise floor, a bf16 engine and routers that move: a table of gain and
# cost, and curves. Stopped, it goes on where it was when it is started again.  --help lists the options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/setup.sh
exec .venv/bin/python examples/all_cures.py "$@"
