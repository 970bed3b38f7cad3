"""Tools: functions that a model may call, with their JSON Schemas and their execution."""

if __name__ != "agentgym.tools":
    raise ImportError(f"{__name__!r} at the root of the repository is a door for readers: import agentgym.tools instead")
