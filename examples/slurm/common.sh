# shellcheck shell=bash
# Sourced by the *.sbatch files beside it, and by those that `megatron-rl launch slurm` writes: starts SGLang servers on some
# nodes of the job, each as a step of its own that is started again when it ends, and the trainer on the others. Saves and
# requeues when SLURM is about to end the job, and requeues after a failure as long as the run gets on. On a single node the
# trainer starts its servers itself, as its children. In a heterogeneous job component 0 trains and component 1 serves.
#
#   cd CHECKOUT && MODEL=/folder/of/the/model sbatch examples/slurm/NAME.sbatch [--section.key VALUE ...]
#
# Variables (exported, or in front of sbatch); SBATCH_ACCOUNT, SBATCH_PARTITION and SBATCH_TIMELIMIT are SLURM's own:
#   MODEL            Hugging Face folder of the model, on a file system that all nodes see             (required)
#   CONFIG           another config                                                     (default: that of the sbatch file)
#   COMMAND          train, or sft, reward or dpo, which have no servers: all nodes train                   (default: train)
#   TRAIN_DATA       training data, if not as in the config: data.path
#   EVAL_DATA        held-out data: data.eval_path
#   TRAIN_NODES      nodes of the trainer; the others serve                                (default: half of them)
#   TRAIN_GPUS       on a single node, GPUs of the trainer; the others serve (default: all; the servers share them in turn)
#   GPUS_PER_NODE    trainer processes a node                                  (default: SLURM's count of GPUs, or 1)
#   SERVER_NODE_GPUS GPUs of a node that serves, where it has others than one that trains     (default: GPUS_PER_NODE)
#   SERVER_GPUS      GPUs of one SGLang server; more than a node has: one over several nodes  (default: as in the sbatch file)
#   BRING_UP_S       longest wait for the servers                                                         (default: 1800)
#   SERVER_RESTARTS  times in a row that a server which ends within ten minutes is started again              (default: 5)
#   SERVER_SILENCE_S seconds without an answer after which a server that was there is started again         (default: 120)
#   GRACE_S          seconds after the signal to end at which the job is requeued though the trainer has not ended (default: 540)
#   MAX_FAILURES     attempts in a row that may end without a new checkpoint; then the job is not requeued   (default: 3)
#   CONTAINER, MOUNTS  image and mounts for pyxis, if the cluster has it
#   RUN_ROOT         where runs/ and logs/ go                                                  (default: the checkout)

: "${CONFIG:?the sbatch file must set CONFIG}"
: "${SLURM_JOB_ID:?submit this with sbatch}"
: "${MODEL:?set MODEL to the Hugging Face folder of the model}"

say() { printf '%s %s\n' "$(date +%H:%M:%S)" "$*"; }
fail() {
    say "error: $*" >&2
    exit 1
}

root=$SLURM_SUBMIT_DIR # SLURM runs a copy of the script, so its own folder says nothing
[[ -x $root/.venv/bin/megatron-rl ]] || fail "no $root/.venv: run tools/setup.sh first, where all nodes see the result"
[[ -f $MODEL/config.json ]] || fail "MODEL=$MODEL has no config.json"
cd "$root" || exit

umask 077
# By which the trainer's processes know each other's messages; srun hands it on.
MEGATRON_RL_RUN_KEY=$(od -An -N32 -tx1 /dev/urandom | tr -d ' \n')
export MEGATRON_RL_RUN_KEY

attempt=${SLURM_RESTART_COUNT:-0}
RUN_ROOT=${RUN_ROOT:-$root}
logs=$RUN_ROOT/logs/$SLURM_JOB_NAME-$SLURM_JOB_ID/attempt-$attempt
mkdir -p "$logs"
say "job $SLURM_JOB_ID, attempt $attempt on $SLURM_JOB_NODELIST; logs: $logs"

# -- who does what -----------------------------------------------------------------------------------------------------

COMMAND=${COMMAND:-train}
TRAIN_NODES=${TRAIN_NODES:-}
GPUS_PER_NODE=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
SERVER_NODE_GPUS=${SERVER_NODE_GPUS:-$GPUS_PER_NODE} # SLURM counts those of component 0 alone
SERVER_GPUS=${SERVER_GPUS:-1}
BRING_UP_S=${BRING_UP_S:-1800}
trainers=$GPUS_PER_NODE own=() # processes a node; settings of servers that the trainer starts
train_part=() server_part=()   # components of a heterogeneous job
mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
if [[ -n ${SLURM_HET_SIZE:-} ]]; then
    ((SLURM_HET_SIZE == 2)) || fail "a heterogeneous job has two components here, trainer : servers, and not $SLURM_HET_SIZE"
    mapfile -t train_nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_0")
    mapfile -t server_nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST_HET_GROUP_1")
    train_part=(--het-group=0) server_part=(--het-group=1)
elif [[ $COMMAND != train ]]; then
    train_nodes=("${nodes[@]}") server_nodes=()
elif ((${#nodes[@]} == 1)); then
    train_nodes=("${nodes[@]}") server_nodes=()
    trainers=${TRAIN_GPUS:-$GPUS_PER_NODE}
    ((trainers >= 1 && trainers <= GPUS_PER_NODE)) || fail "TRAIN_GPUS=$trainers of the node's $GPUS_PER_NODE"
    ((trainers < GPUS_PER_NODE)) || own=(--rollout.colocate true)
    own+=(--sync.transport tensor)
else
    TRAIN_NODES=${TRAIN_NODES:-$((${#nodes[@]} / 2))}
    ((TRAIN_NODES >= 1 && TRAIN_NODES < ${#nodes[@]})) || fail "TRAIN_NODES=$TRAIN_NODES of ${#nodes[@]} leaves none to serve"
    train_nodes=("${nodes[@]:0:TRAIN_NODES}") server_nodes=("${nodes[@]:TRAIN_NODES}")
fi
servers_per_node=$((SERVER_NODE_GPUS / SERVER_GPUS)) nodes_per_server=1
if ((SERVER_GPUS > SERVER_NODE_GPUS)); then
    servers_per_node=1 nodes_per_server=$((SERVER_GPUS / SERVER_NODE_GPUS))
fi
if ((${#server_nodes[@]})); then
    ((SERVER_NODE_GPUS % SERVER_GPUS == 0 || SERVER_GPUS % SERVER_NODE_GPUS == 0)) ||
        fail "SERVER_GPUS=$SERVER_GPUS and the $SERVER_NODE_GPUS GPUs of a node that serves: one must divide the other"
    ((${#server_nodes[@]} % nodes_per_server == 0)) ||
        fail "SERVER_GPUS=$SERVER_GPUS is $nodes_per_server nodes a server, which do not divide the ${#server_nodes[@]} that serve"
fi
servers=$((servers_per_node * (${#server_nodes[@]} / nodes_per_server)))

join() {
    local IFS=,
    printf '%s' "$*"
}

# Names of nodes need not resolve on the nodes themselves; the address that SLURM uses does.
address_of() { scontrol show node "$1" -o | sed -n 's/.* NodeAddr=\([^ ]*\).*/\1/p'; }

MASTER_ADDR=$(address_of "${train_nodes[0]}")
MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))
export MASTER_ADDR MASTER_PORT SERVER_GPUS
ulimit -n "$(ulimit -Hn)" # one socket a request, hundreds of requests

settings=(--model.path "$MODEL" --runs_dir "$RUN_ROOT/runs" --rollout.server.tensor "$SERVER_GPUS")
[[ -z ${TRAIN_DATA:-} ]] || settings+=(--data.path "$TRAIN_DATA")
[[ -z ${EVAL_DATA:-} ]] || settings+=(--data.eval_path "$EVAL_DATA")
((!servers)) || settings+=(--rollout.address_folder "$logs" --rollout.server.count "$servers"
    --rollout.server.start_timeout_s "$BRING_UP_S")
settings+=("${own[@]}")

# --overlap: all steps hold the whole job's resources; --kill-on-bad-exit: one lost rank ends its step.
step=(srun --overlap --exact --kill-on-bad-exit=1 --mem=0 --unbuffered)
gpus=() server_node_gpus=()
((${SLURM_GPUS_ON_NODE:-0} == 0)) || gpus=(--gpus-per-node="$SLURM_GPUS_ON_NODE")
((${#gpus[@]} == 0)) || server_node_gpus=(--gpus-per-node="$SERVER_NODE_GPUS")
container=()
[[ -z ${CONTAINER:-} ]] || container=(--container-image="$CONTAINER" --container-mounts="${MOUNTS:-$root:$root}"
    --container-workdir="$root" --no-container-mount-home)

start_step() { # log, nodes, tasks a node, command ...; srun in the background
    local log=$1 list=$2 tasks=$3
    local count
    count=$(tr ',' '\n' <<<"$list" | wc -l)
    shift 3
    "${step[@]}" --job-name="$step_name" "${part[@]}" "${gpus[@]}" "${container[@]}" --nodes="$count" --ntasks=$((count * tasks)) \
        --ntasks-per-node="$tasks" --cpus-per-task=$((${SLURM_CPUS_ON_NODE:-tasks} / tasks)) --nodelist="$list" \
        --output="$log" --open-mode=append "$@" &
}

# -- start, watch, end -------------------------------------------------------------------------------------------------

ending=0 told=0 train_pid='' server_pids=()

# SLURM sends USR1 to this script some minutes before the job's end (#SBATCH --signal) or at a preemption. Rank processes
# that get it save and end. It may come more than once.
on_signal() {
    ((ending)) || told=$SECONDS
    ending=1
    say "told to end: the trainer saves"
    [[ -z $train_pid ]] || kill -USR1 "$train_pid" 2>/dev/null || true
}
trap on_signal USR1 TERM

stop() {
    local pid
    for pid in $train_pid "${server_pids[@]}"; do
        kill -TERM "$pid" 2>/dev/null || true
    done
    wait
}
trap stop EXIT

alive() { [[ -n $1 ]] && kill -0 "$1" 2>/dev/null; }

pause() { # a sleep that a signal interrupts
    sleep "$1" &
    wait $! || true
}

newest() { # the step of a run's newest checkpoint, or -1
    local last
    last=$(find "$1/checkpoints" -maxdepth 1 -regex '.*/step_[0-9]+' 2>/dev/null | sort | tail -n 1)
    if [[ -n $last ]]; then printf '%s' "$((10#${last##*_}))"; else printf '%s' -1; fi
}

finished() { # has the run made all its steps, and saved after the last one?
    local steps
    steps=$(.venv/bin/python -c 'import sys, yaml; print(yaml.safe_load(open(sys.argv[1]))["steps"])' "$1/config.yaml" 2>/dev/null)
    [[ -n $steps ]] && (($(newest "$1") >= steps))
}

run_folder() { # of a config and its settings
    .venv/bin/python - "$@" <<'END'
import sys
from megatron_rl.config.load import load_config
from megatron_rl.errors import UserError
try:
    print(load_config(sys.argv[1], sys.argv[2:]).run_dir)
except UserError as error:
    sys.exit(f"error: {error}")
END
}

# Attempts that brought the run no further are counted, so that a job which can never get on does not come back for ever.
requeue() { # the run's folder, why
    local file=$RUN_ROOT/logs/$SLURM_JOB_NAME-$SLURM_JOB_ID/failures count=0 most=${MAX_FAILURES:-3}
    [[ ! -f $file ]] || read -r count <"$file"
    count=$(($(newest "$1") > saved_before ? 0 : count + 1))
    echo "$count" >"$file"
    ((!ending)) || most=$((most > 10 ? most : 10)) # a full cluster may push a job aside several times before it has started
    ((count < most)) ||
        fail "$2; and $count attempts in a row ended without a new checkpoint (MAX_FAILURES): not requeued"
    say "$2: requeueing job $SLURM_JOB_ID; the next attempt goes on from the newest checkpoint"
    scontrol requeue "$SLURM_JOB_ID" || fail "could not requeue: submit the job again, it goes on from its checkpoint"
    pause 60 # SLURM ends this attempt meanwhile
    exit 0
}

end_step() { # name
    local found
    found=$(squeue --noheader --steps --jobs="$SLURM_JOB_ID" --format="%i %j" | awk -v name="$1" '$2 == name {print $1}')
    # shellcheck disable=SC2086 # one word a step
    [[ -z $found ]] || scancel $found
}

keep_server() { # number, nodes, place on its node: a server, and another one whenever it ends
    local number=$1 list=$2 place=$3 log=$logs/server-$1.log
    local file=$logs/server-$1.address lives=0 seen=0 started status pid='' step_name=server-$1
    local part=("${server_part[@]}") gpus=("${server_node_gpus[@]}")
    trap 'kill -TERM $pid 2>/dev/null; wait $pid; exit 0' TERM
    trap '' USR1
    while true; do
        started=$SECONDS status=0
        start_step "$log" "$list" 1 bash "$root/examples/slurm/task.sh" serve "$logs" "$CONFIG" "$number" "$place" \
            "${settings[@]}"
        pid=$!
        seen=0
        while alive "$pid"; do
            sleep 5 &
            wait $! || true
            if [[ -f $file ]] && curl --silent --fail --max-time 30 "$(<"$file")/ready" >/dev/null; then
                seen=$SECONDS
            elif ((SECONDS - (seen ? seen : started + BRING_UP_S) > ${SERVER_SILENCE_S:-120})); then
                # srun itself may wait for ever for a node that was lost.
                say "server $number gives no sign of life: its step is ended"
                end_step "server-$number" || true # the controller may be busy with the same node
                kill -KILL "$pid" 2>/dev/null || true
                break
            fi
        done
        wait "$pid" || status=$?
        rm -f "$file"
        ((SECONDS - started < 600)) || lives=0
        if ((++lives > ${SERVER_RESTARTS:-5})); then
            say "error: server $number ended $lives times in a row: not started again, see $log" >&2
            return 1
        fi
        say "server $number ended with status $status (see $log): started again"
        sleep 5 &
        pid=$!
        wait "$pid"
    done
}

start_servers() {
    local number first
    for ((number = 0; number < servers; number++)); do
        first=$((nodes_per_server * (number / servers_per_node)))
        keep_server "$number" "$(join "${server_nodes[@]:first:nodes_per_server}")" $((number % servers_per_node)) &
        server_pids+=($!)
    done
    say "$servers SGLang server(s) of $SERVER_GPUS GPU(s) on $(join "${server_nodes[@]}"), $logs/server-*.log"
}

run_job() { # settings of the config, which come after the ones above
    settings+=("$@")
    local run status part=("${train_part[@]}") step_name=trainer
    run=$(run_folder "$CONFIG" "${settings[@]}") || exit
    saved_before=$(newest "$run")
    touch "$logs/started"
    ((!servers)) || start_servers
    start_step "$logs/trainer-%t.log" "$(join "${train_nodes[@]}")" "$trainers" \
        bash "$root/examples/slurm/task.sh" "$COMMAND" "$logs" "$CONFIG" "${settings[@]}"
    train_pid=$!
    say "trainer: $((${#train_nodes[@]} * trainers)) processes on $(join "${train_nodes[@]}"), $logs/trainer-0.log"

    while alive "$train_pid"; do
        pause 2
        ((!ending || SECONDS - told < ${GRACE_S:-540})) || requeue "$run" "the step at hand takes longer than GRACE_S"
    done
    status=0
    wait "$train_pid" || status=$?
    train_pid=''
    ((!status)) || tail -n 20 "$logs/trainer-0.log" >&2 || true
    if ((ending)) && ! finished "$run"; then
        requeue "$run" "told to end"
    fi
    # Status 2 before the first step is an error for a person to mend; later it may be of lost servers.
    if ((status == 2)) && [[ ! $run/metrics.jsonl -nt $logs/started ]]; then
        fail "the trainer ended with status $status: see $logs/trainer-*.log"
    elif ((status)); then
        requeue "$run" "the trainer ended with status $status (see $logs/trainer-*.log)"
    fi
    say "done: $run"
}
