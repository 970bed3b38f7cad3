"""`agentgym episodes`: the episodes of a run as lines of JSON, or as a table for dataframe libraries."""

from agentgym.cli.episodes.command import main

__all__ = ["main"]
