#!/usr/bin/env bash
# Sets everything up and runs the tests. Beside the tests' first minutes it checks scripts, style, spelling, types and the order of
# imports, and builds the site. Arguments go to pytest. The first argument may be --all, which adds the long tests (LONG in
# tests/conftest.py), or --fast, which leaves out servers, compilers and tests of several processes.
set -euo pipefail

cd "$(dirname "${BASH_SOURCE[0]}")/.."
suites=()
[[ ${1:-} != --all ]] || suites=(--suites)
tools/setup.sh --verifiers "${suites[@]}"
export OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
unset PYTHONDONTWRITEBYTECODE # hundreds of processes import the same modules; the first one compiles them for all
bin=$PWD/.venv/bin

check() {
    local scripts imports status=0
    mapfile -t scripts < <(find .ci/run ./*/ -name '*.sh' -o -name '*.sbatch' -o -path .ci/run)
    "$bin/shellcheck" --external-sources "${scripts[@]}" || status=1
    "$bin/ruff" check --quiet . || status=1
    "$bin/codespell" || status=1
    NO_MKDOCS_2_WARNING=1 "$bin/mkdocs" build --strict --quiet --site-dir .tools/site || status=1
    "$bin/pyright" --project . || status=1
    imports=$("$bin/lint-imports" --no-cache --no-logo) || { echo "$imports"; status=1; }
    return "$status"
}

found=$(mktemp)
set -m # its own process group, so that it can be ended as a whole
check >"$found" 2>&1 </dev/null &
checks=$!
set +m
trap 'kill -- "-$checks" 2>/dev/null || true; rm -f "$found"' EXIT # a failing trap would make the script fail

# Three files of tests at a time on two cores: some tests wait for timeouts or for each other.
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
