"""Makes tasks in Harbor's form for tests."""

from __future__ import annotations

from pathlib import Path

from agentgym.envs import Action, TextEnv, make_env, policy_for
from agentgym.envs.base.cheater import tool_call_reply
from agentgym.envs.base.text_env import StepResult
from agentgym.types import Message

__all__ = ["CONFIG", "TASK_FOLDERS", "call_shell", "finish", "open_task", "play_policy", "write_task"]

TASK_FOLDERS = sorted((Path(__file__).parents[3] / "examples" / "harbor").iterdir())
CONFIG = 'schema_version = "1.4"\n[verifier]\ntimeout_sec = 20\n[environment]\nmemory_mb = 512\nstorage_mb = 32\n'
TEST = """\
#!/bin/sh
[ "$(cat answer.txt 2>/dev/null)" = 42 ] && reward=1 || reward=0
echo $reward > "${AGENTGYM_ROOT-}/logs/verifier/reward.txt"
"""
FILES = {
    "task.toml": CONFIG,
    "instruction.md": "Write 42 to answer.txt.\n",
    "environment/Dockerfile": "FROM python:3.12-slim\nWORKDIR /app\n",
    "solution/solve.sh": "echo 42 > answer.txt\n",
    "tests/test.sh": TEST,
}


def write_task(folder: Path, **changes: str | None) -> Path:
    """Writes a small task; `changes` replace files by their paths, with `__` for `/`; None leaves one out."""
    names = {path.replace("/", "__").replace(".", "_"): path for path in FILES}
    texts = {**FILES, **{names.get(name, name.replace("__", "/")): text for name, text in changes.items()}}
    for path, text in texts.items():
        if text is not None:
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_text(text)
    return folder


def open_task(folder: Path, backend: str = "namespaces", **keywords: object) -> TextEnv:
    """Makes the environment of a task, and begins an episode."""
    env = make_env(f"harbor/{folder}", {"backend": backend, **keywords})  # type: ignore[dict-item]
    env.reset(seed=0)
    return env


def call_shell(env: TextEnv, command: str) -> StepResult:
    """Plays a turn with one command."""
    return env.step(Action.from_message(tool_call_reply("shell", command=command)))


def finish(env: TextEnv) -> StepResult:
    """Plays the turn that says that the work is done."""
    return env.step(Action.from_message(Message("assistant", "It is done.")))


def play_policy(env: TextEnv, kind: str, seed: int) -> float:
    """Plays an episode with a policy of the environment; returns its reward."""
    observation, _ = env.reset(seed=seed)
    policy, reward, is_over = policy_for(env, kind), 0.0, False
    policy.reset(env, observation, seed)
    while not is_over:
        observation, paid, terminated, truncated, _ = env.step(Action.from_message(policy.act(observation)))
        reward, is_over = reward + paid, terminated or truncated
    return reward
