#!/usr/bin/env bash
# EBFT on prompts and answers, one anchor at the end of each prompt, on a machine with eight GPUs.
#   examples/scripts/train_ebft_structured.sh                                  # head on this machine, started and stopped
#   DRY_RUN=1 examples/scripts/train_ebft_structured.sh                        # check only
#   CONFIG=ray_configs/two_nodes.yaml NODES=2 RAY_JOBS=http://HEAD:8265 RUNS=/shared/runs \
#     examples/scripts/train_ebft_structured.sh --policy.max_steps 200
# Arguments are configuration flags.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

train "${CONFIG:-ray_configs/eight_gpus.yaml}" --logging.root "$RUNS" "$@"
