#!/usr/bin/env bash
# Learns tic-tac-toe against itself, from a player of random legal moves. docs/self_play.md explains the settings.
set -euo pipefail

folder=${FOLDER:-runs/self-play}
game=(--env TicTacToe-v0 --env-kwargs words=true)
agentgym sft "${game[@]}" --policy random --mistakes 0 --steps "${SFT_STEPS:-2000}" --output "$folder/legal"
agentgym train "${game[@]}" opponent=self 'opening=[4,6]' --model "$folder/legal" --algo maxrl --tasks 64 \
    --steps "${STEPS:-440}" --optimizer.learning-rate 2e-3 --optimizer.decay linear --learner.kl.coefficient 0.1 \
    --learner.kl.penalty k2 --output "$folder/self" "$@"
agentgym export "$folder/self" "$folder/model"
agentgym eval "${game[@]}" --policy "$folder/model" -n "${NUM_GAMES:-1000}" --temperature 0 --output "$folder/eval"
