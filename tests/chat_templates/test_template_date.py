"""The date that chat templates write: fixed when a run begins, recorded, and the same for all who render again."""

from __future__ import annotations

import datetime as clock
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from agentgym.chat_templates import template_date
from agentgym.chat_templates.families import renderer_for
from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.cli.run_folder import renderer_of_run
from agentgym.embedded import embedded_folder
from agentgym.errors import ConfigError
from agentgym.evaluation.play.config import EvalConfig
from agentgym.evaluation.play.evaluate import evaluate
from agentgym.evaluation.run_check.verify import verify_run
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.lessons.config import SftConfig
from agentgym.trainers.loop.trainer import Trainer
from agentgym.trainers.settings.held_out import HeldOutConfig
from agentgym.types import Message

FIRST_LINE = "{{- 'Today is ' + strftime_now('%d %b %Y') + '.' }}"
ASK = [Message("user", "Which day is it?")]


class Clock(clock.datetime):
    """A clock that shows another day each time that it is read."""

    days = 0

    @classmethod
    def now(cls, tz: clock.tzinfo | None = None) -> clock.datetime:
        cls.days += 1
        return clock.datetime(2026, 3, 1, 23, 59, 59) + clock.timedelta(days=cls.days)


@pytest.fixture(autouse=True)
def midnight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_date, "datetime", Clock)


@pytest.fixture(scope="module")
def dated_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model, with a template that writes the date."""
    folder = tmp_path_factory.mktemp("dated") / "model"
    shutil.copytree(embedded_folder(), folder)
    tokenizer = ChatTokenizer.load(folder)
    (folder / "chat_template.jinja").write_text(FIRST_LINE + tokenizer.template, encoding="utf-8")
    return folder


def test_a_renderer_writes_one_date_over_midnight() -> None:
    embedded = ChatTokenizer.load(embedded_folder())
    renderer = renderer_for(replace(embedded, template=FIRST_LINE + embedded.template))
    assert renderer.render(ASK) == renderer.render(ASK) == renderer.rerender(ASK)


def test_a_given_date_is_written_whenever_it_is_rendered() -> None:
    embedded = ChatTokenizer.load(embedded_folder())
    dated = replace(embedded, template=FIRST_LINE + embedded.template)
    texts = [renderer_for(dated, date="2024-02-29").text(ASK) for _ in range(2)]
    assert texts[0] == texts[1] and texts[0].startswith("Today is 29 Feb 2024.")


def test_an_evaluation_records_its_date_and_is_verified_and_resumed_with_it(dated_folder: Path, tmp_path: Path) -> None:
    config = EvalConfig(env="TextGame-v0", policy="oracle", num_tasks=2, tokenizer=str(dated_folder))
    first = evaluate(config, output=tmp_path / "run")
    date = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["date"]
    report = verify_run(first.output, renderer_of_run(first.output))
    assert report.ok, "\n".join(report.lines())
    assert not verify_run(first.output, renderer_for(dated_folder)).ok  # another day's prompt
    again = evaluate(config, output=tmp_path / "run", resume=True)
    assert again.config.date == first.config.date == date


@pytest.mark.long
def test_a_training_run_records_its_date_and_goes_on_with_it(dated_folder: Path, tmp_path: Path) -> None:
    config = TrainConfig(env="TextGame-v0", model=str(dated_folder), eval=HeldOutConfig(episodes=0))
    trainer = Trainer(config, tmp_path / "run")
    trainer.folder.close()
    resumed = [Trainer.load(tmp_path / "run")]
    resumed[0].folder.close()
    resumed.append(Trainer(config, tmp_path / "run", resume=True))
    resumed[1].folder.close()
    stored = renderer_of_run(tmp_path / "run")
    assert stored is not None
    texts = {renderer.text(ASK) for renderer in (trainer.renderer, *(run.renderer for run in resumed), stored)}
    assert len(texts) == 1
    assert trainer.config.date == resumed[0].config.date == resumed[1].config.date is not None


def test_a_template_without_a_date_records_none(tmp_path: Path) -> None:
    result = evaluate("TextGame-v0", "oracle", num_tasks=1, output=tmp_path / "run")
    assert result.config.date is None
    assert "date" not in yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())


@pytest.mark.parametrize("make", [TrainConfig, EvalConfig, SftConfig])
def test_an_invalid_date_is_refused_with_an_example(make: type[TrainConfig] | type[EvalConfig]) -> None:
    with pytest.raises(ConfigError, match="such as 2026-03-01 or 2026-03-01T08:30:00; got 'tomorrow'"):
        make(env="TextGame-v0", date="tomorrow")
