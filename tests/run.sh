#!/usr/bin/env bash
# Sets everything up, checks the scripts and the style, and runs the tests. Arguments go to pytest.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools/setup.sh
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
bin=$PWD/.venv/bin

mapfile -t scripts < <(find .ci/run ./*/ -name '*.sh' -o -name '*.sbatch' -o -path .ci/run)
"$bin/shellcheck" --external-sources "${scripts[@]}"
"$bin/ruff" check --quiet .
"$bin/pyright"
# Two files of tests at a time; more would want more memory than a laptop has.
exec "$bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
