#!/usr/bin/env bash
# Healthy: a head whose cluster answers, a worker whose Ray node runs, any other command as long as it runs.
set -euo pipefail

MODE_FILE="${TMPDIR:-/tmp}/openrlhf-ebft.mode"
read -r mode address < "$MODE_FILE" 2> /dev/null || true
case "${mode:-command}" in
  head) exec ray health-check --address "$address" ;;
  worker) grep -qx raylet /proc/[0-9]*/comm ;;
  *) exit 0 ;;
esac
