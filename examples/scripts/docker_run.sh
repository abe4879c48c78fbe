#!/usr/bin/env bash
# Build the image if it is missing, and train in it: a Ray head in the container, this clone's configurations, runs and
# models outside of it.
#   examples/scripts/docker_run.sh                                     # eight GPUs, ray_configs/eight_gpus.yaml
#   STACK=cpu examples/scripts/docker_run.sh ray_configs/local_cpu.yaml
#   DRY_RUN=1 examples/scripts/docker_run.sh                           # print the commands, check the configuration
# Arguments: configuration and its flags.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

STACK="${STACK:-gpu}"
IMAGE="${IMAGE:-openrlhf-ebft:0.1.0-$STACK}"
if [ $# -eq 0 ]; then
  if [ "$STACK" = cpu ]; then set -- ray_configs/local_cpu.yaml; else set -- ray_configs/eight_gpus.yaml; fi
fi
if [ "$STACK" = cpu ]; then GPUS_PER_NODE=0; fi

BUILD=(docker build --file "dockerfile/Dockerfile.$STACK" --tag "$IMAGE" .)
RUN=(docker run --rm --init --shm-size "${SHM_SIZE:-16g}" --ulimit nofile=65536:65536 --user "$(id -u):0")
if [ "$STACK" = gpu ]; then RUN+=(--gpus all); fi
if [ -t 0 ]; then RUN+=(--interactive --tty); fi
for folder in models datasets runs; do RUN+=(--volume "$ROOT/$folder:/workspace/$folder"); done
RUN+=(--volume "$ROOT/ray_configs:/workspace/ray_configs:ro" --volume "$ROOT/examples:/workspace/examples:ro")
RUN+=(--volume "${HF_HOME:-$HOME/.cache/huggingface}:/home/ray/.cache/huggingface")
RUN+=("$IMAGE" head openrlhf-ebft train "$@")

if [ "${DRY_RUN:-0}" = 1 ]; then
  printf '%q ' "${BUILD[@]}"
  printf '\n'
  printf '%q ' "${RUN[@]}"
  printf '\n'
  dry_run "$@"
  exit
fi
mkdir -p models datasets runs "${HF_HOME:-$HOME/.cache/huggingface}" # docker would make them as root
docker image inspect "$IMAGE" > /dev/null 2>&1 || "${BUILD[@]}"
exec "${RUN[@]}"
