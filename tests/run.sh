#!/usr/bin/env bash
# Sets everything up, runs the tests, and checks the scripts, the style, the types and the order of imports beside their first
# minutes. Arguments go to pytest. As the first one, --all has also the long variants of tests (LONG in tests/conftest.py), and
# --fast leaves out servers, several processes and compilers: what remains is for while one edits.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
suites=()
[[ ${1:-} != --all ]] || suites=(--suites)
tools/setup.sh --verifiers "${suites[@]}"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
unset PYTHONDONTWRITEBYTECODE # hundreds of processes import the same modules, which the first one is to compile for all
bin=$PWD/.venv/bin

check() {
    local scripts imports status=0
    mapfile -t scripts < <(find .ci/run ./*/ -name '*.sh' -o -name '*.sbatch' -o -path .ci/run)
    "$bin/shellcheck" --external-sources "${scripts[@]}" || status=1
    "$bin/ruff" check --quiet . || status=1
    "$bin/codespell" || status=1
    "$bin/pyright" --project . || status=1
    imports=$("$bin/lint-imports" --no-cache --no-logo) || { echo "$imports"; status=1; }
    return "$status"
}

found=$(mktemp)
set -m # a group of their own, which can be ended whole
check >"$found" 2>&1 </dev/null &
checks=$!
set +m
trap 'kill -- "-$checks" 2>/dev/null || true; rm -f "$found"' EXIT # a trap that fails would end the script as failed

# Three files of tests at a time, for two cores: some of them wait, for limits of time or for each other.
case ${1:-} in
    --all) set -- "${@:2}" ;;
    --fast) set -- -m "not slow and not long" "${@:2}" ;;
    *) set -- -m "not long" "$@" ;;
esac
status=0
"$bin/python" -m pytest -n 3 --dist loadfile --no-loadscope-reorder "$@" || status=$?
if ! wait "$checks"; then
    status=$((status ? status : 1))
    echo "Failed: the checks of scripts, style and types"
fi
cat "$found"
exit "$status"
