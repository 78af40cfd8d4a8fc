#!/usr/bin/env bash
# What cures of the mismatch leave beside operators that have none, with a noise floor, a bf16 engine and routers that move.
# Stopped, it goes on where it was when it is started again.  --help lists the options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/setup.sh
exec .venv/bin/python examples/zero_mismatch.py "$@"
