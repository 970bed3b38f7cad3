#!/bin/bash
#SBATCH --job-name=agentgym
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --time=24:00:00
# A Ray cluster of the job's nodes, and a run on it: `MODEL=/models/NAME sbatch examples/cluster/slurm.sh`. Submitted once
# more, after a time limit or a failure, the run goes on. Every node sees MODEL, RUN and the home folder under the same
# path, and has agentgym in the environment that the job begins with.
set -euo pipefail
MODEL=${MODEL:?the folder of the model}
RUN=${RUN:-$PWD/runs/slurm}
port=6379

head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | awk 'NR == 1')
address=$(srun --nodes=1 --ntasks=1 --nodelist="$head" hostname --ip-address | awk '{print $1}')
export RAY_AUTH_MODE=token
if [ ! -s "$HOME/.ray/auth_token" ]; then # which nodes and clients show to the head
    mkdir -p "$HOME/.ray"
    (umask 077 && python -c 'import secrets; print(secrets.token_hex(32))' >"$HOME/.ray/auth_token")
fi

srun --overlap --nodes=1 --ntasks=1 --nodelist="$head" \
    ray start --head --node-ip-address "$address" --port "$port" --block &
sleep 20
others=$((SLURM_JOB_NUM_NODES - 1))
if [ "$others" -gt 0 ]; then
    srun --overlap --nodes="$others" --ntasks="$others" --exclude="$head" \
        ray start --address "$address:$port" --block &
    sleep 20
fi

export RAY_ADDRESS="$address:$port"
if [ -e "$RUN/config.yaml" ]; then
    agentgym train --resume --output "$RUN"
else
    agentgym train --env TextGame-v0 --model "$MODEL" --output "$RUN" --executor ray \
        --ray.learners 8 --ray.gpus-per-learner 1 --ray.engines 8 --ray.gpus-per-engine 1 --ray.workers 32 \
        --optimizer.learning-rate 1e-6 --learner.activation-checkpointing --limits.context-window 16384
fi
