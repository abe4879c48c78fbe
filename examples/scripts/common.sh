# shellcheck shell=bash
# Shared by the scripts of this folder: where the cluster is, dry runs, submitting. Sourced, not run.
#
# CONFIG     configuration of the run
# RUNS       folder for run directories, on storage that every node sees (default: runs in this clone)
# RAY_JOBS   URL of a running cluster's job server; without it a head is started on this machine
# GPUS_PER_NODE, NODES   shape of the cluster that a dry run checks
# DRY_RUN=1  check configuration and placement and start nothing

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)"
cd "$ROOT" || exit 1
if [ -d "$ROOT/.venv/bin" ]; then PATH="$ROOT/.venv/bin:$PATH"; fi
export RAY_AUTH_MODE="${RAY_AUTH_MODE:-token}"

RUNS="${RUNS:-$ROOT/runs}"
NODES="${NODES:-1}"
GPUS_PER_NODE="${GPUS_PER_NODE:-8}"

# dry_run CONFIG [FLAG ...]: the checked configuration, then where its actors would run
dry_run() {
  openrlhf-ebft train "$@" --print-config
  openrlhf-ebft doctor "$@" --cluster "${NODES}x${GPUS_PER_NODE}"
}

# ensure_head: start a head on this machine unless RAY_JOBS names a cluster; it ends with the script
ensure_head() {
  if [ -n "${RAY_JOBS:-}" ]; then return; fi
  ray get-auth-token --generate > /dev/null
  local port="${RAY_PORT:-6379}" dashboard="${RAY_DASHBOARD_PORT:-8265}" flags
  read -r -a flags <<< "${RAY_START_FLAGS:-}"
  ray start --head --block --disable-usage-stats --port="$port" --dashboard-port="$dashboard" "${flags[@]}" &
  HEAD=$!
  trap 'kill -TERM "$HEAD"; wait "$HEAD" || true' EXIT
  RAY_JOBS="http://127.0.0.1:$dashboard"
  until ray job list --address "$RAY_JOBS" > /dev/null 2>&1; do
    kill -0 "$HEAD" 2> /dev/null || exit 1 # it has said why
    sleep 1
  done
}

# submit CONFIG [FLAG ...]: run the training as a job, follow its log and end with its exit code
submit() {
  ray job submit --address "$RAY_JOBS" --runtime-env ray_configs/runtime_env.yaml --working-dir . \
    -- openrlhf-ebft train "$@"
}

# train CONFIG [FLAG ...]: a dry run with DRY_RUN=1, else the real one
train() {
  if [ "${DRY_RUN:-0}" = 1 ]; then
    dry_run "$@"
  else
    ensure_head
    submit "$@"
  fi
}
