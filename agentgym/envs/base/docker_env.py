"""An environment whose tools run in a container, one for each episode."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import ClassVar

from agentgym.envs.base.tool_env import ToolEnv
from agentgym.errors import EnvironmentFault, SandboxError
from agentgym.tools import tool
from agentgym.tools.calling.definition import Tool, ToolFunction
from agentgym.tools.containers.pool import Kind, shared_pool
from agentgym.tools.containers.workspace import MAX_COMMAND_BYTES, ContainerLimits, Ran, ShellMachine, Workspace

__all__ = ["DockerEnv"]


class DockerEnv(ToolEnv, abstract=True):
    """A ToolEnv with a container for each episode. A subclass names what it is made from and begins it in `start`:

        class Count(DockerEnv):
            dockerfile = "path/to/folder"

            def start(self, options):
                self.begin(files={"words.txt": b"..."})
                return "How many words are in words.txt? Write the number to answer.txt."

    `self.run` and `self.container` work in it; the model has the tool `shell` (`shell = None` takes it away). There is
    no network, no capability and no right to gain one; commands are run in /work by an ordinary user. Containers wait
    ready, are removed with the episode, and end with this process; `agentgym sandbox reap` takes what stays.
    """

    image: ClassVar[str] = ""
    """An image that the Docker daemon has, with `sh` and `timeout`. By default this machine's own Python and shell."""
    dockerfile: ClassVar[str] = ""
    """A folder with a Dockerfile, in place of `image`; it is built once in a process."""
    limits: ClassVar[ContainerLimits] = ContainerLimits()
    num_warm: ClassVar[int] = 1
    """The number of started containers that wait for coming episodes."""
    own_split = True  # each draw of a task is a container: False has resets draw until a task is on its side

    _container: ShellMachine | None = None

    def __init__(self, render_mode: str | None = None, *, tools: Iterable[Tool | ToolFunction] = ()) -> None:
        super().__init__(render_mode, tools=tools)

    @property
    def container(self) -> ShellMachine:
        """This episode's container."""
        if self._container is None or not self._container.is_open:
            raise EnvironmentFault(f"{type(self).__name__} has no container now: call self.begin() in start")
        return self._container

    def container_kind(self) -> Kind:
        """Returns what this environment's containers are made from."""
        return Kind(image=self.image, dockerfile=self.dockerfile, limits=self.limits, num_warm=self.num_warm)

    def begin(self, *, files: Mapping[str, bytes] | None = None, setup: str = "", keeps: bool = False) -> None:
        """Gives the episode a container with `files` in /work, in which the command `setup` has been run.

        With `keeps` the result is a snapshot, from which every episode of this process with the same files and setup
        starts: for tasks that take long to set up. Raises EnvironmentFault if Docker, or the setup, fails.
        """
        self._discard()
        contents = dict(files or {})

        def prepare(container: Workspace) -> None:
            container.write(contents)
            if setup and (ran := container.run(setup)).exit_code:
                container.close()
                raise EnvironmentFault(f"the setup of a task ended with {ran.exit_code}: {ran.output[-500:]}")

        try:
            pool = shared_pool(self.container_kind())
            if keeps:
                self._container = pool.take_prepared(repr((sorted(contents.items()), setup)), prepare)
            else:
                self._container = container = pool.take()
                prepare(container)
        except SandboxError as error:
            self._discard()
            raise EnvironmentFault(f"{type(self).__name__} needs Docker: {error}") from error

    def run(self, command: str, *, time_limit_s: float | None = None) -> Ran:
        """Runs a shell command in the container, in the same way as the model's commands."""
        try:
            return self.container.run(command, time_limit_s=time_limit_s)
        except SandboxError as error:
            raise EnvironmentFault(f"the container failed: {error}") from error

    @tool(timeout_s=None, on_error="raise")
    def shell(self, command: str) -> str:
        """Runs shell commands (sh) in /work.

        Args:
            command: One or more commands.
        """
        if "\0" in command:
            return "not run: a command cannot hold a NUL character"
        if len(command.encode("utf-8", "replace")) > MAX_COMMAND_BYTES:
            return f"not run: a command has at most {MAX_COMMAND_BYTES} bytes; write what is longer to a file in parts"
        ran = self.run(command)
        if ran.is_lost:
            self.end(success=False)
        return _format_output(ran, self.limits)

    def release(self) -> None:
        """Removes the container."""
        self._discard()

    def _discard(self) -> None:
        if self._container is not None:
            container, self._container = self._container, None
            container.close()


def _format_output(ran: Ran, limits: ContainerLimits) -> str:
    """Formats the output for the model, with how the command ended unless all went well."""
    notes = []
    if ran.timed_out:
        notes.append(f"it was stopped after {round(ran.seconds, 1):g} s, and all it had started")
    elif ran.is_cut:
        notes.append(f"it was stopped: more than {limits.output_kb} KiB of output, of which this is the beginning")
    elif ran.exit_code:
        notes.append(f"exit code {ran.exit_code}")
    if ran.is_lost:
        notes.append("what it started could not be stopped, and the machine was thrown away")
    parts = [ran.output.removesuffix("\n")] if ran.output else []
    return "\n".join([*parts, f"[{'; '.join(notes)}]"] if notes else parts) or "(no output)"
