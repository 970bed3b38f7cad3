#!/bin/sh
# A check that cannot run writes no reward: that is no verdict.
reward=$(python3 -I "${AGENTGYM_ROOT-}/tests/check.py") || exit
echo "$reward" > "${AGENTGYM_ROOT-}/logs/verifier/reward.txt"
