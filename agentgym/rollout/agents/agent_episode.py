"""What an agent needs in order to play an episode, and how a program is started with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from agentgym.types import JSON

__all__ = ["MODEL", "AgentEpisode", "Launch"]

MODEL = "policy"
"""The name of the model that agents ask for; any other would do."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AgentEpisode:
    """One episode, for the agent that plays it. A function of the user's takes it as its only argument."""

    name: str
    """The episode's name, such as `train-0-3-3/12-5`."""
    prompt: str
    """The environment's opening messages as one text."""
    messages: Sequence[Mapping[str, JSON]]
    """The environment's opening messages, in OpenAI's form."""
    tools: Sequence[Mapping[str, JSON]]
    """The environment's tools, in OpenAI's form."""
    root_url: str
    """The episode's address for Anthropic's clients; `/step` and `/finish` are there too."""
    api_key: str
    """The episode's key: it opens this episode and no other."""
    window: int
    """The most tokens of a prompt and its reply together."""
    turn_tokens: int
    """The most tokens of a reply."""
    folder: Path
    """A new folder to work in, which is removed afterwards."""
    model: str = MODEL
    """The name of the model to ask for."""

    @property
    def base_url(self) -> str:
        """The episode's address for OpenAI's clients; it ends in `/v1`."""
        return f"{self.root_url}/v1"

    @property
    def mcp_url(self) -> str:
        """The address of the environment's tools over MCP, which takes the key as a bearer token."""
        return f"{self.root_url}/mcp"


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """The start of a program: its arguments, variables, and the files that it reads."""

    arguments: Sequence[str]
    """The words after the program's name."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """Variables besides PATH, HOME, LANG and TMPDIR, which are all that it has."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Texts by their path in the home folder."""
