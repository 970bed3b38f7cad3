"""Environments of agentgym in the forms of other libraries, for the packages that `agentgym env export` writes."""
