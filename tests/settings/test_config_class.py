"""Settings are checked when they are made, in words that a Python user knows, and their reprs are short."""

from __future__ import annotations

import copy
import inspect
import pickle
from collections.abc import Mapping
from dataclasses import asdict, field, replace
from pathlib import Path
from typing import Any, Literal

import pytest

from agentgym import TrainConfig, evaluate
from agentgym.envs import ToolEnv
from agentgym.errors import ConfigError, MissingSetting, UnknownName
from agentgym.evaluation import EvalConfig
from agentgym.notebook.html_view import MAX_REPR
from agentgym.settings.config_class import config_class, config_from_mapping
from agentgym.settings.other_names import OTHER_NAMES
from agentgym.trainers import ADVANTAGES, LearnerConfig, OptimizerConfig, SftConfig


class Lock(ToolEnv):
    """An environment that is named by its class."""


def brief(trajectory: object, task: object) -> float:
    return 0.0


@config_class
class Engine:
    power: float = 1.0
    kind: Literal["diesel", "electric"] = "diesel"


@config_class
class Car:
    name: str
    wheels: int = 4
    is_open: bool = False
    engine: Engine = field(default_factory=lambda: Engine(power=2.0))
    places: tuple[str, ...] = ()
    folder: Path | None = None
    options: Mapping[str, object] = field(default_factory=dict)


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "type": ({"steps": "3"}, "setting 'steps' is a whole number, got '3'"),
    "bool": ({"steps": True}, "setting 'steps' is a whole number, got True"),
    "none": ({"steps": None}, "setting 'steps' is a whole number, got None"),
    "typo": ({"stepz": 3}, "unknown setting 'stepz': did you mean 'steps'?"),
    "block": ({"learning_rate": 1e-4}, "did you mean optimizer={'learning_rate': ...}?"),
    "short": ({"lr": 1e-4}, "did you mean optimizer={'learning_rate': ...}?"),
    "elsewhere": ({"num_generations": 8}, "unknown setting 'num_generations': did you mean 'group_size'?"),
    "elsewhere, in a block": ({"max_tokens": 64}, "did you mean limits={'turn_tokens': ...}?"),
    "deep": ({"coefficient": 0.1}, "did you mean learner={'kl': {'coefficient': ...}}?"),
    "inner": ({"optimizer": {"learning_rte": 1e-4}}, "'optimizer.learning_rte': did you mean 'learning_rate'?"),
    "no block": ({"reward": "nosuch"}, "setting 'reward' holds settings of its own: function,"),
    "text": ({"trackers": "tensorboard"}, "setting 'trackers' is a list, got 'tensorboard'"),
    "item": ({"trackers": ["tensorboard", 3]}, "setting 'trackers' is a text, got 3"),
    "far": ({"zzz": 3}, "unknown setting 'zzz'. Known: advantage, agent, aggregation, algo"),
    "algo": ({"algo": "grpoo"}, "unknown algo 'grpoo': did you mean 'grpo'?"),
    "loss": ({"learner": {"loss": "gspoo"}}, "unknown policy loss 'gspoo': did you mean 'gspo'?"),
    "local": ({"env": type("Inner", (), {})}, "setting 'env': Inner cannot be found by its name"),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_in_python_is_answered_when_the_settings_are_made(case: str) -> None:
    settings, message = MISTAKES[case]
    with pytest.raises((ConfigError, UnknownName)) as error:
        TrainConfig(**{"env": "TextGame-v0", **settings})
    text = str(error.value)
    assert message in text and "--" not in text.partition("`")[0]


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_a_name_of_another_system_is_answered_with_the_setting(name: str) -> None:
    kind = EvalConfig if OTHER_NAMES[name] == "policy" else TrainConfig
    with pytest.raises(ConfigError) as error:
        kind(**{"env": "TextGame-v0", name: 1})
    block, *inner = OTHER_NAMES[name].split(".")
    assert f": did you mean {block}={{" in str(error.value) if inner else f"mean {block!r}?" in str(error.value)
    assert all(repr(part) in str(error.value) for part in inner)


def test_what_is_missing_is_named() -> None:
    for make in (TrainConfig, EvalConfig):
        with pytest.raises(MissingSetting, match=r"^missing env: name an environment") as error:
            make()
        assert "--" not in str(error.value)
    with pytest.raises(ConfigError, match=r"learned from: env \(demonstrations\), conversations \(files\) or episodes"):
        SftConfig()
    with pytest.raises(MissingSetting, match=r"^missing name$"):
        Car()  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match=r"TrainConfig takes settings by name, such as env=\.\.\., got 'TextGame-v0'"):
        TrainConfig("TextGame-v0")  # type: ignore[misc]
    with pytest.raises(ConfigError, match="unknown setting 'n': did you mean 'num_tasks'"):
        evaluate("TextGame-v0", "oracle", n=2)


def test_values_are_taken_in_any_form_of_their_type() -> None:
    car: Any = Car(name="a", engine={"kind": "electric"}, places=["front"], folder="runs")  # type: ignore[arg-type]
    assert car == Car(name="a", engine=Engine(power=2.0, kind="electric"), places=("front",), folder=Path("runs"))
    config = TrainConfig(env=Lock, reward={"function": brief}, optimizer={"learning_rate": "1e-4"})  # type: ignore[arg-type]
    assert (config.env, config.reward.function) == (f"{__name__}:Lock", f"{__name__}:brief")
    assert config.optimizer == OptimizerConfig(learning_rate=1e-4)
    assert TrainConfig(env="TextGame-v0", model=Path("a/b")).model == "a/b"  # type: ignore[arg-type]


def test_settings_are_dataclasses_that_are_copied_and_pickled() -> None:
    car = Car(name="a", wheels=3)
    assert pickle.loads(pickle.dumps(car)) == copy.deepcopy(car) == replace(car, name="a") == car
    assert config_from_mapping(Car, asdict(car)) == car
    with pytest.raises(ConfigError, match="setting 'wheels' is a whole number"):
        replace(car, wheels=1.5)  # type: ignore[arg-type]
    assert [*inspect.signature(Engine).parameters] == ["power", "kind"]


def test_a_record_may_name_an_algorithm_that_another_process_registered() -> None:
    assert "mine" not in ADVANTAGES
    assert config_from_mapping(TrainConfig, {"env": "TextGame-v0", "algo": "mine"}).algo == "mine"


def test_a_repr_has_what_was_set_and_makes_the_same_settings() -> None:
    config = TrainConfig(env="TextGame-v0", steps=3, optimizer=OptimizerConfig(learning_rate=1e-4))
    assert eval(repr(config), {**globals(), "TrainConfig": TrainConfig}) == config
    assert "steps=3" in repr(config) and "group_size" not in repr(config)
    learner = LearnerConfig(minibatches=2)
    for long in (
        TrainConfig(env="x" * 10_000, env_kwargs={f"k{n}": "y" * 300 for n in range(99)}, learner=learner),
        SftConfig(conversations=tuple(f"rows-{n}.jsonl" for n in range(999))),
        EvalConfig(env="TextGame-v0", stop=tuple("abcdefgh" * 99)),
    ):
        assert len(repr(long)) <= MAX_REPR


def test_the_table_of_a_notebook_escapes_what_was_set() -> None:
    page = TrainConfig(env="<script>alert(1)</script>\u202e", eval={"every": 5})._repr_html_()  # type: ignore
    assert "<script>" not in page and "&lt;script&gt;" in page and "\u202e" not in page
    assert "eval.every" in page and "group_size" not in page
