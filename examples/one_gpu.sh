#!/usr/bin/env bash
# Trains adapters of a 0.6 B model on GSM8K, on one GPU. `examples/one_gpu.sh --dry-run` prints episodes, tokens and memory.
set -euo pipefail

agentgym train --env GSM8K-v0 --model "${MODEL:-Qwen/Qwen3-0.6B}" --algo grpo --tasks 16 --group-size 8 --steps 100 \
    --learner.device "${DEVICE:-cuda}" --learner.lora.rank 32 --limits.context-window 4096 "$@"
