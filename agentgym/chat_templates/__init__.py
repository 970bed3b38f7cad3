"""Chat formats: messages to token ids, token ids to messages, exactly."""

if __name__ != "agentgym.chat_templates":
    raise ImportError(f"{__name__!r} at the root of the repository is a door for readers: import agentgym.chat_templates instead")
