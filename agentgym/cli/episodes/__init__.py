"""`agentgym episodes`: the episodes of a run as lines of JSON, or as a table for dataframe libraries."""
