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
from agentgym.envs.adapters.harbor_task import HarborTask, list_executables, read_harbor_tasks, read_tree
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
from agentgym.tools.containers.workspace import ContainerLimits, Ran, ShellMachine
from agentgym.tools.sandbox import BACKENDS, SandboxLimits
from agentgym.tools.sandbox.workspace import BoxWorkspace, WorkspaceError
from agentgym.types import JSON, AnyCall, Message, ToolCall

__all__ = ["Harbor", "names"]

REWARDS = ("logs/verifier/reward.json", "logs/verifier/reward.txt")
"""The files of a verdict, in Harbor's order: the first one that is there counts."""
MAX_SCRATCH_MB = 256
"""The most MiB of files in a box, which are in memory, and of one file that a task's own script writes."""
OUTPUT_KB = 1024
VERIFIER_LOG, SOLUTION_LOG = "logs/verifier/test-stdout.txt", "logs/agent/oracle.txt"
"""The files that the output of a task's scripts goes to, as in Harbor."""
MIN_LEAK = 24
"""The characters of the shortest text that counts as a copy of a solution or of tests."""
SYSTEM_FOLDERS = "bin boot dev etc lib lib32 lib64 proc run sbin sys usr".split()
BUILD_END = f"""
USER root
RUN for folder in /*; do case "$folder" in {"|".join(f"/{name}" for name in SYSTEM_FOLDERS)}) ;; \\
    *) chown -R {NOBODY} "$folder" ;; esac; done; [ "$PWD" = / ] || chown -R {NOBODY} .; \\
    rm -rf /logs/verifier; \\
    mkdir -p /logs/agent /logs/artifacts /logs/verifier /tests && chown {NOBODY} /logs/agent /logs/artifacts && \\
    chown -R 0:0 /tests /logs/verifier && chown 0:0 /logs
"""
"""What a container needs besides its task: the task's files are those of the user of commands, tests are root's."""


class NoVerdict(EnvironmentFault):
    """A verifier has come to no verdict on the work as it is."""


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
        self._spent_s, self._limit_s = 0.0, command_s
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
        self._spent_s, self._limit_s, self.verifier_output = 0.0, self._command_s, ""
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
        ran = super().run(f"{lines}{command}", time_limit_s=min(time_limit_s or self._limit_s, left))
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
            time_limit_s=max(self._command_s, task.verifier_timeout_s, task.solution_s),
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
                _follow(box, step if isinstance(step, dict) else f"{root}{step}", setup.executables)
            box.prelude = f"{root}{setup.prelude(setup.env)}"
        except SandboxError as error:
            raise EnvironmentFault(f"{task.name} needs a sandbox: {error}") from error

    def _judge(self) -> str:
        """Ends the episode with the verdict on the work.

        Work on which the verifier comes to none is a 0, if it comes to one on the untouched machine: so no agent can
        turn its 0 into a fault. Raises EnvironmentFault if there is none either.
        """
        try:
            try:
                reward = self._run_verifier()
            except (NoVerdict, WorkspaceError) as error:
                self._begin_machine()
                self._run_verifier()
                reward, self.verifier_output = 0.0, str(error)
        except (SandboxError, ConfigError) as error:
            raise EnvironmentFault(f"{self.task.name} could not be judged: {error}") from error
        self.end(success=reward >= 1.0, reward=reward)
        return f"The work is judged: reward {reward:g}."

    def _run_verifier(self) -> float:
        """Ends the agent's processes, puts the tests in, runs the verifier, and returns its reward."""
        task, machine = self.task, self.container
        machine.renew(without=("tests", "logs/verifier"))
        machine.write({VERIFIER_LOG: b""})
        _put_folder(machine, task, "tests", is_protected=True)
        env = _exports({"PYTHONNOUSERSITE": "1", **task.env_of("environment"), **task.env_of("verifier")})
        command = _run_script("tests/test.sh", VERIFIER_LOG)
        ran = machine.run(f"{env}{command}", time_limit_s=task.verifier_timeout_s)
        if ran.is_lost:
            raise NoVerdict(f"the verifier of {task.name} lost its machine")
        self.verifier_output = output = f"{machine.run(_show_end(VERIFIER_LOG)).output}{ran.output}"
        machine.end_processes()
        if ran.timed_out:
            limit = f"{task.verifier_timeout_s:g} s"
            raise NoVerdict(f"the verifier of {task.name} was stopped after {limit}: {output.strip()[-500:]}")
        if (reward := _reward_of(task, {path: machine.read(path) for path in REWARDS})) is not None:
            return reward
        why = f"(exit code {ran.exit_code}): {output.strip()[-500:]}"
        raise NoVerdict(f"the verifier of {task.name} wrote no reward {why}")

    def _solve(self, observation: str) -> Script:
        _put_folder(self.container, self.task, "solution")
        self._limit_s = self.task.solution_s
        command = _run_script("solution/solve.sh", SOLUTION_LOG)
        end = f"code=$?\n{_show_end(SOLUTION_LOG)}\nexit $code"
        yield "shell", {"command": f"{_exports(self.task.env_of('solution'))}{command}{end}"}
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


def _run_script(path: str, log: str) -> str:
    """Returns the command that runs a script as Harbor does: one whose first line names no program is bash's."""
    shell = "shell=/bin/bash; [ -x $shell ] || shell=/bin/sh\n"
    script = f"""'ulimit -f {MAX_SCRATCH_MB << 10}; "$0" > "$1" 2>&1'"""  # a disk may be the machine's own
    return f'{shell}$shell -c {script} "${{{ROOT}-}}/{path}" "${{{ROOT}-}}/{log}"\n'


def _show_end(log: str) -> str:
    return f'/usr/bin/tail -c {OUTPUT_KB << 9} "${{{ROOT}-}}/{log}"'


def _put_folder(machine: ShellMachine, task: HarborTask, name: str, *, is_protected: bool = False) -> None:
    """Copies the tests or the solution of a task into its machine; their scripts can be run."""
    files = read_tree(task.folder / name)
    executables = {*list_executables(task.folder / name), "test.sh", "solve.sh"}
    contents = {f"{name}/{path}": content for path, content in files.items()}
    machine.write(contents, is_protected=is_protected, executables={f"{name}/{path}" for path in executables})


def _follow(box: BoxWorkspace, step: dict[str, bytes] | str, executables: set[str]) -> None:
    """Follows a step of a Dockerfile; raises NotInBox if it cannot be followed in a box."""
    if isinstance(step, dict):
        try:
            box.write(step, executables=executables & step.keys())
        except WorkspaceError as error:
            raise NotInBox(f"a COPY of its Dockerfile fails: {error}") from error
    elif (ran := box.run(step)).exit_code:
        raise NotInBox(f"a step of its Dockerfile ended with {ran.exit_code}: {ran.output.strip()[-300:]}")


def _reward_of(task: HarborTask, texts: Mapping[str, bytes | None]) -> float | None:
    """Returns the reward in the files of a verdict, or None; raises NoVerdict if it is no number, or several."""
    path, text = next(((path, text) for path, text in texts.items() if text is not None), ("", b""))
    if not path:
        return None
    value: object = text.decode("utf-8", "replace").strip()
    try:
        if path.endswith(".json"):
            rewards = json.loads(text)
            if not isinstance(rewards, dict) or len(rewards) != 1:
                keys = ", ".join(rewards) if isinstance(rewards, dict) else f"{rewards!r:.80}"
                raise NoVerdict(f"the verifier of {task.name}: one reward is played, and /{path} has: {keys}")
            (value,) = rewards.values()
            if not isinstance(value, int | float):
                raise ValueError
        reward = float(value)  # type: ignore[arg-type]
        if not math.isfinite(reward):
            raise ValueError
    except (ValueError, OverflowError, RecursionError) as error:
        raise NoVerdict(f"the verifier of {task.name}: /{path} has no number: {value!r:.80}") from error
    return reward


def _leaks_of(task: HarborTask) -> list[str]:
    """Returns which of the files that an agent sees hold a whole file of the solution or of the tests.

    A file that the tests and the environment share, under one name, is data of the task.
    """
    files = read_tree(task.folder / "environment")
    shared = {(Path(path).name, content) for path, content in files.items()}
    seen = {f"environment/{path}": _essence(content) for path, content in files.items()}
    seen["instruction.md"] = _essence(task.instruction.encode())
    leaks = []
    for name in ("solution", "tests"):
        for path, content in read_tree(task.folder / name).items():
            if len(secret := _essence(content)) < MIN_LEAK or (
                name == "tests" and (Path(path).name, content) in shared
            ):
                continue
            leaks += [f"{task.name}: {where} holds {name}/{path}" for where, text in seen.items() if secret in text]
    return leaks


def _essence(content: bytes) -> bytes:
    """Returns a text without its comments, and without white space."""
    return b"".join(b"".join(line.split()) for line in content.splitlines() if not line.lstrip().startswith(b"#"))


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
