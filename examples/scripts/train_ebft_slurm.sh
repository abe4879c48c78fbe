#!/usr/bin/env bash
#SBATCH --job-name=openrlhf-ebft
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@300
#SBATCH --output=slurm-%j.log
# One Ray cluster over the nodes of a Slurm allocation, and one training run on it. Submit from this clone, which lies
# on storage that every node sees:
#   sbatch examples/scripts/train_ebft_slurm.sh
#   DRY_RUN=1 examples/scripts/train_ebft_slurm.sh                             # check only, without Slurm
# Five minutes before the time limit Slurm sends SIGTERM: the run finishes its step and saves (checkpoint.on_interrupt).
# Submitting the same command again goes on from there.
set -euo pipefail
NODES="${NODES:-2}" # for a dry run: as many as above
# Slurm runs a copy of this script from its spool folder.
# shellcheck source-path=SCRIPTDIR source=common.sh
source "${SLURM_SUBMIT_DIR:-$(dirname "${BASH_SOURCE[0]}")/../..}/examples/scripts/common.sh"

CONFIG="${CONFIG:-ray_configs/two_nodes.yaml}"
if [ "${DRY_RUN:-0}" = 1 ]; then
  dry_run "$CONFIG" --logging.root "$RUNS" "$@"
  exit
fi

# pause: two seconds, unless the cluster takes longer than ten minutes to start
pause() {
  if [ "$SECONDS" -gt 600 ]; then
    echo "error: the Ray cluster of $SLURM_JOB_NUM_NODES nodes is not up after ten minutes" >&2
    exit 1
  fi
  sleep 2
}

PORT="${PORT:-6379}"
HEAD_NAME="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)"
HEAD_ADDRESS="$(srun --overlap --nodes=1 --ntasks=1 --nodelist="$HEAD_NAME" hostname --ip-address | awk '{print $1}')"
ray get-auth-token --generate > /dev/null # in the home folder, which every node sees

srun --overlap --nodes=1 --ntasks=1 --nodelist="$HEAD_NAME" \
  ray start --head --block --disable-usage-stats --node-ip-address="$HEAD_ADDRESS" --port="$PORT" \
  --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="$GPUS_PER_NODE" &
until ray status --address "$HEAD_ADDRESS:$PORT" > /dev/null 2>&1; do pause; done
if [ "$SLURM_JOB_NUM_NODES" -gt 1 ]; then
  srun --overlap --nodes="$((SLURM_JOB_NUM_NODES - 1))" --ntasks-per-node=1 --exclude="$HEAD_NAME" \
    ray start --block --address="$HEAD_ADDRESS:$PORT" \
    --num-cpus="$SLURM_CPUS_PER_TASK" --num-gpus="$GPUS_PER_NODE" &
fi
nodes_up() { ray status --address "$HEAD_ADDRESS:$PORT" | grep -c ' node_' || true; }
until [ "$(nodes_up)" -ge "$SLURM_JOB_NUM_NODES" ]; do pause; done

RAY_ADDRESS="$HEAD_ADDRESS:$PORT" openrlhf-ebft train "$CONFIG" --resume auto --logging.root "$RUNS" "$@" &
RUN=$!
trap 'kill -TERM "$RUN"' TERM
# A signal ends `wait` early: wait again until the run has really ended, for its own exit code.
CODE=0
wait "$RUN" || CODE=$?
while kill -0 "$RUN" 2> /dev/null; do
  CODE=0
  wait "$RUN" || CODE=$?
done
exit "$CODE"
