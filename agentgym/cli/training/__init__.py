"""The parts of `agentgym train`: its options, its display, and the run with its report."""
