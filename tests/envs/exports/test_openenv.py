"""Exported environments behind the real OpenEnv's server: played by its client, by ours, and checked by its command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from agentgym.cli.main import main
from agentgym.engines.servers.server_process import free_port
from agentgym.envs import Action, TextEnv, make_env
from agentgym.envs.base.policies import RandomPolicy
from agentgym.errors import ConfigError, EnvironmentFault
from agentgym.types import Message, ToolCall
from tests.envs.adapters.conftest import running

ROOT = Path(__file__).parents[3]
ROOMS = f"{Path(__file__).with_name('rooms.py')}:Rooms"
SERVE = """
import site, sys
root, ours, folder, port = sys.argv[1:]
sys.path[:0] = [folder, root]
site.addsitedir(ours)
import uvicorn
uvicorn.run("server.app:app", host="127.0.0.1", port=int(port), log_level="warning")
"""
CLIENT = """
import json, sys
sys.path.insert(0, sys.argv[1])
from openenv import AutoAction, AutoEnv
from rooms_env import RoomsAction, RoomsEnv
assert AutoEnv.get_env_class("rooms") is RoomsEnv and AutoAction.from_env("rooms") is RoomsAction
with RoomsEnv(base_url=sys.argv[2]).sync() as env:
    told = [env.reset(seed=3, episode_id="e"), env.step(RoomsAction(message="leave"))]
    state = env.state()
    told.append(env.step(RoomsAction(tool_calls=[{"name": "leave", "arguments": {"door": 1}}])))
print(json.dumps([[one.observation.text, one.reward, one.done, one.observation.metadata] for one in told]))
print(json.dumps([state.episode_id, state.step_count]))
"""


def export(name: str, folder: Path, *words: str) -> Path:
    assert main(["env", "export", name, "--to", "openenv", str(folder), *words]) == 0
    return folder


@pytest.fixture(scope="module")
def served(openenv_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The URLs of two exported environments, and the folder of one that `rooms_env` can be imported from."""
    home = tmp_path_factory.mktemp("served")
    folders = {"TextGame": export("TextGame-v0", home / "TextGame", "--env-kwargs", "level=1")}
    folders["Rooms"] = export(ROOMS, home / "rooms_env")
    about = home / "openenv_rooms_env-0.1.0.dist-info"  # what pip writes, by which OpenEnv discovers environments
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: openenv-rooms-env\nVersion: 0.1.0\n")
    ours = sysconfig.get_path("purelib")
    ports = {name: free_port() for name in folders}
    first, second = (
        running(openenv_python, "-c", SERVE, ROOT, ours, folder, str(ports[name])) for name, folder in folders.items()
    )
    with first, second:
        yield {**{name: f"http://127.0.0.1:{port}" for name, port in ports.items()}, "home": str(home)}


def _soon(url: str) -> TextEnv:
    until = time.monotonic() + 90
    while True:
        try:
            return make_env(f"openenv/{url}")
        except ConfigError:
            assert time.monotonic() < until
            time.sleep(0.3)


@pytest.mark.adapter
def test_the_exported_environment_is_the_environment(served: dict[str, str]) -> None:
    here, there = make_env("TextGame-v0", {"level": 1}), _soon(served["TextGame"])
    assert (there.system_prompt, there.tool_specs) == (here.system_prompt, here.tool_specs)
    for seed in range(5):
        observation, _ = here.reset(seed=seed)
        assert there.reset(seed=seed)[0] == observation
        player, over = RandomPolicy(), False
        player.reset(here, observation, seed)
        while not over:
            reply = Action.from_message(player.act(observation))
            observation, reward, *ends, _ = here.step(reply)
            assert there.step(reply)[:4] == (observation, reward, *ends)
            over = any(ends)
    there.close()


@pytest.mark.adapter
def test_its_own_client_plays_episodes_in_a_session(served: dict[str, str], openenv_python: Path) -> None:
    _soon(served["Rooms"]).close()
    command = [openenv_python, "-c", CLIENT, served["home"], served["Rooms"]]
    environ = {**os.environ, "XDG_CACHE_HOME": served["home"]}  # OpenEnv keeps what it discovers
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    (first, second, third), state = map(json.loads, done.stdout.splitlines())
    assert first[0].startswith("Room ") and first[1:3] == [None, False]
    assert "a reply must call a tool" in second[0] or "door" in second[0]
    assert third[:3] == ["You are out.", 0.5, True] and third[3]["success"] == 1.0
    assert state == ["e", 1]


@pytest.mark.adapter
def test_a_failure_of_the_environment_is_a_server_error(served: dict[str, str]) -> None:
    env = _soon(served["Rooms"])
    env.reset(seed=1)
    with pytest.raises(EnvironmentFault, match="the door is jammed"):
        env.step(Action.from_message(Message("assistant", "", tool_calls=(ToolCall("a", "knock", {}),))))
    env.close()


@pytest.mark.adapter
def test_its_own_checks_pass(served: dict[str, str], openenv_python: Path) -> None:
    _soon(served["TextGame"]).close()
    for target, verdicts in ((served["TextGame"], ["PASS"]), (f"{served['home']}/TextGame", ["PASS", "WARN"])):
        command = [openenv_python, "-m", "openenv.cli", "validate", target]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert done.stdout.split()[-1] in verdicts and "FAIL" not in done.stdout, done.stdout + done.stderr


def test_without_the_library_it_is_named() -> None:
    code = "import sys; sys.modules['openenv'] = None; import agentgym.envs.exports.openenv"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert "ConfigError: OpenEnv cannot be imported" in done.stderr and "pip install 'openenv" in done.stderr
