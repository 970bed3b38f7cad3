"""The settings of agents that a run starts."""

from __future__ import annotations

from agentgym.errors import ConfigError, UnknownName, nearest
from agentgym.loading import is_code_path
from agentgym.rollout.agents.harnesses import HARNESSES
from agentgym.settings.config_class import config_class
from agentgym.settings.functions import check_above_zero, check_at_least
from agentgym.trajectory import BRANCH_LABELS
from agentgym.types import JSON

__all__ = ["PROMPT", "AgentConfig"]

PROMPT = "{prompt}"
"""The word of a command of the user's that the prompt of the episode replaces."""


@config_class
class AgentConfig:
    """The agent that plays the episodes, of which each has a new one; without a name the run plays them itself."""

    name: str = ""
    """The agent: codex, claude-code, opencode, pi, mini-swe-agent, a command such as 'my-agent {prompt}', or a function
    of your own as `path/to/file.py:function`. `--agent NAME` is short for it."""
    program: str = ""
    """The program of a harness, if it is not found by its usual name on PATH."""
    version: str = ""
    """The version of the harness; another one is refused. Left out, it is the version that is tested here."""
    unsafe: bool = False
    """Starts an agent that runs what the model writes on this machine, as you: mini-swe-agent, or a command."""
    timeout_s: float = 600.0
    """Seconds of an agent, after which it is ended and its episode has the status `timeout`. Takes the place of
    limits.deadline_s."""
    parallel: int = 8
    """The agents that run at the same time."""
    credit: tuple[str, ...] = BRANCH_LABELS
    """The labels of the branches that are trained, with --serve too; replies of others are recorded as excluded."""

    def __post_init__(self) -> None:
        check_above_zero(self, "timeout_s", where="agent.")
        check_at_least(1, self, "parallel", where="agent.")
        if unknown := sorted({*self.credit} - {*BRANCH_LABELS}):
            raise ConfigError(f"agent.credit has no {unknown[0]!r}: the labels are {', '.join(BRANCH_LABELS)}")
        if not self.credit:
            raise ConfigError("agent.credit names at least one label: nothing would be trained")
        if self.name in HARNESSES:
            return
        if self.program or self.version:
            raise ConfigError(f"agent.program and agent.version are those of a harness: {', '.join(HARNESSES)}")
        if self.is_command and PROMPT not in self.name:
            raise ConfigError(f"the command {self.name!r} gets no prompt: write {PROMPT} where it goes")
        if self.name and not self.is_command and not is_code_path(self.name):
            raise UnknownName(
                f"no agent {self.name!r}{nearest(self.name, HARNESSES) or '.'} There are {', '.join(HARNESSES)}, a "
                "command such as 'my-agent {prompt}', and a function as path/to/file.py:function"
            )

    def check_compaction(self, at: float | None) -> None:
        """Raises ConfigError if there is an agent, and the conversation should be shortened for it."""
        if self.name and at is not None:
            raise ConfigError("an agent shortens its conversation itself: leave compaction.at out, or agent")

    def to_json(self) -> dict[str, JSON]:
        """Returns the settings that decide what is played: the agent, and a harness's version."""
        harness = HARNESSES.get(self.name)
        return {"name": self.name, **({"version": self.version or harness.version} if harness else {})}

    @property
    def is_command(self) -> bool:
        """True if the agent is a command of the user's."""
        return PROMPT in self.name or len(self.name.split()) > 1
