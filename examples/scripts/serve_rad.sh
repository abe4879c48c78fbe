#!/usr/bin/env bash
# Serve a model with reward-augmented decoding over HTTP on this machine, until Ctrl-C.
#   examples/scripts/serve_rad.sh
#   CONFIG=my-server.yaml examples/scripts/serve_rad.sh --http.port 9000
#   curl http://127.0.0.1:8000/v1/models
# Arguments are configuration flags; DRY_RUN=1 checks only.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

CONFIG="${CONFIG:-examples/serve_rad_sentiment.yaml}"
if [ "${DRY_RUN:-0}" = 1 ]; then
  exec openrlhf-ebft serve-rad "$CONFIG" "$@" --print-config
fi
exec openrlhf-ebft serve-rad "$CONFIG" "$@"
