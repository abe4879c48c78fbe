#!/usr/bin/env bash
# EBFT on raw text, anchors every eight tokens: the paper's setting for unstructured code, on eight GPUs.
#   examples/scripts/train_ebft_strided.sh
#   CONFIG=examples/qwen2.5_1.5b_code.yaml examples/scripts/train_ebft_strided.sh          # anchors in answers
#   CONFIG=examples/llama3.2_1b_translation.yaml examples/scripts/train_ebft_strided.sh
# Arguments are configuration flags; DRY_RUN=1 checks only.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

train "${CONFIG:-examples/qwen2.5_1.5b_unstructured_code.yaml}" --logging.root "$RUNS" "$@"
