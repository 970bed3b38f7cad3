"""Containers: a Docker daemon as the sandbox and environments use it, and a reaper for what a crash leaves."""
