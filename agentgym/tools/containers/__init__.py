"""Docker containers for the sandbox and for environments, and a reaper for those that a crash leaves."""
