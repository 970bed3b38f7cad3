"""Training: advantages, losses, batches, the learner and the loop around them."""

if __name__ != "agentgym.trainers":
    raise ImportError(f"{__name__!r} is a door for readers of the repository; import agentgym.trainers instead")
