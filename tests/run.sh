#!/usr/bin/env bash
# Sets everything up, checks the scripts and the style, and runs the tests. Arguments go to pytest; --fast as the first one
# leaves out what takes long: servers, several processes, compilers. What remains is for while one edits.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
tools/setup.sh --verifiers
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
unset PYTHONDONTWRITEBYTECODE # hundreds of processes import the same modules, which the first one is to compile for all
bin=$PWD/.venv/bin

mapfile -t scripts < <(find .ci/run ./*/ -name '*.sh' -o -name '*.sbatch' -o -path .ci/run)
"$bin/shellcheck" --external-sources "${scripts[@]}"
"$bin/ruff" check --quiet .
"$bin/pyright" --project .
# Two files of tests at a time; more would want more memory than a laptop has.
[[ ${1:-} != --fast ]] || set -- -m "not slow" "${@:2}"
exec "$bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
