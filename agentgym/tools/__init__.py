"""Tools: functions that a model may call, with their JSON Schemas and their execution."""

if __name__ != "agentgym.tools":
    raise ImportError(f"{__name__!r} is a door for readers of the repository; import agentgym.tools instead")
