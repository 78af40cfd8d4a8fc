#!/usr/bin/env bash
# Makes the two environments beside this checkout, .venv (trainer) and .venv-rollout (SGLang), from the pinned lists in
# requirements/, and installs the package. A second call finds nothing to do and ends at once.
set -euo pipefail

usage() {
    cat <<'END'
usage: tools/setup.sh [--trainer-only] [--force] [--help]

Makes .venv (trainer) and .venv-rollout (SGLang) in the checkout with uv, from requirements/*.txt, and installs
megatron_rl into .venv. About 12 GB on disk and as much in uv's cache (shared by hard links where it is on the same
file system). Nothing else is written outside the checkout.

  --trainer-only  leave out .venv-rollout (for machines whose SGLang servers run elsewhere)
  --force         make the environments anew
END
}

say() { printf 'setup: %s\n' "$*" >&2; }
fail() {
    printf 'setup: error: %s\n' "$*" >&2
    exit 1
}

environments=(trainer rollout)
force=0
for argument in "$@"; do
    case $argument in
        --trainer-only) environments=(trainer) ;;
        --force) force=1 ;;
        -h | --help) usage && exit 0 ;;
        *) usage >&2 && fail "unknown option '$argument'" ;;
    esac
done

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
export UV_NO_PROGRESS=1 UV_PYTHON_INSTALL_DIR="$root/.tools/python" UV_LINK_MODE="${UV_LINK_MODE:-hardlink}"
unset VIRTUAL_ENV PYTHONHOME PYTHONPATH
[[ $(uname -s) == Linux ]] || fail "the packages exist for Linux alone; this is $(uname -s)"
[[ $(uname -m) == x86_64 || $(uname -m) == aarch64 ]] || fail "there are no packages for $(uname -m)"

declare -A folder=([trainer]=.venv [rollout]=.venv-rollout)
declare -A lists=([trainer]="requirements/trainer.txt requirements/test.txt" [rollout]="requirements/rollout.txt")
# What the trainer's environment depends on besides its lists: the package's own build.
declare -A build=([trainer]="setup.py pyproject.toml csrc" [rollout]="")

inputs_hash() {
    local path files=()
    for path in ${lists[$1]} ${build[$1]} "requirements/$1.imports"; do
        if [[ -e $path ]]; then
            mapfile -t -O "${#files[@]}" files < <(find "$path" -type f -not -name '*.so' | LC_ALL=C sort)
        fi
    done
    sha256sum "$root/tools/setup.sh" "${files[@]}" | sha256sum | cut -d' ' -f1
}

is_ready() {
    local stamp=${folder[$1]}/.setup-stamp
    [[ -x ${folder[$1]}/bin/python && -f $stamp && $(<"$stamp") == "$(inputs_hash "$1")" ]]
}

is_python_312() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in python3.12 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python; do
        # is_python_312 also sorts out pyenv's shims of versions that are not enabled
        if command -v "$candidate" >/dev/null 2>&1 && is_python_312 "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    say "no Python 3.12 found: fetching one with uv into .tools/python"
    "$uv" python install --quiet --no-bin 3.12 >&2 ||
        fail "no Python 3.12: install it (apt-get install python3.12, or pyenv install 3.12) and call this again"
    "$uv" python find 3.12
}

find_uv() {
    local candidate
    for candidate in uv "$HOME/.local/bin/uv" "$HOME/.cargo/bin/uv" "$root/.tools/uv/bin/uv"; do
        if "$candidate" --version >/dev/null 2>&1; then
            command -v "$candidate"
            return
        fi
    done
    say "no uv found: installing it into .tools/uv with pip"
    local python
    for python in python3.12 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python; do
        if "$python" -m pip install --quiet --disable-pip-version-check --target "$root/.tools/uv" uv >&2 2>/dev/null; then
            printf '%s\n' "$root/.tools/uv/bin/uv"
            return
        fi
    done
    fail "uv is missing and pip cannot install it: see https://docs.astral.sh/uv/getting-started/installation/"
}

make_environment() {
    local venv=${folder[$1]} list arguments=()
    for list in ${lists[$1]}; do
        arguments+=("$root/$list")
    done
    rm -f "$venv/.setup-stamp"
    if ((force)) || ! { [[ -x $venv/bin/python ]] && is_python_312 "$venv/bin/python"; }; then
        rm -rf "$venv"
        "$uv" venv --quiet --python "$python" "$venv" || fail "cannot make $venv with $python"
    fi
    say "$venv: installing $(cat "${arguments[@]}" | wc -l) packages"
    # The lists are complete, so `sync` takes them as they are, without looking at dependencies: megatron-bridge names
    # some that only install beside a GPU. Packages that are not in a list are removed.
    "$uv" pip sync --quiet --python "$venv/bin/python" "${arguments[@]}" ||
        fail "$venv: the packages could not be installed; is there a network, and space on the disk ($(free_space))?"
    if [[ $1 == trainer ]]; then
        "$uv" pip install --quiet --python "$venv/bin/python" --no-deps --no-build-isolation --editable "$root" ||
            fail "$venv: megatron_rl could not be built: see the messages above; it takes g++ and Python's headers" \
                "(apt-get install g++ python3.12-dev), and docs/troubleshooting.md has more"
    fi
}

# Imports what a run imports: shows that the environment works, and leaves compiled modules on the disk: without them, as wherever
# PYTHONDONTWRITEBYTECODE is set, every process of a run compiles thousands of files at its start.
finish_environment() {
    local venv=${folder[$1]} modules
    modules=$(paste -sd, "requirements/$1.imports")
    env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 "$venv/bin/python" -W ignore -c "import $modules" >/dev/null ||
        fail "$venv: was installed but cannot be imported: see the message above"
    inputs_hash "$1" >"$venv/.setup-stamp"
}

free_space() { df --output=avail -BG . | tail -n 1 | tr -d ' '; }

all_ready() {
    local environment
    for environment in "${environments[@]}"; do
        is_ready "$environment" || return 1
    done
}

command -v g++ >/dev/null || fail "g++ is missing, which builds the kernels: apt-get install g++"
command -v flock >/dev/null || fail "flock is missing: apt-get install util-linux"
exec 9<"$root/tools" # a lock on the folder itself, so no lock file is left behind
if ! flock --nonblock 9; then
    say "another setup is running: waiting for it"
    flock --timeout 3600 9 || fail "the other setup has not ended within an hour"
fi
if ((!force)) && all_ready; then
    exit 0
fi
uv=$(find_uv)
python=$(find_python)
say "Python $python, $("$uv" --version), $(free_space) free on the disk"
finishing=()
for environment in "${environments[@]}"; do
    if ((force)) || ! is_ready "$environment"; then
        make_environment "$environment"
        finish_environment "$environment" & # while the next one is installed
        finishing+=($!)
    fi
done
for process in "${finishing[@]}"; do
    wait "$process" || exit 1
done
say "done: .venv/bin/megatron-rl doctor says what this machine has"
