"""Training: advantages, losses, batches, the learner and the loop around them."""

if __name__ != "agentgym.trainers":
    raise ImportError(f"{__name__!r} at the root of the repository is a door for readers: import agentgym.trainers instead")
