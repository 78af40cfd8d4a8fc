#!/usr/bin/env bash
# Mismatch that cures leave, compared with identical operators, with a noise floor, SGLang in bf16 and moving routers.
# If it is interrupted, start it again to continue.  --help lists the options.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/setup.sh
exec .venv/bin/python examples/zero_mismatch.py "$@"
