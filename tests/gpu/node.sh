#!/usr/bin/env bash
# What one GPU cannot show, on a whole node after `tools/setup.sh --gpu`: the five stages with Transformer Engine, then
# parallel layouts over NCCL, pushes to servers on GPUs of their own, several servers, colocated ones, and FP8.
#
#   tests/gpu/node.sh [FOLDER]      FOLDER gets STAGE.json of each (default: gpu-results)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."

case ${1:-} in -h | --help) sed -n '2,5s/^# \{0,1\}//p' "$0" && exit 0 ;; esac
out=${1:-gpu-results}
tools/setup.sh --gpu
status=0
tests/gpu/run.sh all "$out" || status=$?
timeout --kill-after=20 5400 .venv/bin/python -m pytest tests/gpu/test_6_node.py -q -p no:cacheprovider --timeout 1200 \
    --gpu-json "$out/node.json" || status=$?
exit "$status"
