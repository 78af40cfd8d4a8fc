# shellcheck shell=bash
# Sourced by the *.sbatch files beside it: starts SGLang servers on some nodes of the job and the trainer on the others,
# watches both, and saves and requeues when SLURM is about to end the job. On a single node the trainer starts its servers
# itself, as its children.
#
#   cd CHECKOUT && MODEL=/folder/of/the/model sbatch examples/slurm/NAME.sbatch [--section.key VALUE ...]
#
# Variables (exported, or in front of sbatch); SBATCH_ACCOUNT, SBATCH_PARTITION and SBATCH_TIMELIMIT are SLURM's own:
#   MODEL            Hugging Face folder of the model, on a file system that all nodes see             (required)
#   CONFIG           another config                                                     (default: that of the sbatch file)
#   TRAIN_DATA       training data, if not as in the config: data.path
#   EVAL_DATA        held-out data: data.eval_path
#   TRAIN_NODES      nodes of the trainer; the others serve                                (default: half of them)
#   TRAIN_GPUS       on a single node, GPUs of the trainer; the others serve (default: all; the servers share them in turn)
#   GPUS_PER_NODE    trainer processes a node                                  (default: SLURM's count of GPUs, or 1)
#   SERVER_GPUS      GPUs of one SGLang server                                      (default: as in the sbatch file)
#   BRING_UP_S       seconds until all servers must answer                                                (default: 1800)
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

attempt=${SLURM_RESTART_COUNT:-0}
RUN_ROOT=${RUN_ROOT:-$root}
logs=$RUN_ROOT/logs/$SLURM_JOB_NAME-$SLURM_JOB_ID/attempt-$attempt
mkdir -p "$logs"
say "job $SLURM_JOB_ID, attempt $attempt on $SLURM_JOB_NODELIST; logs: $logs"

# -- who does what -----------------------------------------------------------------------------------------------------

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
TRAIN_NODES=${TRAIN_NODES:-$((${#nodes[@]} > 1 ? ${#nodes[@]} / 2 : 1))}
GPUS_PER_NODE=${GPUS_PER_NODE:-${SLURM_GPUS_ON_NODE:-1}}
SERVER_GPUS=${SERVER_GPUS:-1}
trainers=$GPUS_PER_NODE own=() # processes a node; settings of servers that the trainer starts
if ((${#nodes[@]} == 1)); then
    trainers=${TRAIN_GPUS:-$GPUS_PER_NODE}
    ((trainers >= 1 && trainers <= GPUS_PER_NODE)) || fail "TRAIN_GPUS=$trainers of the node's $GPUS_PER_NODE"
    ((trainers < GPUS_PER_NODE)) || own=(--rollout.colocate true)
    own+=(--sync.transport tensor)
else
    ((TRAIN_NODES >= 1 && TRAIN_NODES < ${#nodes[@]})) || fail "TRAIN_NODES=$TRAIN_NODES of ${#nodes[@]} leaves none to serve"
    ((GPUS_PER_NODE % SERVER_GPUS == 0)) || fail "SERVER_GPUS=$SERVER_GPUS does not divide GPUS_PER_NODE=$GPUS_PER_NODE"
fi
train_nodes=("${nodes[@]:0:TRAIN_NODES}")
server_nodes=("${nodes[@]:TRAIN_NODES}")
servers_per_node=$((GPUS_PER_NODE / SERVER_GPUS))
servers=$((${#server_nodes[@]} * servers_per_node))

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
settings+=("${own[@]}" "$@")

# --overlap: both steps hold the whole job's resources; --kill-on-bad-exit: one lost rank ends its step.
step=(srun --overlap --exact --kill-on-bad-exit=1 --mem=0 --unbuffered)
gpus=()
((${SLURM_GPUS_ON_NODE:-0} == 0)) || gpus=(--gpus-per-node="$SLURM_GPUS_ON_NODE")
container=()
[[ -z ${CONTAINER:-} ]] || container=(--container-image="$CONTAINER" --container-mounts="${MOUNTS:-$root:$root}"
    --container-workdir="$root" --no-container-mount-home)

start_step() { # log, nodes, tasks a node, command ...
    local log=$1 list=$2 tasks=$3
    local count
    count=$(tr ',' '\n' <<<"$list" | wc -l)
    shift 3
    "${step[@]}" "${gpus[@]}" "${container[@]}" --nodes="$count" --ntasks=$((count * tasks)) \
        --ntasks-per-node="$tasks" --cpus-per-task=$((${SLURM_CPUS_ON_NODE:-tasks} / tasks)) --nodelist="$list" \
        --output="$log" --open-mode=append "$@" &
}

# -- start, watch, end -------------------------------------------------------------------------------------------------

ending=0 server_pid='' train_pid=''

# SLURM sends USR1 to this script some minutes before the job's end (#SBATCH --signal) or at a preemption. Rank processes
# that get it save after their current step and end. It may come more than once.
on_signal() {
    ending=1
    say "told to end: the trainer saves after its current step"
    [[ -z $train_pid ]] || kill -USR1 "$train_pid" 2>/dev/null || true
}
trap on_signal USR1 TERM

stop() {
    local pid
    for pid in $train_pid $server_pid; do
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

finished() { # has the run made all its steps, and saved after the last one?
    .venv/bin/python - "$1" <<'END'
import pathlib, sys, yaml
run = pathlib.Path(sys.argv[1])
steps = yaml.safe_load((run / "config.yaml").read_text())["steps"]
sys.exit(not (run / "checkpoints" / f"step_{steps:06d}").is_dir())
END
}

requeue() {
    say "requeueing job $SLURM_JOB_ID; the next attempt goes on from the newest checkpoint"
    scontrol requeue "$SLURM_JOB_ID" || fail "could not requeue: submit the job again, it goes on from its checkpoint"
    pause 60 # SLURM ends this attempt meanwhile
    exit 0
}

start_servers() { # waits until all answer; their addresses go into `addresses`
    local deadline file i
    start_step "$logs/server-%t.log" "$(join "${server_nodes[@]}")" "$servers_per_node" \
        bash "$root/examples/slurm/task.sh" serve "$logs" "$CONFIG" "${settings[@]}"
    server_pid=$!
    say "$servers SGLang server(s) of $SERVER_GPUS GPU(s) on $(join "${server_nodes[@]}")"

    deadline=$((SECONDS + ${BRING_UP_S:-1800}))
    for ((i = 0; i < servers; i++)); do
        file=$logs/server-$i.address
        until [[ -f $file ]] && curl --silent --fail --max-time 5 "$(<"$file")/ready" >/dev/null; do
            ((!ending)) || requeue
            if ! alive "$server_pid"; then
                tail -n 20 "$logs/server-$i.log" >&2 || true
                fail "server $i ended before it was ready: see $logs/server-$i.log"
            fi
            ((SECONDS < deadline)) || fail "server $i did not answer within ${BRING_UP_S:-1800} s: see $logs/server-$i.log"
            pause 2
        done
        addresses+=("$(<"$file")")
    done
    say "servers are ready: ${addresses[*]}"
}

run_job() { # the sbatch file's own arguments
    local name status addresses=()
    name=$(sed -n 's/^name: *//p' "$CONFIG")
    for ((i = 0; i < $#; i++)); do
        [[ ${*:i+1:1} != --name ]] || name=${*:i+2:1}
    done
    ((!servers)) || start_servers
    start_step "$logs/trainer-%t.log" "$(join "${train_nodes[@]}")" "$trainers" \
        bash "$root/examples/slurm/task.sh" train "$logs" "$CONFIG" "${settings[@]}" \
        --rollout.addresses "[$(join "${addresses[@]}")]"
    train_pid=$!
    say "trainer: $((TRAIN_NODES * trainers)) processes on $(join "${train_nodes[@]}"), $logs/trainer-0.log"

    while alive "$train_pid" && { ((!servers)) || alive "$server_pid"; }; do
        pause 2
    done
    if alive "$train_pid"; then # it cannot go on without servers, but may just be ending
        pause 20
        if alive "$train_pid"; then
            fail "a server ended while the trainer ran: see $logs/server-*.log"
        fi
    fi
    status=0
    wait "$train_pid" || status=$?
    train_pid=''
    if ((ending)) && ! finished "$RUN_ROOT/runs/$name"; then
        requeue
    fi
    if ((status)); then
        tail -n 20 "$logs/trainer-0.log" >&2 || true
        fail "the trainer ended with status $status: see $logs/trainer-*.log"
    fi
    say "done: $RUN_ROOT/runs/$name"
}
