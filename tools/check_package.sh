#!/usr/bin/env bash
# Builds the sdist and a wheel from it, and checks that the wheel works in an empty environment. Compiling the kernels takes minutes.
# The build is isolated, so it also downloads torch.
set -euo pipefail

usage() {
    cat <<'END'
usage: tools/check_package.sh [--wheel FILE] [FOLDER]

Builds sdist and wheel into FOLDER (default: dist), checks their metadata, and installs the wheel into an empty environment.
There doctor, keys, plan, launch --dry-run, status and report must work, and train must name the remedy.

  --wheel FILE  check this wheel instead of building one
END
}

wheel="" out=dist
while (($#)); do
    case $1 in
        --wheel) wheel=$(realpath "$2") && shift ;;
        -h | --help) usage && exit 0 ;;
        -*) usage >&2 && exit 1 ;;
        *) out=$1 ;;
    esac
    shift
done

say() { printf 'check_package: %s\n' "$*" >&2; }
fail() { say "error: $*" && exit 1; }

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
unset PYTHONPATH PYTHONHOME VIRTUAL_ENV
python=${PYTHON:-python3.12}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

if [[ -z $wheel ]]; then
    "$python" -m venv "$work/tools"
    "$work/tools/bin/python" -m pip install --quiet --disable-pip-version-check build twine
    mkdir -p "$out"
    out=$(realpath "$out")
    started=$SECONDS
    "$work/tools/bin/python" -m build --outdir "$work/built" "$root" >"$work/log" 2>&1 || { tail -n 40 "$work/log" >&2 && fail "build"; }
    say "sdist and wheel were built in $((SECONDS - started)) s"
    "$work/tools/bin/twine" check --strict "$work"/built/*
    cp "$work"/built/* "$out/"
    wheel=$out/$(basename "$work"/built/*.whl)
fi

started=$SECONDS
"$python" -m venv "$work/empty"
"$work/empty/bin/python" -m pip install --quiet --disable-pip-version-check "$wheel"
say "$(basename "$wheel") was installed in $((SECONDS - started)) s, $(du -sh "$work/empty" | cut -f1) with all that it needs"
if "$work/empty/bin/python" -c "import torch" 2>/dev/null; then fail "the wheel alone brings torch"; fi

# Files of a user: a folder with a model's config.json, a config, and a run's folder.
mkdir -p "$work/user/model" "$work/user/run" && cd "$work/user"
cat >model/config.json <<'END'
{"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
 "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144, "moe_intermediate_size": 768,
 "num_experts": 128, "num_experts_per_tok": 8, "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-06,
 "decoder_sparse_step": 1, "norm_topk_prob": true, "hidden_act": "silu", "tie_word_embeddings": false}
END
printf 'name: mine\nmodel:\n  path: model\ndata:\n  task: number_sorting\nparallel:\n  expert: 8\n' >config.yaml
printf 'name: run\nsteps: 2\n' >run/config.yaml
printf '{"step": %s, "reward/mean": 0.5, "time/step_s": 3.0}\n' 1 2 >run/metrics.jsonl

expect() { # STATUS TEXT COMMAND...
    local status=0 started=$EPOCHREALTIME
    "$work/empty/bin/megatron-rl" "${@:3}" >"$work/said" 2>&1 || status=$?
    [[ $status == "$1" ]] || { cat "$work/said" >&2 && fail "megatron-rl ${*:3}: status $status, expected $1"; }
    grep -q -e "$2" "$work/said" || { cat "$work/said" >&2 && fail "megatron-rl ${*:3}: does not say '$2'"; }
    say "megatron-rl ${*:3}: $(awk -v a="$started" -v b="$EPOCHREALTIME" 'BEGIN { printf "%.1f", b - a }') s"
}
expect 0 megatron-rl --help
expect 1 "megatron-rl setup" doctor --json
expect 0 rollout.server.python keys rollout.server
expect 0 "30.53 B parameters" plan config.yaml
expect 0 "run_job" launch slurm config.yaml --nodes 2 --dry-run
expect 0 "2 of 2" status run
expect 0 "report.html" report run
expect 2 "megatron-rl setup" train config.yaml
expect 0 "trainer-only" setup --help
say "all is well"
