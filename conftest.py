"""Settings of every test run: the doors are not collected, and property tests never fail for a busy machine."""

from __future__ import annotations

from hypothesis import settings

collect_ignore = ["envs", "tools", "chat_templates", "trainers"]

settings.register_profile("agentgym", deadline=None, print_blob=True)
settings.load_profile("agentgym")
