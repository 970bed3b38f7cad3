"""Terminal-v0: tasks that their solutions do in every box, judged by the files alone."""

from __future__ import annotations

import numpy as np
import pytest

from agentgym.envs import Action, make_env, policy_for
from agentgym.envs.base.text_env import TextEnv
from agentgym.envs.tasks.terminal.env import Terminal
from agentgym.envs.tasks.terminal.tasks import TASKS, draw_task
from agentgym.errors import ConfigError, EnvironmentFault
from agentgym.tools.code import _sandboxes
from agentgym.tools.sandbox import SandboxLimits
from agentgym.types import Message, ToolCall

DOCKER = pytest.param("docker", marks=pytest.mark.docker)


def play(env: TextEnv, kind: str, seed: int) -> float:
    observation, _ = env.reset(seed=seed)
    policy = policy_for(env, kind)
    policy.reset(env, observation, seed)
    total, over = 0.0, False
    while not over:
        observation, reward, terminated, truncated, _ = env.step(Action.from_message(policy.act(observation)))
        total, over = total + float(reward), terminated or truncated
    return total


def call(env: TextEnv, tool: str, **arguments: str) -> tuple[str, float, bool]:
    message = Message("assistant", "", tool_calls=(ToolCall("1", tool, dict(arguments)),))
    observation, reward, over, *_ = env.step(Action.from_message(message))
    return observation, float(reward), over


@pytest.mark.long
@pytest.mark.parametrize("level", TASKS)
@pytest.mark.parametrize("backend", ["namespaces", "landlock", DOCKER])
def test_the_oracle_scores_one_and_the_cheat_zero(level: int, backend: str, request: pytest.FixtureRequest) -> None:
    if backend == "docker":
        request.getfixturevalue("docker_address")
    env = make_env("Terminal-v0", {"level": level, "backend": backend})
    assert [play(env, "oracle", seed) for seed in range(8)] == [1.0] * 8
    assert [play(env, "cheat", seed) for seed in range(8)] == [0.0] * 8
    env.close()
    for key in [name for name in _sandboxes if name[0] == "docker"]:
        _sandboxes.pop(key).close()  # its daemon ends with these tests


@pytest.mark.parametrize("level", TASKS)
def test_a_seed_gives_one_task_that_is_not_done_before_it_begins(level: int) -> None:
    tasks = [draw_task(level, np.random.default_rng(seed)) for seed in range(300)]
    assert tasks == [draw_task(level, np.random.default_rng(seed)) for seed in range(300)]
    assert len({repr(task.before) for task in tasks}) == 300
    assert not any(task.is_done({path: text.encode() for path, text in task.before.items()}) for task in tasks)
    assert all(task.is_done({path: text.encode() for path, text in task.after.items()}) for task in tasks)


def test_files_that_do_not_go_in_or_come_out_in_time_are_a_fault_and_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentgym.envs.tasks.terminal.env.LIMITS", SandboxLimits(time_limit_s=1e-4))
    env = Terminal()
    with pytest.raises(EnvironmentFault, match=r"the files of the task were not written \(time_limit\)"):
        env.reset(seed=0)
    monkeypatch.undo()
    env.reset(seed=0)
    assert env._session is not None
    monkeypatch.setattr(env._session, "limits", SandboxLimits(time_limit_s=1e-4))
    with pytest.raises(EnvironmentFault, match="could not be brought out within"):
        call(env, "done")
    env.close()


def test_files_alone_decide_and_one_too_many_is_wrong() -> None:
    env = Terminal(level=1)
    env.reset(seed=0)
    assert call(env, "shell", command="echo a; exit 3")[0] == "a\n[exit code 3]"
    call(env, "shell", command=env.task.solution)
    call(env, "shell", command="mkdir empty; touch one-too-many")
    assert call(env, "done") == ("The files are not as they should be.", 0.0, True)
    env.reset(seed=0)
    call(env, "shell", command=f"{env.task.solution}; mkdir empty")
    assert call(env, "done") == ("The files are as they should be.", 1.0, True)
    env.close()


def test_what_cannot_be_opened_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    env = Terminal(backend="docker")
    with pytest.raises(EnvironmentFault, match=r"needs a sandbox: .*no Docker daemon answers"):
        env.reset(seed=0)
    env.close()
    for wrong in ({"level": 4}, {"backend": "podman"}):
        with pytest.raises(ConfigError):
            Terminal(**wrong)  # type: ignore[arg-type]
