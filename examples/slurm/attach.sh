#!/usr/bin/env bash
# A shell on a node of a running job, beside its processes:  examples/slurm/attach.sh JOB [NODE]
set -euo pipefail
job=${1:?usage: attach.sh JOB [NODE]}
node=${2:-$(squeue --noheader --jobs="$job" --format=%B)}
exec srun --jobid="$job" --overlap --nodelist="$node" --nodes=1 --ntasks=1 --pty bash -i
