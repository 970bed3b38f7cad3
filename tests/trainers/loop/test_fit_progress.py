"""`Trainer.fit` and `evaluate` show their progress on standard error, and results have short reprs."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentgym import TrainConfig, Trainer, evaluate
from agentgym.notebook.html_view import MAX_REPR
from agentgym.trainers import Unobserved


def test_an_evaluation_shows_its_progress_unless_it_is_not_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = evaluate("TextGame-v0", "oracle", num_tasks=10, output=tmp_path / "a")
    out, err = capsys.readouterr()
    assert out == "" and err.splitlines() == [f"episodes {n}/10, success 1.00" for n in range(1, 11)]
    evaluate("TextGame-v0", "oracle", num_tasks=3, output=tmp_path / "b", progress=False)
    assert "".join(capsys.readouterr()) == ""
    for value in (result, result.summary, result.config, result.trajectories[0], result.trajectories[0].rows[0]):
        assert len(repr(value)) <= MAX_REPR
    assert "success: 1.0" in repr(result) and "TextGame-v0" in result._repr_html_()
    assert "take(item=" in result.trajectories[0]._repr_html_()


@pytest.mark.long
def test_a_run_shows_its_phases_and_steps_unless_they_are_not_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = TrainConfig(env="TextGame-v0", steps=2, tasks=2, group_size=2, eval={"episodes": 4})  # type: ignore[arg-type]
    trainer = Trainer(config, tmp_path / "run")
    result = trainer.fit()
    out, err = capsys.readouterr()
    lines = err.splitlines()
    assert out == ""
    for line in ("held-out play before training: 4 episodes", "training: 2 steps of 4 episodes"):
        assert line in lines
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["1/2", "2/2"]
    for value in (trainer, result, result.after, config):
        assert len(repr(value)) <= MAX_REPR
    assert "step 2 of 2" in repr(trainer) and "polyline" in trainer._repr_html_()
    assert "held-out after" in result._repr_html_()
    Trainer(config, tmp_path / "silent").fit(progress=False)
    Trainer(config, tmp_path / "observed", Unobserved()).fit()
    assert "".join(capsys.readouterr()) == ""
