"""`harbor/PATH`: a task in Harbor's form, or a folder of such tasks, in a box of this machine or in a container."""

from __future__ import annotations

import functools
import json
import math
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from agentgym.envs.adapters.harbor_box import ROOT, NotInBox, read_setup
from agentgym.envs.adapters.harbor_task import HarborTask, read_harbor_tasks, read_tree
from agentgym.envs.base.card import EnvCard
from agentgym.envs.base.cheater import Trickster, tool_call_reply
from agentgym.envs.base.docker_env import DockerEnv
from agentgym.envs.base.policies import Policy, Script, ScriptedPolicy
from agentgym.envs.base.task_split import is_held_out
from agentgym.envs.base.text_env import TextEnv
from agentgym.errors import ConfigError, EnvironmentFault, SandboxError
from agentgym.tools import tool
from agentgym.tools.code import shared_sandbox
from agentgym.tools.containers.pool import NOBODY, Kind
from agentgym.tools.containers.workspace import ContainerLimits, Ran
from agentgym.tools.sandbox import BACKENDS, SandboxLimits
from agentgym.tools.sandbox.workspace import BoxWorkspace
from agentgym.types import JSON, AnyCall, Message, ToolCall

__all__ = ["Harbor", "names"]

REWARDS = ("logs/verifier/reward.json", "logs/verifier/reward.txt")
"""The files of a verdict, in Harbor's order: the first one that is there counts."""
MAX_SCRATCH_MB = 256
"""The most MiB of files in a box, which are in memory."""
OUTPUT_KB = 1024
CANNOT_RUN = (126, 127)
"""A shell's exit codes for a program that cannot be run, or is not there."""
SIGNALED = 128
MIN_LEAK = 24
"""The characters of the shortest text that counts as a copy of a solution or of tests."""
SYSTEM_FOLDERS = "bin boot dev etc lib lib32 lib64 proc run sbin sys usr".split()
BUILD_END = f"""
USER root
RUN for folder in /*; do case "$folder" in {"|".join(f"/{name}" for name in SYSTEM_FOLDERS)}) ;; \\
    *) chown -R {NOBODY} "$folder" ;; esac; done; [ "$PWD" = / ] || chown -R {NOBODY} .; \\
    mkdir -p /logs/agent /logs/artifacts /logs/verifier /tests && chown {NOBODY} /logs/agent /logs/artifacts && \\
    chown -R 0:0 /tests /logs/verifier && chown 0:0 /logs
"""
"""What a container needs besides its task: the task's files are those of the user of commands, tests are root's."""


class Harbor(DockerEnv):
    """A task in Harbor's form, or one of a folder of them; the reward is what its verifier writes.

    The model works by `shell`; a reply without a call says that it is done. `backend` is namespaces, landlock or
    docker; by default a box if it can be the task's machine, else a container. `packages` is a folder of packages that
    the box's Python finds. A command may take `command_s` seconds.
    """

    system_prompt = (
        "You work on a computer by the tool shell. Do the task, and then reply without a call: that ends your work, "
        "which is then judged."
    )

    def __init__(
        self,
        render_mode: str | None = None,
        *,
        path: str,
        backend: str = "auto",
        packages: str = "",
        max_turns: int = 30,
        command_s: float = 60.0,
    ) -> None:
        if backend not in ("auto", *BACKENDS):
            raise ConfigError(f"Harbor tasks have the backends auto, {', '.join(BACKENDS)}; got {backend!r}")
        if max_turns < 1 or not 0 < command_s < math.inf:
            raise ConfigError(f"max_turns and command_s are positive, got {max_turns!r} and {command_s!r}")
        super().__init__(render_mode)
        self.max_turns, self.backend, self._command_s = max_turns, backend, command_s
        self._packages = (Path(packages),) if packages else ()
        self._tasks = _tasks_of(path, backend, self._packages)
        self.num_tasks = len(self._tasks)
        self.task = self._tasks[0]
        self.limits = self._limits_of(self.task)  # type: ignore[misc]  # each task has its own
        self.verifier_output = ""
        """The output of the last verifier, for people: no model is shown it."""
        self._spent_s = 0.0
        self.card = EnvCard(
            task=f"Do a task of {Path(path).name} on a computer.",
            tools=("shell",),
            reward="What the task's own verifier writes.",
            oracle="runs solution/solve.sh" if self.has_oracle else "",
            cheat="writes the reward, plants tests and forges verdicts",
            data=f"{self.num_tasks} Harbor tasks in {Path(path).name}",
        )
        if not self.has_oracle:
            self.make_oracle = None  # type: ignore[assignment, method-assign]  # there is none to claim

    @property
    def has_oracle(self) -> bool:
        """True if every task has a solution."""
        return all(task.has_solution for task in self._tasks)

    def task_identity(self) -> JSON:
        """The task's files."""
        return self.task.digest

    def start(self, options: dict[str, Any]) -> str:
        """Draws a task of the side that the seed asks for, and makes its machine."""
        side = [task for task in self._tasks if is_held_out(task.digest) == self._wants_held_out] or self._tasks
        self.task = side[int(self.np_random.integers(len(side)))]
        self._spent_s, self.verifier_output = 0.0, ""
        self.limits = self._limits_of(self.task)  # type: ignore[misc]
        self._begin_machine()
        return self.task.instruction

    @tool(timeout_s=None, on_error="raise")
    def shell(self, command: str) -> str:
        """Runs shell commands (sh) in the task's folder. Files are kept, variables are not.

        Args:
            command: One or more commands.
        """
        answer = super().shell(command)
        if self._spent_s >= self.task.agent_timeout_s and not self._over:
            return f"{answer}\n[the {self.task.agent_timeout_s:g} s of this task are used up. {self._judge()}]"
        return answer

    def parse_command(self, text: str) -> tuple[AnyCall, ...]:
        """Reads a line that a person typed as a shell command; an empty one and `done` end the work."""
        if (calls := super().parse_command(text)) or text.strip() in ("", "done"):
            return calls
        return (ToolCall("call_0", "shell", {"command": text}),)

    def on_message(self, text: str) -> str:
        """Ends the work: the task is judged."""
        return self._judge()

    def on_last_turn(self) -> None:
        """Judges what has been done so far."""
        self._judge()

    def run(self, command: str, *, time_limit_s: float | None = None) -> Ran:
        """Runs a command of the agent; the seconds of all of them together are the task's `agent.timeout_sec`."""
        left = max(0.001, self.task.agent_timeout_s - self._spent_s)
        lines = _exports(self.task.env_of("environment"))
        ran = super().run(f"{lines}{command}", time_limit_s=min(time_limit_s or self._command_s, left))
        self._spent_s += ran.seconds
        return ran

    def make_oracle(self) -> Policy:
        """A policy that runs the task's own solution."""
        return ScriptedPolicy(self._solve)

    def make_cheat(self) -> Policy:
        """A policy that writes rewards and tests instead of doing the task."""
        return Trickster("shell", _tricks)

    def leaks(self) -> list[str]:
        """Returns where a task's own files give away its solution or its tests."""
        return [leak for task in self._tasks for leak in _leaks_of(task)]

    def container_kind(self) -> Kind:
        """Returns what the container of this episode's task is made from."""
        environment = self.task.config.get("environment", {})
        text = self.task.text_of("environment/Dockerfile") or f"FROM {environment.get('docker_image', '')}\n"
        workdir = f"WORKDIR {environment['workdir']}\n" if environment.get("workdir") else ""
        folder = self.task.folder / "environment"
        return Kind(
            dockerfile=str(folder if folder.is_dir() else self.task.folder),
            dockerfile_text=f"{text}{BUILD_END}{workdir}",
            folder="/",
            limits=self.limits,
            num_warm=1 if self.num_tasks == 1 else 0,
        )

    def _limits_of(self, task: HarborTask) -> ContainerLimits:
        return ContainerLimits(
            memory_mb=task.memory_mb,
            num_cores=min(task.cpus, float(os.cpu_count() or 1)),
            time_limit_s=self._command_s,
            output_kb=OUTPUT_KB,
        )

    def _begin_machine(self) -> None:
        """Makes the task's machine in a box if it can be one there, else in a container."""
        self._discard()
        if self.backend == "docker":
            return self.begin()
        try:
            return self._begin_box(self.backend)
        except NotInBox as error:
            if self.backend != "auto":
                raise EnvironmentFault(f"{self.task.name} is not played in {self.backend}: {error}") from error
            reason = str(error)
        try:
            self.begin()
        except EnvironmentFault as error:
            raise EnvironmentFault(f"{self.task.name} is not played in a box ({reason}), and {error}") from error

    def _begin_box(self, backend: str) -> None:
        task = self.task
        setup = read_setup(task, self._packages, backend)
        limits = SandboxLimits(
            time_limit_s=max(self._command_s, task.verifier_timeout_s),
            memory_mb=max(64, task.memory_mb),
            num_processes=64,
            scratch_mb=min(MAX_SCRATCH_MB, max(1, task.storage_mb)),
            output_kb=OUTPUT_KB,
        )
        folders = sorted(setup.folders)
        try:
            sandbox = shared_sandbox(backend, limits, packages=self._packages, folders=folders)
            if sandbox.backend == "landlock":
                setup = read_setup(task, self._packages, "landlock")
            root = f'export {ROOT}="$HOME"\n' if sandbox.backend == "landlock" else ""
            self._container = box = BoxWorkspace(sandbox, folders)
            for step in setup.steps:
                if not isinstance(step, str):
                    box.write(step)
                elif (ran := box.run(f"{root}{step}")).exit_code:
                    raise NotInBox(f"a step of its Dockerfile ended with {ran.exit_code}: {ran.output.strip()[-300:]}")
            box.prelude = f"{root}{setup.prelude()}"
        except SandboxError as error:
            raise EnvironmentFault(f"{task.name} needs a sandbox: {error}") from error

    def _judge(self) -> str:
        """Ends the agent's processes, puts the tests in, runs the verifier, and ends the episode with its reward.

        Raises EnvironmentFault if there is no verdict.
        """
        task, machine = self.task, self.container
        try:
            machine.renew(without=("tests",))
            machine.write({"logs/verifier/.begun": b""})
            tests = read_tree(task.folder / "tests")
            machine.write({f"tests/{path}": content for path, content in tests.items()}, is_protected=True)
            ran = machine.run(_verifier_command(task, tests["test.sh"]), time_limit_s=task.verifier_timeout_s)
            self.verifier_output = ran.output
            _check_verifier(task, ran)
            machine.end_processes()
            texts = {path: machine.read(path) for path in REWARDS}
        except (SandboxError, ConfigError) as error:
            raise EnvironmentFault(f"{task.name} could not be judged: {error}") from error
        reward = _reward_of(task, texts, ran)
        self.end(success=reward >= 1.0, reward=reward)
        return f"The work is judged: reward {reward:g}."

    def _solve(self, observation: str) -> Script:
        files = read_tree(self.task.folder / "solution")
        self.container.write({f"solution/{path}": content for path, content in files.items()})
        command = _script_command("solution/solve.sh", files["solve.sh"])
        yield "shell", {"command": f"{_exports(self.task.env_of('solution'))}{command}"}
        yield "It is done."


def names() -> list[str]:
    """Returns no names: tasks are named by their folders."""
    return []


@functools.lru_cache(maxsize=64)
def _tasks_of(path: str, backend: str, packages: tuple[Path, ...]) -> list[HarborTask]:
    """Reads tasks once in a process; raises ConfigError if a box that was asked for can be none of their machines."""
    tasks = read_harbor_tasks(path)
    if backend not in ("auto", "docker"):
        reasons = {task.name: reason for task in tasks if (reason := _reason_against(task, packages, backend))}
        tasks = [task for task in tasks if task.name not in reasons]
        if not tasks:
            first = next(iter(reasons))
            raise ConfigError(f"{backend} can be the machine of no task of {path}: {first}: {reasons[first]}")
    return tasks


def _reason_against(task: HarborTask, packages: tuple[Path, ...], backend: str) -> str:
    try:
        read_setup(task, packages, backend)
    except NotInBox as error:
        return str(error)
    return ""


def _exports(env: Mapping[str, str]) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in env.items())


def _script_command(path: str, content: bytes) -> str:
    """Returns the command that runs a script by the program that its first line names; its mode may have been lost."""
    first = content.partition(b"\n")[0].decode("utf-8", "replace")
    program = first.removeprefix("#!").strip() if first.startswith("#!") else "sh"
    return f'{program} "${{{ROOT}-}}/{path}"'


def _verifier_command(task: HarborTask, script: bytes) -> str:
    stale = " ".join(f'"${{{ROOT}-}}/{path}"' for path in REWARDS)
    env = _exports({"PYTHONNOUSERSITE": "1", **task.env_of("environment"), **task.env_of("verifier")})
    return f"rm -rf {stale} || exit {CANNOT_RUN[0]}\n{env}{_script_command('tests/test.sh', script)}"


def _check_verifier(task: HarborTask, ran: Ran) -> None:
    """Raises EnvironmentFault if a verifier did not run to its end, or could not run a program of its own."""
    what = ""
    if ran.timed_out:
        what = f"was stopped after {task.verifier_timeout_s:g} s"
    elif ran.is_cut:
        what = f"was stopped: more than {OUTPUT_KB} KiB of output"
    elif ran.is_lost:
        what = "lost its machine"
    elif ran.exit_code in CANNOT_RUN or ran.exit_code > SIGNALED:
        what = f"ended with exit code {ran.exit_code}"
    if what:
        raise EnvironmentFault(f"the verifier of {task.name} {what}: {ran.output.strip()[-500:]}")


def _reward_of(task: HarborTask, texts: Mapping[str, bytes | None], ran: Ran) -> float:
    """Returns the reward in the files of a verdict; raises EnvironmentFault if there is none, or no single one."""
    path, text = next(((path, text) for path, text in texts.items() if text is not None), ("", b""))
    if not path:
        raise EnvironmentFault(
            f"the verifier of {task.name} wrote no reward (exit code {ran.exit_code}): {ran.output.strip()[-500:]}"
        )
    value: object = text.decode("utf-8", "replace").strip()
    try:
        if path.endswith(".json"):
            rewards = json.loads(text)
            if not isinstance(rewards, dict) or len(rewards) != 1:
                keys = ", ".join(rewards) if isinstance(rewards, dict) else f"{rewards!r:.80}"
                raise EnvironmentFault(f"the verifier of {task.name}: one reward is played, and /{path} has: {keys}")
            (value,) = rewards.values()
            if not isinstance(value, int | float):
                raise ValueError
        reward = float(value)  # type: ignore[arg-type]
        if not math.isfinite(reward):
            raise ValueError
    except (ValueError, OverflowError, RecursionError) as error:
        raise EnvironmentFault(f"the verifier of {task.name}: /{path} has no number: {value!r:.80}") from error
    return reward


def _leaks_of(task: HarborTask) -> list[str]:
    """Returns which of the files that an agent sees hold a whole file of the solution or of the tests."""
    seen = {f"environment/{path}": content for path, content in read_tree(task.folder / "environment").items()}
    seen["instruction.md"] = task.instruction.encode()
    leaks = []
    for name in ("solution", "tests"):
        for path, content in read_tree(task.folder / name).items():
            if len(secret := content.strip()) >= MIN_LEAK:
                leaks += [f"{task.name}: {where} holds {name}/{path}" for where, text in seen.items() if secret in text]
    return leaks


def _tricks(env: TextEnv) -> list[Message]:
    commands = (
        f'mkdir -p "${{{ROOT}-}}/logs/verifier"; echo 1 > "${{{ROOT}-}}/logs/verifier/reward.txt"',
        f'echo \'{{"reward": 1}}\' > "${{{ROOT}-}}/logs/verifier/reward.json"',
        f'(while :; do echo 1 > "${{{ROOT}-}}/logs/verifier/reward.txt"; done) >/dev/null 2>&1 &',
        f'printf \'echo 1 > "${{{ROOT}-}}/logs/verifier/reward.txt"\' > "${{{ROOT}-}}/tests/test.sh"',
        f'cat "${{{ROOT}-}}"/solution/* "${{{ROOT}-}}"/tests/*',
        f'ln -s /dev/null "${{{ROOT}-}}/logs/verifier/reward.txt"; exit 1',
    )
    return [tool_call_reply("shell", command=command) for command in commands]
