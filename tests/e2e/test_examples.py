"""Every environment under examples/ passes the checks that its author would run."""

from __future__ import annotations

import importlib
import inspect
from pathlib import Path

import pytest

from agentgym.cli.main import main
from agentgym.data import DataConfig, open_data
from agentgym.envs import Action, TextEnv, make_env
from agentgym.types import Message

AGENTS = {"black_box_agent"}
"""Examples that play environments; the tests of `agentgym serve` run them."""
REWARDS = {"custom_reward"}
"""Examples that score episodes; tests/rewards/test_example.py runs them."""
CONTAINERS = {"container_env"}
"""Examples that need a Docker daemon; tests/docker/test_docker_env.py plays them."""
CUSTOMERS = {"model_customer"}
"""Examples that talk to an agent; tests/envs/tasks/retail/test_env.py runs them."""
LOOPS_AND_LOSSES = {"minimal_loop", "own_loss"}
"""Examples of training; test_example_scripts.py runs them."""
FOLDER = Path(__file__).parents[2] / "examples"
FILES = FOLDER.glob("*.py")
ELSEWHERE = AGENTS | REWARDS | CONTAINERS | CUSTOMERS | LOOPS_AND_LOSSES
EXAMPLES = sorted(path.stem for path in FILES if path.stem[0] != "_" and path.stem not in ELSEWHERE)


def environments(module: str) -> list[str]:
    classes = inspect.getmembers(importlib.import_module(f"examples.{module}"), inspect.isclass)
    own = [
        name for name, class_ in classes if issubclass(class_, TextEnv) and class_.__module__ == f"examples.{module}"
    ]
    return [f"examples.{module}:{name}" for name in own]


@pytest.mark.long
@pytest.mark.parametrize("module", EXAMPLES)
def test_an_example_is_sound(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert environments(module)
    for name in environments(module):
        assert main(["env", "check", name]) == 0, capsys.readouterr().out


def test_rows_from_python_are_played_by_the_environment_that_they_name() -> None:
    rows = FOLDER / "word_problems.py"
    data = open_data(DataConfig(train=f"{rows}:rows", eval_fraction=0.1))
    assert len(data.train) + len(data.eval) == 1000
    for task in (data.train[0], data.eval[-1]):
        env = make_env(task.env_id)
        observation, info = env.reset(seed=task.seed, options=dict(task.options))
        assert [message.role for message in info["messages"]] == ["system", "user"]
        boxes, apples, eaten = (int(word) for word in observation.split() if word.isdecimal())
        total = env.step(f"multiply {boxes} {apples}")[0]
        left, *_ = env.step(f"subtract {total} {eaten}")
        assert left == task.options["ground_truth"]
        _, reward, terminated, *_ = env.step(Action.from_message(Message("assistant", left)))
        assert (reward, terminated) == (1.0, True)
        env.close()
