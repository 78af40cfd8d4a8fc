#!/usr/bin/env bash
# Sets everything up, checks the scripts and the style, and runs the tests. Arguments go to pytest. As the first one, --all has
# also the long variants of tests (LONG in tests/conftest.py), and --fast leaves out servers, several processes and compilers:
# what remains is for while one edits.
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
case ${1:-} in
    --all) set -- "${@:2}" ;;
    --fast) set -- -m "not slow" "${@:2}" ;;
    *) set -- -m "not long" "$@" ;;
esac
exec "$bin/python" -m pytest -n 2 --dist loadfile --no-loadscope-reorder "$@"
