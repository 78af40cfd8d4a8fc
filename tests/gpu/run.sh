#!/usr/bin/env bash
# The tests that need a GPU, in stages of at most ten minutes each; one JSON file a stage with commit, versions and device.
#
#   tests/gpu/run.sh STAGE [FOLDER] [--on-cpu] [--budget-s N]
#
# STAGE: start | kernels | models | training | slices | invariance | batch_invariant | engine | te | speed | attention | all
# FOLDER gets STAGE.json (default: gpu-results). --on-cpu tries a stage without a GPU, in small. --budget-s begins no test of a
# stage after so many seconds. README.md says in which order stages are worth their minutes.
#
# The environment is .venv where tools/setup.sh has made one. On a machine without a network it is made around the python3
# that has torch, of the archives in gpu-bundle/, which tests/gpu/bundle.py packed elsewhere; archives may come one after another.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

stages=(start kernels models training slices invariance batch_invariant engine te speed attention)
declare -A files=([start]=test_1_start.py [kernels]=test_2_kernels.py [models]=test_3_models.py
    [training]=test_4_training.py [slices]=test_5_slices.py [invariance]=test_7_invariance.py
    [batch_invariant]=test_8_batch_invariant.py [engine]=test_9_engine.py [te]=test_10_te.py [speed]=test_11_speed.py
    [attention]=test_12_attention.py)
LIMIT_S=600

say() { printf 'gpu: %s\n' "$*" >&2; }
fail() { say "error: $*" && exit 1; }
usage() { sed -n '2,11s/^# \{0,1\}//p' "$0"; }

positional=() options=()
while (($#)); do
    case $1 in
        -h | --help) usage && exit 0 ;;
        --on-cpu) options+=(--on-cpu) ;;
        --budget-s) (($# > 1)) || fail "--budget-s takes seconds" && options+=(--budget-s "$2") && shift ;;
        -*) usage >&2 && say "error: no option '$1'" && exit 2 ;;
        *) positional+=("$1") ;;
    esac
    shift
done
stage=${positional[0]:-}
out=${positional[1]:-gpu-results}
if [[ $stage == all ]]; then
    chosen=("${stages[@]}")
else
    [[ -n $stage && -n ${files[$stage]:-} ]] || { usage >&2 && say "error: no stage '$stage'" && exit 2; }
    chosen=("$stage")
fi

# Archives NAME.tar.xz, or its files NAME.tar.xz.1, ... where all are here, go to .venv-gpu/carried/NAME once.
unpack() {
    local name sums files target
    [[ -f gpu-bundle/SHA256SUMS ]] || fail "no gpu-bundle/SHA256SUMS: python tests/gpu/bundle.py makes it, on a machine with a network"
    while read -r name; do
        sums=$(grep -E "  $name\.tar\.xz(\.[0-9]+)?$" gpu-bundle/SHA256SUMS)
        target=.venv-gpu/carried/$name
        mapfile -t files < <(awk '{ print "gpu-bundle/" $2 }' <<<"$sums" | sort -V)
        [[ "$(cat "$target.sums" 2>/dev/null)" == "$sums" ]] && continue
        ls "${files[@]}" >/dev/null 2>&1 || { say "$name: not here, or not all of its ${#files[@]} files" && continue; }
        (cd gpu-bundle && sha256sum --check --strict --quiet <<<"$sums" >&2) || fail "$name did not arrive as it was packed"
        rm -rf "$target" && mkdir -p "$target"
        cat "${files[@]}" | "$1" -c 'import sys, tarfile
tarfile.open(fileobj=sys.stdin.buffer, mode="r|xz").extractall(sys.argv[1], filter="fully_trusted")' "$target" &&
            printf '%s\n' "$sums" >"$target.sums" && say "$name: unpacked" &
    done < <(grep -o '[a-z0-9_]*\.tar' gpu-bundle/SHA256SUMS | sort -u | cut -d. -f1)
    wait
}

# An environment that sees the carried packages, then those of the machine's Python, which may be an environment's itself. SGLang's
# side of the trainer is this checkout's, as tools/setup.sh installs it, without pip: its folder, and where SGLang finds its name.
see() { # ENVIRONMENT NAMES...
    local packages name
    packages=$("$1/bin/python" -c 'import site; print(site.getsitepackages()[0])')
    for name in "${@:2}"; do
        printf 'import site; site.addsitedir("%s/.venv-gpu/carried/%s/site")\n' "$PWD" "$name"
    done >"$packages/carried.pth"
    printf '%s\n' "$PWD" "$PWD/sglang_plugin" >>"$packages/carried.pth"
    (cd sglang_plugin && "$machine" -c 'import sys; from setuptools import build_meta
build_meta.prepare_metadata_for_build_wheel(sys.argv[1])' "$packages" >/dev/null)
    "$machine" -c 'import site; print(*site.getsitepackages(), sep="\n")' >"$packages/machine.pth"
    # Transformer Engine and our build look for CUDA's libraries in the environment alone.
    for name in $(<"$packages/machine.pth"); do
        [[ ! -d $name/nvidia ]] || ln -sfn "$name/nvidia" "$packages/nvidia"
    done
}

make_from_bundle() {
    local environment has_torch
    has_torch='import sys, importlib.util; sys.exit(sys.version_info[:2] != (3, 12) or not importlib.util.find_spec("torch"))'
    for machine in python3.12 python3 ""; do
        [[ -n $machine ]] || fail "neither python3.12 nor python3 on PATH is a Python 3.12 with torch"
        machine=$(command -v $machine) && "$machine" -c "$has_torch" 2>/dev/null && break
    done
    for environment in .venv-gpu .venv-gpu/rollout; do
        [[ -x $environment/bin/python ]] || "$machine" -m venv --without-pip --system-site-packages "$environment"
    done
    unpack "$machine"
    see .venv-gpu trainer te fa4
    see .venv-gpu/rollout rollout
    printf '#!/bin/sh\nexec "%s/.venv-gpu/bin/python" -m megatron_rl.cli "$@"\n' "$PWD" >.venv-gpu/bin/megatron-rl
    chmod +x .venv-gpu/bin/megatron-rl
    [[ ! -d .venv-gpu/carried/rollout ]] || [[ -e .venv-rollout ]] || ln -sfn .venv-gpu/rollout .venv-rollout
    local kernels=.venv-gpu/carried/trainer/kernels stamp
    stamp=$("$machine" -c 'import sys; sys.path.insert(0, "tests/gpu"); import bundle; print(bundle.kernels_stamp())')
    if [[ "$(cat .venv-gpu/kernels 2>/dev/null)" != "$stamp" ]]; then
        if [[ "$(cat $kernels/STAMP 2>/dev/null)" == "$stamp" ]]; then
            cp "$kernels"/*.so megatron_rl/ops/
        else
            say "compiling our kernels, which the bundle holds for other sources"
            .venv-gpu/bin/python setup.py -q build_ext --inplace
        fi
        printf '%s' "$stamp" >.venv-gpu/kernels
    fi
}

# nvcc may be a script that lies elsewhere than its toolkit, and the toolkit the compiler alone: torch brings the CUDA runtime,
# and the archive of SGLang the C++ library.
find_cuda() {
    local nvcc toolkit library libraries=$PWD/.venv-gpu/libraries
    for nvcc in nvcc /usr/local/cuda/bin/nvcc; do
        if [[ -n ${CUDA_HOME:-} ]] || ! command -v "$nvcc" >/dev/null; then continue; fi
        toolkit=$("$nvcc" --dryrun -x cu -E /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p') || continue
        [[ ! -d $toolkit ]] || CUDA_HOME=$(realpath "$toolkit")
    done
    [[ -z ${CUDA_HOME:-} ]] || export CUDA_HOME
    for library in .venv-gpu/lib/python3.12/site-packages/nvidia/cu1*/lib/libcudart.so.1*; do
        [[ -e $library ]] || continue
        mkdir -p "$libraries" && ln -sfn "$PWD/$library" "$libraries/libcudart.so"
        export LIBRARY_PATH=$libraries${LIBRARY_PATH:+:$LIBRARY_PATH}
        export CPATH=${CPATH:+$CPATH:}$PWD/${library%/lib/*}/include:$PWD/.venv-gpu/carried/rollout/site/nvidia/cu13/include/cccl
    done
}

# A server would compile these when it first needs them, and others would wait for it.
compile_ahead() {
    [[ -d .venv-gpu/carried/rollout && ! -f .venv-gpu/compiled_ahead ]] && nvidia-smi >/dev/null 2>&1 || return 0
    if .venv-rollout/bin/python tools/prewarm.py >&2; then
        touch .venv-gpu/compiled_ahead
    else
        say "servers compile what is missing"
    fi
}

if [[ -x .venv/bin/megatron-rl ]]; then
    python=$PWD/.venv/bin/python
else
    make_from_bundle
    python=$PWD/.venv-gpu/bin/python
    # SGLang's tree in Rust reads tensors as a later torch lays them out, and a server refuses kernels that are as old as torch.
    export SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND=python SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK=1
    export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1 FLASH_ATTENTION_CUTE_DSL_CACHE_DIR=$PWD/.venv-gpu/flash_attention_4
    PATH="$(dirname "$machine"):$PATH"
    find_cuda
    compile_ahead
fi
export PATH="${python%/*}:$PATH" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

references=gpu-bundle/references
for stage in models training; do
    [[ " ${chosen[*]} " == *" $stage "* && ! -d $references/$stage ]] || continue
    [[ $python == "$PWD/.venv/"* ]] || fail "no $references/$stage, which has to be carried: to make it here takes minutes"
    say "making $references on the CPU"
    timeout "$LIMIT_S" "$python" tests/gpu/references.py "$references"
    break
done

mkdir -p "$out"
status=0
for stage in "${chosen[@]}"; do
    say "stage $stage, at most $((LIMIT_S / 60)) minutes"
    timeout --kill-after=20 "$LIMIT_S" "$python" -m pytest "tests/gpu/${files[$stage]}" -q -p no:cacheprovider \
        --timeout 450 --references "$references" --gpu-json "$out/$stage.json" "${options[@]}" || status=$?
done
say "results: $out"
exit "$status"
