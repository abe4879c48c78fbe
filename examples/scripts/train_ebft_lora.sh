#!/usr/bin/env bash
# EBFT with low-rank adapters of an 8B model on eight GPUs: adapters need a higher learning rate than all weights do.
#   examples/scripts/train_ebft_lora.sh
#   LORA_RANK=64 examples/scripts/train_ebft_lora.sh --policy.max_steps 200
# Arguments are configuration flags; DRY_RUN=1 checks only.
set -euo pipefail
# shellcheck source-path=SCRIPTDIR source=common.sh
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

train "${CONFIG:-ray_configs/eight_gpus.yaml}" \
  --name lora \
  --model.path "${MODEL:-meta-llama/Llama-3.1-8B}" \
  --lora.rank "${LORA_RANK:-16}" \
  --lora.alpha "${LORA_ALPHA:-32}" \
  --optimizer.learning_rate "${LEARNING_RATE:-1e-5}" \
  --policy.gradient_checkpointing true \
  --logging.root "$RUNS" "$@"
