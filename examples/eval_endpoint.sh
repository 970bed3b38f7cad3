#!/usr/bin/env bash
# Evaluates a model behind an OpenAI-compatible endpoint: SGLang, vLLM, llama.cpp, or a hosted API.
# The key is read from OPENAI_API_KEY.
set -euo pipefail

agentgym eval --env GSM8K-v0 --policy "${URL:-http://127.0.0.1:8000/v1}" -n "${NUM_TASKS:-200}" "$@"
