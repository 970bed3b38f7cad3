"""`agentgym view`: the server of the viewer, and what its page is sent of each run."""
