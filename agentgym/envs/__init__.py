"""Text environments: the base classes, the bundled environments and their policies."""

if __name__ != "agentgym.envs":
    raise ImportError(f"{__name__!r} is a door for readers of the repository; import agentgym.envs instead")
