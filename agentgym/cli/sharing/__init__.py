"""`agentgym env export`: packages of other libraries that serve an environment there."""
