"""An environment whose tools run in a container of the episode's own: find a line that was hidden in a folder of logs.

Play it with `agentgym play examples.container_env:LogSearch`. It needs a Docker daemon and `pip install '.[docker]'`.
"""

from __future__ import annotations

from typing import Any

from agentgym.envs import DockerEnv, Policy, Script, ScriptedPolicy
from agentgym.tools import tool
from agentgym.tools.containers.workspace import ContainerLimits


class LogSearch(DockerEnv):
    """One of many log files has a line with an error; its number is the answer."""

    # dockerfile = "path/to/folder" builds an image, image = "python:3.12-slim" takes one; without either, ours is used.
    limits = ContainerLimits(memory_mb=256, num_processes=64, time_limit_s=5.0)
    system_prompt = "You work on a machine with the tool shell, and answer with the tool answer."
    max_turns = 10

    def start(self, options: dict[str, Any]) -> str:
        self.code = int(self.np_random.integers(10_000))
        hidden = int(self.np_random.integers(20))
        lines = [f"ERROR {self.code}" if file == hidden else "all is well" for file in range(20)]
        self.begin(files={f"logs/{file:02}.log": f"start\n{line}\nend\n".encode() for file, line in enumerate(lines)})
        return "One file in logs/ has a line with ERROR and a number. Answer with the number."

    @tool
    def answer(self, number: int) -> str:
        """Answers with the number behind ERROR."""
        self.end(success=number == self.code, reward=float(number == self.code))
        return "That is it." if number == self.code else "That is not it."

    def make_oracle(self) -> Policy:
        return ScriptedPolicy(self.solve)

    def solve(self, observation: str) -> Script:
        """Searches, and answers with what it read."""
        line = yield "shell", {"command": "grep -rh ERROR logs"}
        yield "answer", {"number": int(line.split()[1])}
