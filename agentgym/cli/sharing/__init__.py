"""Environments for others: `agentgym env export` and `agentgym tools mcp`."""
