#!/usr/bin/env bash
# One process of a job step of common.sh:
#   task.sh train|sft|reward|dpo LOGS CONFIG [--section.key VALUE ...]
#   task.sh serve LOGS CONFIG NUMBER PLACE [--section.key VALUE ...]    PLACE: which of its node's servers it is
set -euo pipefail

role=$1 logs=$2 config=$3
shift 3

address=$(scontrol show node "$SLURMD_NODENAME" -o | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')

export NCCL_CUMEM_ENABLE=${NCCL_CUMEM_ENABLE:-0} # the same on both sides of the weights' group; SGLang's own default

# gloo asks the host's name for its address, which on a cluster is often that of the wrong network.
interface_to() {
    local found
    found=$(ip -o -4 address show to "$(getent ahostsv4 "$1" | awk 'NR == 1 {print $1}')" | awk 'NR == 1 {print $2}')
    printf '%s' "${found:-$(ip -o route get "$1" | sed -n 's/.* dev \([^ ]*\).*/\1/p')}"
}
if [[ -z ${GLOO_SOCKET_IFNAME:-} ]] && command -v ip >/dev/null; then
    GLOO_SOCKET_IFNAME=$(interface_to "$MASTER_ADDR")
    export GLOO_SOCKET_IFNAME
fi

case $role in
    serve)
        number=$1 place=$2
        shift 2
        if [[ -n ${CUDA_VISIBLE_DEVICES:-} ]]; then # this server's share of the node's GPUs
            IFS=, read -ra devices <<<"$CUDA_VISIBLE_DEVICES"
            share=("${devices[@]:place * SERVER_GPUS:SERVER_GPUS}")
            CUDA_VISIBLE_DEVICES=$(IFS=, && printf '%s' "${share[*]}")
            export CUDA_VISIBLE_DEVICES
        fi
        several=() # one server over several nodes
        if ((${SLURM_STEP_NUM_NODES:-1} > 1)); then
            first=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | head -n 1)
            first=$(scontrol show node "$first" -o | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p')
            several=(--nodes "$SLURM_STEP_NUM_NODES" --node-rank "$SLURM_PROCID"
                --meet "$first:$((30000 + (SLURM_JOB_ID + number * 97) % 10000))")
        fi
        exec .venv/bin/python tools/serve.py "$config" "$@" --host "$address" \
            --address-file "$logs/server-$number.address" "${several[@]}"
        ;;
    train | sft | reward | dpo)
        # One task for each process, and no torchrun in between: signals and exit codes arrive as they are.
        export RANK=$SLURM_PROCID LOCAL_RANK=$SLURM_LOCALID WORLD_SIZE=$SLURM_NTASKS
        export LOCAL_WORLD_SIZE=$((SLURM_NTASKS / ${SLURM_STEP_NUM_NODES:-1}))
        export OMP_NUM_THREADS=${OMP_NUM_THREADS:-${SLURM_CPUS_PER_TASK:-1}}
        exec .venv/bin/megatron-rl "$role" "$config" "$@"
        ;;
    *)
        echo "task.sh: unknown role '$role'" >&2
        exit 2
        ;;
esac
