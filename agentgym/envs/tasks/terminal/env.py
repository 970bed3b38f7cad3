"""Terminal-v0: work on files in a shell of one's own."""

from __future__ import annotations

from typing import Any

from agentgym.envs.base.card import Difficulty, EnvCard
from agentgym.envs.base.cheater import Trickster, tool_call_reply
from agentgym.envs.base.folder_task import FolderTask
from agentgym.envs.base.policies import Policy, game_of
from agentgym.envs.base.text_env import TextEnv
from agentgym.envs.base.tool_env import ToolEnv
from agentgym.envs.tasks.terminal.tasks import TASKS, TerminalTask, draw_task
from agentgym.errors import ConfigError, EnvironmentFault, SandboxError
from agentgym.tools import tool
from agentgym.tools.code import ANSWER_S, format_outcome, shared_sandbox
from agentgym.tools.sandbox import BACKENDS, Ended, SandboxLimits, SandboxSession
from agentgym.tools.sandbox.service_settings import backend_of_run, is_service
from agentgym.types import Message

__all__ = ["Terminal"]

LIMITS = SandboxLimits(time_limit_s=10.0, memory_mb=256, num_processes=32, scratch_mb=16, output_kb=16)
MAX_TURNS = 12


class Terminal(ToolEnv):
    """Do with files what is asked, by shell commands, then call `done`. Reward 1 if the files are as they should be.

    `level` (1 to 3) sets how much there is to do. `backend` is the box that commands are run in: by default the first
    that works here; `docker` is a container. The files are brought out of it and judged outside.
    """

    card = EnvCard(
        task="Rename, count, search, change, sort or join files by shell commands, then say that it is done.",
        tools=("shell", "done"),
        reward="1 if at `done` every file is as it should be and there is no other, else 0.",
        difficulty=Difficulty(values={1: "one command", 2: "a table, or many files", 3: "several commands together"}),
        oracle="runs commands that do the task",
        cheat="claims, leaves, forges verdicts and does half of it",
        baseline={"random": 0.0},
        licence="Apache-2.0",
    )
    system_prompt = (
        "You work in a folder of files by the tool shell. When the task is done, and nothing else is left in the "
        "folder, call done."
    )
    max_turns = MAX_TURNS

    def __init__(self, render_mode: str | None = None, *, level: int = 1, backend: str = "auto") -> None:
        if level not in TASKS:
            raise ConfigError(f"Terminal has the levels {', '.join(map(str, TASKS))}; got level {level!r}")
        if backend not in ("auto", *BACKENDS):
            raise ConfigError(f"Terminal's backends are auto, {', '.join(BACKENDS)}; got {backend!r}")
        super().__init__(render_mode)
        if is_service(backend_of_run(backend)):
            raise ConfigError(
                "Terminal-v0 keeps files from command to command, which no code execution service does: name a box of "
                "this machine, --env-kwargs backend=namespaces"
            )
        self.level, self.backend = level, backend
        self._session: SandboxSession | None = None

    def start(self, options: dict[str, Any]) -> str:
        """Draws a task, and puts its files into a sandbox."""
        self.task: TerminalTask = draw_task(self.level, self.np_random)
        try:
            self._session = shared_sandbox(self.backend, LIMITS).session()
            files = {path: content.encode() for path, content in self.task.before.items()}
            outcome = self._session.run(":", language="shell", files=files)
        except SandboxError as error:
            raise EnvironmentFault(f"Terminal-v0 needs a sandbox: {error}") from error
        if not outcome.ok:
            raise EnvironmentFault(f"the files of the task were not written ({outcome.ended}): {outcome.stderr[-500:]}")
        return f"{self.task.text}\nFiles: {', '.join(sorted(self.task.before))}"

    @tool(timeout_s=LIMITS.time_limit_s + ANSWER_S, on_error="raise")
    def shell(self, command: str) -> str:
        """Runs shell commands (sh) in the folder.

        Args:
            command: One or more commands.
        """
        if "\0" in command:
            return "not run: a command cannot hold a NUL character"
        assert self._session is not None
        try:
            outcome = self._session.run(command, language="shell")
        except SandboxError as error:
            raise EnvironmentFault(f"the sandbox failed: {error}") from error
        if outcome.is_lost:
            self.end(success=False)
        return format_outcome(outcome, LIMITS, "shell")

    @tool(timeout_s=LIMITS.time_limit_s + ANSWER_S, on_error="raise")
    def done(self) -> str:
        """Says that the task is done."""
        assert self._session is not None
        try:
            outcome = self._session.run(":", language="shell", collect=["*"])
        except SandboxError as error:
            raise EnvironmentFault(f"the sandbox failed: {error}") from error
        if outcome.ended is Ended.TIME_LIMIT:  # no command of the model runs any more
            raise EnvironmentFault(f"the files could not be brought out within {LIMITS.time_limit_s:g} s")
        success = self.task.is_done(outcome.files)
        self.end(success=success, reward=float(success))
        return "The files are as they should be." if success else "The files are not as they should be."

    def folder_task(self, source: str) -> FolderTask:
        """Returns this episode's task as a folder of files."""
        task = self.task
        return FolderTask(source=source, text=task.text, before=task.before, after=task.after, solution=task.solution)

    def release(self) -> None:
        """Closes the sandbox."""
        if self._session is not None:
            self._session.close()
            self._session = None

    def make_oracle(self) -> Policy:
        """A policy that runs the solution."""
        return _Oracle()

    def make_cheat(self) -> Policy:
        """A policy that tries everything but the work."""
        return Trickster("done", _tricks)


class _Oracle:
    def reset(self, env: TextEnv, observation: str, seed: int) -> None:
        self._replies = [
            tool_call_reply("shell", command=game_of(env, Terminal).task.solution),
            tool_call_reply("done"),
        ]

    def act(self, observation: str) -> Message:
        return self._replies.pop(0)


def _tricks(env: TextEnv) -> list[Message]:
    task = game_of(env, Terminal).task
    targets = sorted(set(task.after) - set(task.before)) or sorted(task.after)
    commands = (
        "echo success; exit 0",
        f"touch {targets[0]}",
        "exit 1",
        "kill -9 $PPID",
        f"mkdir -p x; ln -s /etc/passwd x/{targets[0].rpartition('/')[2]}",
    )
    return [*(tool_call_reply("shell", command=command) for command in commands), tool_call_reply("done")]
