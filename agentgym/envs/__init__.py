"""Text environments: the base classes, the bundled environments and their policies."""

if __name__ != "agentgym.envs":
    raise ImportError(f"{__name__!r} at the root of the repository is a door for readers: import agentgym.envs instead")
