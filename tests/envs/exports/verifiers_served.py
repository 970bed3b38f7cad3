"""The tests that `test_verifiers.py` has run by an interpreter with the verifiers library."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import verifiers as vf

from agentgym.cli.main import main
from agentgym.engines.servers.server_process import free_port
from agentgym.envs import EVAL_SEED_START, TextEnv, make_env
from agentgym.envs.base.action import Action
from agentgym.envs.base.policies import RandomPolicy
from agentgym.errors import EnvironmentFault
from agentgym.types import MalformedCall, Message, ToolCall
from tests.envs.adapters.conftest import running

pytestmark = pytest.mark.adapter
HERE = Path(__file__).parent
ROOMS = f"{HERE / 'rooms.py'}:Rooms"


@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Exports an environment, and puts its package on the path; returns the name that verifiers takes."""

    def export(name: str, *words: str) -> str:
        folder = tmp_path / name.rpartition(":")[2]
        assert main(["env", "export", name, "--to", "verifiers", str(folder), *words]) == 0
        monkeypatch.syspath_prepend(folder)
        (module,) = (path.parent.name for path in folder.glob("*/__init__.py"))
        sys.modules.pop(module, None)
        return module.replace("_", "-")

    return export


def test_the_exported_environment_is_the_environment(exported: Any) -> None:
    name = exported("TextGame-v0", "--env-kwargs", "level=1")
    here, there = make_env("TextGame-v0", {"level": 1}), make_env(f"verifiers/{name}")
    assert there.tool_specs == here.tool_specs
    for seed in range(5):
        observation, info = here.reset(seed=seed)
        _, info_there = there.reset(seed=seed)
        assert [message.content for message in info_there["messages"]] == [here.system_prompt, observation]
        player, total, over = RandomPolicy(), 0.0, False
        player.reset(here, observation, seed)
        while not over:
            reply = Action.from_message(player.act(observation))
            observation, reward, terminated, truncated, info = here.step(reply)
            _, paid, *ends, info_there = there.step(reply)
            assert [message.content for message in info_there["messages"]] == [
                each.content for each in info["messages"]
            ]
            total, over = total + reward, terminated or truncated
            assert any(ends) == over
        assert paid == pytest.approx(total) and info_there["metrics"]["success"] == info["metrics"]["success"]
    there.close()


def test_keywords_rows_and_held_out_rows_are_those_of_load_environment(exported: Any) -> None:
    name = exported("TextGame-v0", "--env-kwargs", "level=1")
    environment = vf.load_environment(name, num_train=7, num_eval=3, level=2)
    assert [row["info"]["seed"] for row in environment.get_dataset()] == list(range(7))
    assert [row["info"]["seed"] for row in environment.get_eval_dataset()] == [EVAL_SEED_START + n for n in range(3)]
    assert environment.make_served().unwrapped.level == 2
    with pytest.raises(RuntimeError, match="does not take the keyword 'levl': did you mean 'level'"):
        vf.load_environment(name, levl=1)


def call(env: TextEnv, *calls: ToolCall | MalformedCall) -> Any:
    return env.step(Action.from_message(Message("assistant", "", tool_calls=calls)))


def test_calls_that_cannot_be_run_are_answered_and_a_call_ends_the_episode(exported: Any) -> None:
    env = make_env(f"verifiers/{exported(ROOMS)}")
    env.reset(seed=1)
    *_, info = call(env, MalformedCall("a", "{oops", "no JSON"), ToolCall("b", "fly", {}), ToolCall("c", "leave", {}))
    contents = {message.tool_call_id: message.content for message in info["messages"]}
    assert "JSON" in contents["a"]
    assert "fly" in contents["b"] and "door" in contents["c"]
    _, reward, terminated, _, info = call(env, ToolCall("d", "leave", {"door": 2}))
    assert (reward, terminated, info["metrics"]["success"]) == (0.5, True, 1.0)  # of the adapter: at least 0.5
    assert info["metrics"]["reward"] == 0.5
    env.close()


@pytest.mark.parametrize(
    ("tool", "message"),
    [("knock", "the environment raised EnvironmentFault"), ("dream", "Rooms rewrites its history, which verifiers")],
)
def test_a_failure_is_an_error_of_the_rollout_and_no_reward(exported: Any, tool: str, message: str) -> None:
    env = make_env(f"verifiers/{exported(ROOMS)}")
    env.reset(seed=1)
    with pytest.raises(EnvironmentFault, match=message):
        call(env, ToolCall("a", tool, {}))
    env.close()


def test_the_environment_of_a_rollout_is_closed_in_the_end(exported: Any) -> None:
    env: Any = make_env(f"verifiers/{exported(ROOMS)}")
    kind = type(env._environment.make_served())
    before = kind.closed
    env.reset(seed=1)
    call(env, ToolCall("a", "leave", {"door": 1}))
    assert kind.closed == before + 1
    env.reset(seed=2)
    env.close()  # in the middle of an episode: the rollout is cancelled
    until = time.monotonic() + 20
    while kind.closed < before + 2 and time.monotonic() < until:
        time.sleep(0.05)
    assert kind.closed == before + 2


def test_its_own_evaluation_plays_it_by_an_endpoint(exported: Any, tmp_path: Path) -> None:
    name, port = exported(f"{HERE / 'rooms.py'}:Heard"), free_port()
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path / "Heard"), *sys.path]), "KEY": "x"}
    with running(sys.executable, "-m", "agentgym", "fake-server", "--port", str(port)):
        wait_for(f"http://127.0.0.1:{port}/health")
        words = [name, "-m", "embedded", "-b", f"http://127.0.0.1:{port}/v1", "-k", "KEY", "-n", "2", "-r", "3", "-s"]
        command = [sys.executable, "-m", "verifiers.legacy.scripts.eval", *words, "-t", "8"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200, check=False
        )
    assert done.returncode == 0, done.stdout + done.stderr
    (results,) = tmp_path.rglob("results.jsonl")
    rows = [json.loads(line) for line in results.read_text().splitlines()]
    assert [row["reward"] for row in rows] == [0.5] * 6
    assert len({row["prompt"][0]["content"] for row in rows}) == 2 and rows[0]["prompt"][0]["role"] == "user"


def wait_for(url: str) -> None:
    until = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.2)
