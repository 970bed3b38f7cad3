"""Parts of a user's own, named by file: tasks, optimizer, schedule, engine, renderer, observers; and epochs."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from agentgym.cli.main import main
from agentgym.data import DataConfig
from agentgym.errors import ConfigError, UnknownName, UserCodeFault
from agentgym.evaluation.run_check.verify import verify_run
from agentgym.rollout.record.episodes_file import read_episodes
from agentgym.trainers.algorithms.optimizers import schedule_share
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.loop.trainer import Trainer
from agentgym.trainers.resolve import resolve_config
from agentgym.trainers.settings.cluster import ClusterConfig
from agentgym.trainers.settings.held_out import HeldOutConfig
from agentgym.trainers.settings.optimizer import OptimizerConfig
from agentgym.trainers.settings.parity import ParityConfig
from agentgym.trainers.tasks import PracticeConfig

OWN = '''
import torch
from agentgym.engines.local.config import LocalEngineConfig
from agentgym.engines.local.engine import LocalEngine
from agentgym.engines.scripted import ScriptedEngine
from agentgym.chat_templates import ChatMLRenderer
from agentgym.trainers import TaskSampler, Unobserved
from agentgym.types import Task

SEEN = []


class Rising(TaskSampler):
    """A level more after each step; the questions of later steps depend on what was answered."""

    level = 1

    def train_tasks(self, step, places):
        return [Task("TextGame-v0", self.seed + 100 * step + place, kwargs={"level": self.level}) for place in places]

    def finish(self, step, groups):
        self.level = min(3, 1 + len([group for group in groups if group.trajectories]) * step // 2)

    def metrics(self):
        return {"level": self.level}

    def state(self):
        return {"level": self.level}

    def load(self, state):
        self.level = state["level"]


class Asked(TaskSampler):
    """Questions that are made for each step."""

    def train_tasks(self, step, places):
        return [self.question(step, place) for place in places]

    def question(self, step, place):
        prompt = {"role": "user", "content": f"{step} + {place}?"}
        return Task("Prompt-v0", place, options={"messages": [prompt], "ground_truth": str(step + place)})


class Broken(TaskSampler):
    def __init__(self, source, seed):
        raise ValueError("no tasks today")


class Watcher(Unobserved):
    def on_step(self, metrics):
        SEEN.append(metrics.step)


class Deaf:
    pass


def momentum(parameters, learning_rate, *, momentum=0.9):
    return torch.optim.SGD(parameters, lr=learning_rate, momentum=momentum)


def nothing(parameters, learning_rate):
    return "an optimizer"


def halves(step, total_steps):
    return 0.5 ** step


def negative(step):
    return -1.0


def local(model, folder, version):
    return LocalEngine(model, LocalEngineConfig(num_slots=8), version=version)


class Shouted(ChatMLRenderer):
    def text(self, messages, tools=(), **options):
        return super().text(messages, tools, **options).replace("Call:", "CALL:")


async def scripted(model, folder, version):
    return ScriptedEngine(lambda session, prompt, sampling: [*sampling.stop_ids], vocab_size=model.vocab_size)


def no_engine(model, folder, version):
    return model
'''
Train = Callable[..., Any]


def forget_own_files() -> None:
    """Has files of users run again, as in another process."""
    for name in [name for name in sys.modules if name.startswith("agentgym_user_")]:
        del sys.modules[name]


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return str(path)


@pytest.fixture
def quick(small_run: TrainConfig) -> TrainConfig:
    return replace(small_run, tasks=2, group_size=2, steps=3, eval=HeldOutConfig(episodes=0))


def lines(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_a_sampler_chooses_tasks_by_results_and_a_resumed_run_goes_on_with_them(
    quick: TrainConfig, own: str, train: Train, tmp_path: Path
) -> None:
    run, config = tmp_path / "run", replace(quick, practice=PracticeConfig(sampler=f"{own}:Rising"))
    config = replace(config, checkpoint=replace(config.checkpoint, every=1))
    train(config, run)
    levels = [record.trajectory.task.kwargs["level"] for record in read_episodes(run)]
    assert levels == [1] * 4 + [2] * 4 + [3] * 4
    assert [line["level"] for line in lines(run)] == [2, 3, 3]
    assert verify_run(run).ok
    whole = (run / "episodes.jsonl.zst").read_bytes()
    for step in (2, 3):
        shutil.rmtree(run / "checkpoints" / f"step-{step:06d}")
    train(config, run, resume=True)
    assert (run / "episodes.jsonl.zst").read_bytes() == whole


def test_a_sampler_may_ask_what_it_has_just_made_up(quick: TrainConfig, own: str, train: Train, tmp_path: Path) -> None:
    run = tmp_path / "run"
    train(replace(quick, steps=1, practice=PracticeConfig(sampler=f"{own}:Asked")), run)
    tasks = [record.trajectory.task for record in read_episodes(run)]
    assert {task.env_id for task in tasks} == {"Prompt-v0"}
    assert [task.options["ground_truth"] for task in tasks] == ["1", "1", "2", "2"]


@pytest.mark.long
def test_an_optimizer_and_a_schedule_of_ones_own_train(
    quick: TrainConfig, own: str, train: Train, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    optimizer = OptimizerConfig(
        name=f"{own}:momentum", settings={"momentum": 0.5}, decay=f"{own}:halves", learning_rate=0.01, warmup_steps=1
    )
    train(replace(quick, optimizer=optimizer), run)
    assert [line["learning_rate"] for line in lines(run)] == [0.01, 0.005, 0.0025]
    assert verify_run(run).ok


@pytest.mark.long
@pytest.mark.parametrize(("name", "settings"), [("sgd", {"momentum": 0.9}), ("adafactor", {})])
def test_optimizers_by_name_resume_to_the_bit(
    quick: TrainConfig, train: Train, tmp_path: Path, name: str, settings: dict[str, object]
) -> None:
    run, optimizer = tmp_path / "run", OptimizerConfig(name=name, settings=settings, learning_rate=1e-3)
    config = replace(quick, optimizer=optimizer, checkpoint=replace(quick.checkpoint, every=1))
    train(config, run)
    whole = (run / "episodes.jsonl.zst").read_bytes()
    for step in (2, 3):
        shutil.rmtree(run / "checkpoints" / f"step-{step:06d}")
    train(config, run, resume=True)
    assert (run / "episodes.jsonl.zst").read_bytes() == whole


def test_the_cosine_ends_at_its_floor() -> None:
    def share(step: int, floor: float) -> float:
        return schedule_share("cosine", {"floor": floor}, {"step": step, "total_steps": 12, "warmup_steps": 2})

    assert [share(step, 0.5) for step in (0, 2, 7, 12)] == [1.0, 1.0, pytest.approx(0.75), 0.5]
    assert share(7, 0.0) == pytest.approx(0.5)


@pytest.mark.long
def test_a_renderer_of_ones_own_is_recorded_and_verified(
    quick: TrainConfig, own: str, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    config = replace(quick, steps=2, family=f"{own}:Shouted", checkpoint=replace(quick.checkpoint, every=1))
    train(config, run)
    whole = (run / "episodes.jsonl.zst").read_bytes()
    shutil.rmtree(run / "checkpoints" / "step-000002")
    train(config, run, resume=True)
    assert (run / "episodes.jsonl.zst").read_bytes() == whole
    assert main(["verify", "--deep", str(run)]) == 0
    Path(own).rename(tmp_path / "moved.py")
    forget_own_files()
    capsys.readouterr()
    assert main(["verify", str(run)]) == 0, "it runs no code of a run"
    assert f"it needs the run's own renderer, {own}:Shouted, which --deep runs" in capsys.readouterr().out
    assert main(["verify", "--deep", str(run)]) == 2
    assert "cannot be opened; run the command where the run was started: no file" in capsys.readouterr().err


@pytest.mark.long
@pytest.mark.parametrize("name", ["local", "scripted"])
def test_an_engine_of_ones_own_plays(quick: TrainConfig, own: str, train: Train, tmp_path: Path, name: str) -> None:
    run = tmp_path / "run"
    config = replace(quick, steps=1, engine=f"{own}:{name}", parity=ParityConfig(max_mismatch=1000.0))
    train(config, run)
    replies = [span.ids for record in read_episodes(run) for row in record.trajectory.rows for span in row.spans]
    assert replies
    assert verify_run(run).ok


@pytest.mark.long
def test_an_observer_receives_each_step(quick: TrainConfig, own: str, train: Train, tmp_path: Path) -> None:
    train(replace(quick, steps=2, observers=(f"{own}:Watcher",)), tmp_path / "run")
    from agentgym.loading import Wanted, load_named

    assert load_named(f"{own}:SEEN", Wanted(noun="list", hint="")) == [1, 2]


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"engine": "sgang"}, UnknownName, "unknown engine 'sgang': did you mean 'sglang'"),
        (
            {"executor": "ray", "engine": "mine.py:x", "ray": ClusterConfig()},
            ConfigError,
            "executor ray has the engines",
        ),
        ({"epochs": 1.0}, ConfigError, "epochs are passes over rows of files"),
        ({"epochs": 0.0}, ConfigError, "epochs must be above 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings: dict[str, Any], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        TrainConfig(env="TextGame-v0", **settings)


@pytest.mark.parametrize(
    ("optimizer", "kind", "message"),
    [
        ({"name": "adamv"}, UnknownName, "unknown optimizer 'adamv'"),
        ({"name": "{own}:nothing"}, ConfigError, "returns a str, no torch.optim.Optimizer"),
        ({"name": "{own}:momentum", "settings": {"speed": 1}}, ConfigError, "has no setting 'speed'"),
        ({"settings": {"momentum": 1}}, ConfigError, "optimizer.settings are those of other optimizers than adamw"),
        ({"decay": "cosin"}, UnknownName, "unknown schedule 'cosin': did you mean 'cosine'"),
        ({"decay": "{own}:negative"}, ConfigError, r"gives -1.0 at step 0 of 40, where a share of at least 0"),
    ],
)
def test_optimizers_that_cannot_work_are_refused(
    own: str, optimizer: dict[str, Any], kind: type[Exception], message: str
) -> None:
    settings = {
        name: value.replace("{own}", own) if isinstance(value, str) else value for name, value in optimizer.items()
    }
    with pytest.raises(kind, match=message):
        resolve_config(TrainConfig(env="TextGame-v0", optimizer=OptimizerConfig(**settings)))


@pytest.mark.parametrize(
    ("settings", "kind", "message"),
    [
        ({"practice": "Watcher"}, ConfigError, "not a class that derives from agentgym.trainers.TaskSampler"),
        ({"practice": "Risin"}, UnknownName, "has no task sampler 'Risin': did you mean 'Rising'"),
        ({"practice": "Broken"}, UserCodeFault, "no tasks today"),
        ({"observers": "Deaf"}, ConfigError, "lacks on_phase, on_episode or on_step"),
        ({"engine": "no_engine"}, ConfigError, "no engine. It takes"),
    ],
)
def test_parts_that_are_none_are_refused_and_leave_no_run(
    quick: TrainConfig, own: str, tmp_path: Path, settings: dict[str, str], kind: type[Exception], message: str
) -> None:
    changes: dict[str, Any] = {name: f"{own}:{value}" for name, value in settings.items()}
    if "practice" in changes:
        changes["practice"] = PracticeConfig(sampler=changes["practice"])
    if "observers" in changes:
        changes["observers"] = (changes["observers"],)
    with pytest.raises(kind, match=message):
        Trainer(replace(quick, **changes), tmp_path / "run").fit()
    assert not (tmp_path / "run").exists()


@pytest.mark.long
def test_epochs_set_the_steps(
    quick: TrainConfig, train: Train, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, run = tmp_path / "rows.jsonl", tmp_path / "run"
    rows.write_text("".join(json.dumps({"prompt": f"{n} + 1?", "answer": str(n + 1)}) + "\n" for n in range(5)))
    result, _ = train(replace(quick, env="", env_kwargs={}, data=DataConfig(train=(str(rows),)), epochs=2.0), run)
    assert result.steps == 5
    answers = [record.trajectory.task.options["ground_truth"] for record in read_episodes(run)]
    assert {answers.count(str(n + 1)) for n in range(5)} == {4}  # two epochs of groups of two
    small = "--tasks 2 --group-size 2 --eval.episodes 0 --limits.turn-tokens 4"
    words = ["train", "--data.train", str(rows), "--epochs", "0.5", *small.split(), "--output", str(tmp_path / "half")]
    assert main([*words, "--dry-run"]) == 0
    assert "optimizer steps" in (plan := capsys.readouterr().out) and " 2 " in plan
    assert main(words) == 0
    assert "2/2" in capsys.readouterr().out
