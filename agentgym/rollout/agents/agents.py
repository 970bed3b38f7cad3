"""The kinds of agents that a run starts: a known harness, a command or a function of the user's."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from agentgym.child_guard import guard_command
from agentgym.errors import ConfigError
from agentgym.rollout.agents.agent_episode import AgentEpisode, Launch
from agentgym.rollout.agents.agent_process import clean_variables, run_program
from agentgym.rollout.agents.agents_folder import agents_folder
from agentgym.rollout.agents.config import PROMPT, AgentConfig
from agentgym.rollout.agents.function_agent import FunctionAgent
from agentgym.rollout.agents.harnesses import HARNESSES, Harness

__all__ = ["Agent", "check_agent", "open_agent", "read_versions"]

MAX_ARGUMENT = (128 << 10) - 1
"""The bytes of one argument of a program on Linux."""
VERSION_S = 60.0
"""The seconds that a program may take to print its version."""


class Agent(Protocol):
    """Plays episodes, each as a new agent."""

    async def play(self, episode: AgentEpisode, log_path: Path) -> str:
        """Plays an episode; returns a line that names the agent's failure, or an empty one.

        What the agent prints is in `log_path`. A cancellation ends the agent.
        """


def open_agent(config: AgentConfig) -> Agent:
    """Returns the agent of the settings.

    Raises ConfigError for a program that is not installed or has another version, or if it needs `agent.unsafe`; and
    what `load_named` raises for a function.
    """
    if (harness := HARNESSES.get(config.name)) is not None:
        if harness.needs_unsafe and not config.unsafe:
            raise ConfigError(
                f"{config.name} {harness.needs_unsafe}: --agent.unsafe has it run what the model writes on this "
                "machine, as you"
            )
        program = _find_program(config.program or harness.program, f"{config.name} is not installed", harness.install)
        _check_version(config, harness, program)
        return ProgramAgent(config.name, program, harness.launch)
    if config.is_command:
        return _open_command(config)
    return FunctionAgent(config.name)


def check_agent(config: AgentConfig) -> None:
    """Raises as `open_agent` does; settings without an agent pass."""
    if config.name:
        open_agent(config)


def _open_command(config: AgentConfig) -> Agent:
    if not config.unsafe:
        raise ConfigError(
            f"the command {config.name!r} may run what the model writes: --agent.unsafe lets it, on this machine and "
            "as you"
        )
    try:
        first, *words = shlex.split(config.name)
    except ValueError as error:
        raise ConfigError(f"the command {config.name!r} cannot be read: {error}") from error
    program = _find_program(first, f"there is no program {first!r}", "the first word of the command is one on PATH")
    # It works in a folder of its own, and what it names here is to be found from there.
    words = [os.path.abspath(word) if os.path.exists(word) else word for word in words]

    def launch(episode: AgentEpisode) -> Launch:
        arguments = [word.replace(PROMPT, episode.prompt) for word in words]
        openai = {"OPENAI_BASE_URL": episode.base_url, "OPENAI_API_KEY": episode.api_key}
        anthropic = {"ANTHROPIC_BASE_URL": episode.root_url, "ANTHROPIC_API_KEY": episode.api_key}
        own = {"AGENTGYM_MCP_URL": episode.mcp_url, "AGENTGYM_ROOT_URL": episode.root_url}
        return Launch(arguments=arguments, variables={**openai, **anthropic, **own})

    return ProgramAgent(Path(first).name, program, launch)


def _find_program(name: str, problem: str, advice: str) -> str:
    program = shutil.which(os.path.expanduser(name))
    if program is None:
        raise ConfigError(f"{problem}: {advice}")
    return os.path.abspath(program)


def read_versions(program: str, harness: Harness, limit_s: float = VERSION_S) -> list[str]:
    """Returns the versions that a harness's program prints; raises OSError if it cannot be started."""
    with agents_folder() as home:
        command = guard_command("server", [program, *harness.version_arguments])
        environment = clean_variables(home)
        streams = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, **streams, cwd=home, env=environment) as process:  # type: ignore[call-overload]
            try:
                # Not `communicate`, which closes the input, and with it ends the program.
                timer = threading.Timer(limit_s, process.stdin.close)
                timer.start()
                printed = process.stdout.read(1 << 16).decode(errors="replace")
            finally:
                timer.cancel()
    return re.findall(r"\b\d+\.\d+\.\d+\b", printed)


def _check_version(config: AgentConfig, harness: Harness, program: str) -> None:
    """Raises ConfigError unless the program prints the version that is wanted."""
    version, versions = config.version or harness.version, read_versions(program, harness)
    if version in versions:
        return
    what = f"has version {versions[0]}" if versions else "prints no version"
    tested = "is the tested one" if version == harness.version else "is that of agent.version"
    other = f", or take it untested with --agent.version {versions[0]}" if versions else ""
    raise ConfigError(f"{config.name} ({program}) {what}, and {version} {tested}: {harness.install}{other}")


class ProgramAgent:
    """A program that is started for each episode."""

    def __init__(self, name: str, program: str, launch: Callable[[AgentEpisode], Launch]) -> None:
        self.name, self.program, self.launch = name, program, launch

    async def play(self, episode: AgentEpisode, log_path: Path) -> str:
        """Starts the program in a new home and working folder, and waits for its end; see `Agent.play`."""
        launch = self.launch(episode)
        home, work = episode.folder / "home", episode.folder / "work"
        work.mkdir()
        home.mkdir()
        for name, text in launch.files.items():
            path = home / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        variables = {**clean_variables(home), **launch.variables}
        longest = max(map(len, map(os.fsencode, launch.arguments)), default=0)
        if longest > MAX_ARGUMENT:
            return (
                f"{self.name} takes its task as an argument, which has at most {MAX_ARGUMENT} bytes; it has {longest}"
            )
        end = await run_program([self.program, *launch.arguments], variables, work, log_path)
        if not end.code:
            return ""
        reason = f": {end.last_line}" if end.last_line else ""
        return f"{self.name} ended with exit code {end.code}{reason} ({log_path.name})"
