#!/usr/bin/env bash
# The tests that need a GPU, in stages of at most ten minutes each; one JSON file a stage with commit, versions and device.
#
#   tests/gpu/run.sh STAGE [FOLDER]      STAGE: start | kernels | models | training | slices | invariance | batch_invariant | all
#
# FOLDER gets STAGE.json (default: gpu-results). The environment is .venv where tools/setup.sh has made one. On a machine
# without a network it is made from gpu-bundle/, which tests/gpu/bundle.py packed elsewhere, around the python3 that has torch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

stages=(start kernels models training slices invariance batch_invariant)
declare -A files=([start]=test_1_start.py [kernels]=test_2_kernels.py [models]=test_3_models.py
    [training]=test_4_training.py [slices]=test_5_slices.py [invariance]=test_7_invariance.py
    [batch_invariant]=test_8_batch_invariant.py)
LIMIT_S=600

say() { printf 'gpu: %s\n' "$*" >&2; }
usage() { sed -n '2,7s/^# \{0,1\}//p' "$0"; }

stage=${1:-}
out=${2:-gpu-results}
case $stage in
    -h | --help) usage && exit 0 ;;
    all) chosen=("${stages[@]}") ;;
    *)
        [[ -n $stage && -n ${files[$stage]:-} ]] || { usage >&2 && say "error: no stage '$stage'" && exit 2; }
        chosen=("$stage")
        ;;
esac

# The package and its kernels are built here in either case: they must fit this machine's torch.
make_from_bundle() {
    local python
    python=$(command -v python3.12 || command -v python3)
    "$python" -c 'import torch' || { say "error: $python has no torch" && exit 1; }
    say "making .venv-gpu around $python from gpu-bundle/"
    "$python" -m venv --system-site-packages .venv-gpu
    # Where that python is an environment's own, the packages to see are that environment's, not those of its base.
    "$python" -c 'import site; print(*site.getsitepackages(), sep="\n")' > \
        "$(.venv-gpu/bin/python -c 'import site; print(site.getsitepackages()[0])')/the_other.pth"
    find gpu-bundle -name '*.whl' -print0 |
        xargs -0 .venv-gpu/bin/python -m pip install --quiet --no-index --no-deps --no-compile --disable-pip-version-check
    .venv-gpu/bin/python -m pip install --quiet --no-index --no-deps --no-build-isolation --disable-pip-version-check \
        --editable .
    touch .venv-gpu/.complete
}

if [[ -x .venv/bin/megatron-rl ]]; then
    python=$PWD/.venv/bin/python
else
    [[ -f .venv-gpu/.complete ]] || make_from_bundle
    python=$PWD/.venv-gpu/bin/python
fi
export PATH="${python%/*}:$PATH" HF_HUB_OFFLINE=1 PYTHONUNBUFFERED=1

references=gpu-bundle/references
if [[ " ${chosen[*]} " == *" models "* || " ${chosen[*]} " == *" training "* ]] && [[ ! -d $references ]]; then
    say "making $references on the CPU"
    timeout "$LIMIT_S" "$python" tests/gpu/references.py "$references"
fi

mkdir -p "$out"
status=0
for stage in "${chosen[@]}"; do
    say "stage $stage, at most $((LIMIT_S / 60)) minutes"
    timeout --kill-after=20 "$LIMIT_S" "$python" -m pytest "tests/gpu/${files[$stage]}" -q -p no:cacheprovider \
        --timeout 450 --references "$references" --gpu-json "$out/$stage.json" || status=$?
done
say "results: $out"
exit "$status"
