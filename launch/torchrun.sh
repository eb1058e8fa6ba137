#!/usr/bin/env bash
# Start a training job:   launch/torchrun.sh +experiment=quickstart [key=value ...]
#
#   NPROC         processes on this node; default: one a GPU, or 2 without GPUs
#   RUN_DIR       the run's folder; default: runs/<experiment>-<time>. Starting again with the same one resumes.
#   MAX_RESTARTS  how often the processes are started again after a failure; they resume from the last checkpoint. Default 0
#   MODULE        what runs: train.main (default), train.commands.compare, train.evaluate, ...importance, ...vectors
#
# On several nodes run the same line on each, and also set:
#   NNODES        number of nodes
#   NODE_RANK     0 .. NNODES-1; node 0 hosts the rendezvous
#   MASTER_ADDR   host name of node 0;  MASTER_PORT: default 29500
#   RUN_DIR       must be given, one folder that all nodes see
#   INTERFACE     network interface on which the run listens, e.g. eth1; default: all. A run of one node listens on lo alone
# Nodes wait for one another for runtime.collective_timeout seconds, 600 unless an argument sets it.
# MAX_RESTARTS has to be set on each: when a rank fails, all nodes start theirs again, and a lost node can be replaced.
#
# Told to stop by SIGTERM or SIGUSR1, the run saves a checkpoint within 30 seconds and ends with status 75; the same command
# with the same RUN_DIR resumes from it.
#
# Rank 0 writes to the console and RUN_DIR/train.log. The other processes' output and every rank's error.json, with the
# traceback, are under RUN_DIR/logs.
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
fail() { echo "launch/torchrun.sh: $*" >&2; exit 2; }

command -v torchrun >/dev/null || fail "torchrun is not on the PATH; run: source $root/.venv/bin/activate"

if [[ -z ${NPROC:-} ]]; then
  if [[ $(nvidia-smi -L 2>/dev/null) == GPU* ]]; then NPROC=gpu; else NPROC=2; fi  # gpu: torchrun counts the visible ones
fi

if [[ ${NNODES:-1} == 1 ]]; then
  rendezvous=(--standalone)
else
  for name in RUN_DIR NODE_RANK MASTER_ADDR; do
    [[ -n ${!name:-} ]] || fail "NNODES=$NNODES needs $name, the same RUN_DIR and MASTER_ADDR on every node"
  done
  is_host=$([[ $NODE_RANK == 0 ]] && echo true || echo false)
  seconds=$(printf '%s\n' "$@" |
            awk -F= 'BEGIN {s = 600} $1 ~ /^[+]*runtime[.]collective_timeout$/ {s = $2} END {printf "%d", s < 1 ? 1 : s}')
  rendezvous=(--nnodes "$NNODES" --rdzv-backend c10d --rdzv-endpoint "$MASTER_ADDR:${MASTER_PORT:-29500}"
              --rdzv-id "$(basename "$RUN_DIR")" --rdzv-conf "is_host=$is_host,join_timeout=$seconds")
fi

if [[ -z ${RUN_DIR:-} ]]; then
  experiment=$(printf '%s\n' "$@" | sed -n 's/^+experiment=//p' | tr -d '[]' | tr ',/' '--')
  name=runs/${experiment:-run}-$(date +%Y%m%d-%H%M%S) number=1
  RUN_DIR=$name
  mkdir -p runs
  until mkdir "$RUN_DIR" 2>/dev/null; do  # runs that start in one second do not share a folder
    [[ -e $RUN_DIR ]] || fail "$RUN_DIR cannot be made; name another RUN_DIR"
    RUN_DIR=$name-$((number += 1))
  done
fi
mkdir -p "$RUN_DIR"
RUN_DIR=$(cd "$RUN_DIR" && pwd)

export RUN_DIR
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}  # the trainer sets torch's threads itself
if [[ -e $root/pyproject.toml ]]; then  # a checkout; what a wheel has installed is found without
  export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
fi

# torchrun takes no more than these ranks here. Rank 0 keeps the terminal, for its progress bar.
to_files=1:3,2:3,3:3,4:3,5:3,6:3,7:3,8:3,9:3

exec python3 -m launch.agent "${rendezvous[@]}" --nproc-per-node "$NPROC" --max-restarts "${MAX_RESTARTS:-0}" \
  --log-dir "$RUN_DIR/logs" --redirects "$to_files" -m "${MODULE:-train.main}" "$@"
