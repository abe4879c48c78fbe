#!/usr/bin/env bash
# What a container does:
#   head                    start a Ray cluster and stay
#   head COMMAND [ARG ...]  start one, run COMMAND on it and end with its exit code
#   worker HOST:PORT        join the cluster of that head and stay
#   COMMAND [ARG ...]       run COMMAND alone
# RAY_PORT, RAY_DASHBOARD_PORT, RAY_DASHBOARD_HOST: where a head listens. RAY_AUTH_TOKEN (or RAY_AUTH_TOKEN_PATH, or
# ~/.ray/auth_token) holds the cluster's token; a head without one makes it. RAY_START_FLAGS: more flags of `ray start`.
set -euo pipefail

MODE_FILE="${TMPDIR:-/tmp}/openrlhf-ebft.mode"
PORT="${RAY_PORT:-6379}"
read -r -a FLAGS <<< "${RAY_START_FLAGS:-}"

start_head() {
  if [ "${RAY_AUTH_MODE:-}" = token ] && [ -z "${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-}" ]; then
    ray get-auth-token --generate > /dev/null
  fi
  echo "head 127.0.0.1:$PORT" > "$MODE_FILE"
  exec ray start --head --block --port="$PORT" --dashboard-host="${RAY_DASHBOARD_HOST:-0.0.0.0}" \
    --dashboard-port="${RAY_DASHBOARD_PORT:-8265}" --disable-usage-stats "${FLAGS[@]}"
}

# run_on_head COMMAND [ARG ...]: signals go to the command, which may have something to save
run_on_head() {
  start_head &
  local head=$! code=0
  until ray health-check --address "127.0.0.1:$PORT" > /dev/null 2>&1; do
    kill -0 "$head" 2> /dev/null || exit 1 # it has said why
    sleep 1
  done
  RAY_ADDRESS="127.0.0.1:$PORT" "$@" &
  local command=$!
  # shellcheck disable=SC2064 # the process id of now
  trap "kill -TERM $command 2> /dev/null || true" TERM INT
  # A signal ends `wait` early: wait again until the command has really ended, for its own exit code.
  wait "$command" || code=$?
  while kill -0 "$command" 2> /dev/null; do
    code=0
    wait "$command" || code=$?
  done
  kill -TERM "$head"
  wait "$head" || true
  exit "$code"
}

case "${1:-}" in
  head)
    shift
    if [ $# -eq 0 ]; then start_head; fi
    run_on_head "$@"
    ;;
  worker)
    if [ $# -ne 2 ]; then
      echo "entrypoint: worker needs the head's HOST:PORT" >&2
      exit 2
    fi
    echo "worker" > "$MODE_FILE"
    exec ray start --address="$2" --block "${FLAGS[@]}"
    ;;
  "")
    echo "entrypoint: needs head, worker HOST:PORT, or a command" >&2
    exit 2
    ;;
  *)
    exec "$@"
    ;;
esac
