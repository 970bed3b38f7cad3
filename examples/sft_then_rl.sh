#!/usr/bin/env bash
# Imitates the oracle of the third level of TextGame-v0, and goes on from there by reinforcement learning.
set -euo pipefail

folder=${FOLDER:-runs/sft-then-rl}
game=(--env TextGame-v0 --env-kwargs level=3)
agentgym sft "${game[@]}" --mistakes 0.25 --steps "${SFT_STEPS:-200}" --output "$folder/sft"
agentgym train "${game[@]}" --model "$folder/sft" --steps "${STEPS:-40}" --output "$folder/rl" "$@"
