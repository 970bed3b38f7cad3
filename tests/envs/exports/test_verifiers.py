"""Exported environments under the real verifiers: played by `vf-eval`, and here as any environment of verifiers."""

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

from agentgym.cli.main import main
from agentgym.engines.servers.server_process import free_port
from agentgym.envs import EVAL_SEED_START, TextEnv, make_env
from agentgym.envs.base.action import Action
from agentgym.envs.base.policies import RandomPolicy
from agentgym.errors import ConfigError, EnvironmentFault
from agentgym.types import MalformedCall, Message, ToolCall
from tests.envs.adapters.conftest import running

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
ROOMS, HEARD = f"{HERE / 'rooms.py'}:Rooms", f"{HERE / 'rooms.py'}:Heard"


@pytest.fixture
def exported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Exports an environment; returns the folder of its module."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def export(name: str, *words: str) -> Path:
        folder = tmp_path / name.rpartition(":")[2]
        assert main(["env", "export", name, "--to", "verifiers", str(folder), *words]) == 0
        (module,) = (path.parent for path in folder.glob("*/__init__.py"))
        return module

    return export


def played(module: Path, python: Path, **settings: Any) -> TextEnv:
    return make_env(f"verifiers/{module}", {"python": str(python), **settings})


@pytest.mark.adapter
def test_the_exported_environment_is_the_environment(exported: Any, verifiers_0_4_python: Path) -> None:
    module = exported("TextGame-v0", "--env-kwargs", "level=1")
    here, there = make_env("TextGame-v0", {"level": 1}), played(module, verifiers_0_4_python, num_tasks=3)
    for seed in range(3):
        observation, info = here.reset(seed=seed)
        _, info_there = there.reset(seed=seed)
        assert [message.content for message in info_there["messages"]] == [here.system_prompt, observation]
        assert there.tool_specs == here.tool_specs
        player, total, is_over = RandomPolicy(), 0.0, False
        player.reset(here, observation, seed)
        while not is_over:
            reply = Action.from_message(player.act(observation))
            observation, reward, terminated, truncated, info = here.step(reply)
            _, paid, *ends, info_there = there.step(reply)
            total, is_over = total + reward, terminated or truncated
            assert any(ends) == is_over
            if not is_over:
                contents = [message.content for message in info_there["messages"]]
                assert contents == [message.content for message in info["messages"]]
        assert paid == pytest.approx(total) and info_there["metrics"]["turns"] == info["metrics"]["turns"]
    there.close()


def call(env: TextEnv, *calls: ToolCall | MalformedCall) -> Any:
    return env.step(Action.from_message(Message("assistant", "", tool_calls=calls)))


@pytest.mark.adapter
def test_calls_failures_and_another_history_are_those_of_the_environment(
    exported: Any, verifiers_0_4_python: Path
) -> None:
    env = played(exported(ROOMS), verifiers_0_4_python)
    env.reset(seed=1)
    *_, info = call(env, MalformedCall("a", "{oops", "no JSON"), ToolCall("b", "fly", {}), ToolCall("c", "leave", {}))
    contents = {message.tool_call_id: message.content for message in info["messages"]}
    assert "JSON" in contents["a"] and "fly" in contents["b"] and "door" in contents["c"]
    *_, info = call(env, ToolCall("d", "dream", {}))
    assert [message.content for message in info["history"]][-1] == "You wake up."
    _, reward, terminated, *_ = call(env, ToolCall("e", "leave", {"door": 2}))
    assert (reward, terminated) == (0.5, True)
    env.reset(seed=1)
    with pytest.raises(EnvironmentFault, match=r"HarnessError: .*the door is jammed"):
        call(env, ToolCall("a", "knock", {}))
    env.close()


@pytest.mark.adapter
def test_keywords_and_held_out_tasks_are_those_of_the_taskset(exported: Any, verifiers_0_4_python: Path) -> None:
    env = played(exported(HEARD), verifiers_0_4_python, num_tasks=2, held_out=True)
    assert env.reset(seed=3)[0] == make_env(HEARD).reset(seed=EVAL_SEED_START + 1)[0]
    env.close()
    with pytest.raises(ConfigError, match="does not take the keyword 'levl': did you mean 'level'"):
        played(exported("TextGame-v0"), verifiers_0_4_python, env_kwargs={"levl": 1})


@pytest.mark.adapter
def test_its_own_evaluation_plays_it_by_an_endpoint(exported: Any, verifiers_0_4_python: Path, tmp_path: Path) -> None:
    module, port = exported(HEARD), free_port()
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(module.parent), str(ROOT)])}
    with running(sys.executable, "-m", "agentgym", "fake-server", "--port", str(port)):
        wait_for(f"http://127.0.0.1:{port}/health")
        words = [
            module.name,
            "-m",
            "embedded",
            "--client.base-url",
            f"http://127.0.0.1:{port}/v1",
            "-n",
            "2",
            "-r",
            "3",
        ]
        command = [verifiers_0_4_python.with_name("vf-eval"), *words, "--no-push", "--no-rich"]
        done = subprocess.run(
            command, cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=200, check=False
        )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (results,) = tmp_path.rglob("traces.jsonl")
    traces = [trace for line in results.read_text().splitlines() for trace in json.loads(line)["traces"]]
    assert [trace["rewards"]["reward"]["score"] for trace in traces] == [0.5] * 6
    prompts = {trace["nodes"][0]["message"]["content"] for trace in traces}
    assert prompts == {make_env(HEARD).reset(seed=seed)[0] for seed in range(2)}


def wait_for(url: str) -> None:
    until = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(url, timeout=5).close()
            return
        except OSError:
            assert time.monotonic() < until
            time.sleep(0.2)


def test_without_the_library_its_package_is_named() -> None:
    code = "import sys; sys.modules['verifiers'] = None; import agentgym.envs.exports.verifiers"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "ConfigError: verifiers 0.4 cannot be imported" in done.stderr
    assert "pip install 'verifiers>=0.4,<0.5'" in done.stderr
