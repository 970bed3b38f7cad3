"""Gymnasium's vector environments, wrappers and checker take the bundled environments as they come."""

from __future__ import annotations

import contextlib
import multiprocessing
import subprocess
import sys
import warnings
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

from agentgym.envs.catalog.plugin import BUNDLED, register_envs

START_METHODS = multiprocessing.get_all_start_methods()
SPAWNING = """
import gymnasium, multiprocessing
multiprocessing.set_start_method({method!r})
envs = gymnasium.make_vec({env_id!r}, num_envs=2, vectorization_mode="async")
observations, _ = envs.reset(seed=3)
again, rewards, *_ = envs.step(("look", "look"))
print(repr((tuple(observations), tuple(again), rewards.tolist())))
envs.close()
"""
register_envs()


def first_steps(env_id: str, **keywords: Any) -> tuple[Any, ...]:
    """What two environments say at reset and to `look`."""
    envs = gymnasium.make_vec(env_id, num_envs=2, **keywords)
    observations, _ = envs.reset(seed=3)
    again, rewards, *_ = envs.step(("look", "look"))
    envs.close()
    return tuple(observations), tuple(again), rewards.tolist()


@pytest.mark.long(cases=2)
@pytest.mark.parametrize("env_id", BUNDLED)
def test_vector_environments_work_with_their_defaults(env_id: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        vector = first_steps(env_id)
        assert first_steps(env_id, vectorization_mode="async") == vector
    with contextlib.closing(gymnasium.make(env_id)) as single:
        assert [single.reset(seed=3 + i)[0] for i in range(2)] == list(vector[0])


@pytest.mark.long
@pytest.mark.parametrize("method", START_METHODS)
def test_workers_may_start_in_any_way(method: str) -> None:
    code = SPAWNING.format(method=method, env_id="TextGame-v0")
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == repr(first_steps("TextGame-v0"))


@pytest.mark.long(cases=2)
@pytest.mark.parametrize("env_id", BUNDLED)
@pytest.mark.parametrize("render_mode", [None, "ansi"])
def test_the_checker_of_gymnasium_gives_no_warning(env_id: str, render_mode: str | None) -> None:
    with warnings.catch_warnings(), contextlib.closing(gymnasium.make(env_id, render_mode=render_mode)) as env:
        warnings.simplefilter("error")
        check_env(env.unwrapped)


@pytest.mark.parametrize("env_id", sorted(set(BUNDLED) - {"Prompt-v0", "ToolPrompt-v0", "Math-v0"}))
def test_the_standard_wrappers_go_around_it(env_id: str) -> None:
    env: Any = gymnasium.make(env_id, max_episode_steps=2)
    env = gymnasium.wrappers.RecordEpisodeStatistics(gymnasium.wrappers.Autoreset(env))
    env.reset(seed=0)
    steps = [env.step("look") for _ in range(3)]
    assert [step[3] for step in steps] == [False, True, False]
    assert steps[1][4]["episode"]["l"] == 2
    env.close()
