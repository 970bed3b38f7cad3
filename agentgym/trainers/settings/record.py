"""The settings of a run's record: what `episodes.jsonl` holds, and in which form."""

from __future__ import annotations

from agentgym.settings.config_class import config_class

__all__ = ["RecordConfig"]


@config_class
class RecordConfig:
    """The record of the episodes. A resumed run may have other settings here."""

    compress: bool = True
    """Writes the episodes to `episodes.jsonl.zst`, a twentieth to a fifth of the bytes, in place of `episodes.jsonl`.
    Every command reads both, and `agentgym episodes RUN` prints the lines. A resumed run keeps the form that it has."""
    tokens: bool = True
    """Keeps token ids, logprobs and advantages. Without them, an episode has its messages, rewards and numbers of
    tokens; `agentgym verify` then has less to check, and `sft --episodes` nothing to learn from."""
