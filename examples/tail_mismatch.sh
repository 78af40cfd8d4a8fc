#!/usr/bin/env bash
# A trainer in fp32 against SGLang in fp32, bf16 and FP8, over the whole vocabulary, by the probability of a token: a table.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

tools/setup.sh
exec .venv/bin/python examples/tail_mismatch.py "$@"
