"""Chat formats: messages to token ids, token ids to messages, exactly."""

if __name__ != "agentgym.chat_templates":
    raise ImportError(f"{__name__!r} is a door for readers of the repository; import agentgym.chat_templates instead")
