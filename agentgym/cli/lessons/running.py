"""The parts of `agentgym sft` and `agentgym dpo` that need torch: the run, its display, and its report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from agentgym.cli.display.tables import progress, show_table
from agentgym.cli.lessons.lesson import LessonOptions
from agentgym.cli.run_folder import own_code_options
from agentgym.cli.terminal import explain_zero, fail, say, show_json
from agentgym.cli.training.run import check_algorithm_and_envs, score_rows
from agentgym.envs.catalog.resolve import command_name
from agentgym.errors import AgentGymError
from agentgym.trainers.checkpoints.run_folder import free_run_folder
from agentgym.trainers.lessons.config import LessonConfig
from agentgym.trainers.lessons.lesson import Lesson
from agentgym.trainers.loop.observer import Unobserved
from agentgym.trainers.loop.train_result import TrainResult
from agentgym.trainers.loop.trainer import Trainer
from agentgym.trainers.monitoring.metrics import StepMetrics
from agentgym.types import JSON, Task

__all__ = ["run_lesson"]

PHASES = {
    "train": "training",
    "eval_before": "held-out play before training",
    "eval_during": "held-out play during training",
    "eval_after": "held-out play after training",
}


class LessonDisplay(Unobserved):
    """An observer that counts the steps on the screen."""

    def __init__(self) -> None:
        self.count: Callable[[str], None] = lambda note: None

    def on_phase(self, name: str, episodes: int) -> None:
        """Prints the lines of a run that is opened, and that held-out tasks are played."""
        if name != "train":
            say(f"{PHASES[name]}: {episodes} episodes" if name in PHASES else name)

    def on_step(self, metrics: StepMetrics) -> None:
        """Counts a step, with the text next to the bar."""
        update, speed = metrics.update, metrics.speed
        words = [f"loss {update.loss:.4f}"] if update else []
        if update and update.pairs:
            words += [f"accuracy {update.pairs.accuracy:.2f}", f"margin {update.pairs.margin:.2f}"]
        if metrics.held_out:
            words.append(f"held-out {metrics.held_out.success:.3f}")
        if speed and speed.trained_tokens_per_s:
            words.append(f"{speed.trained_tokens_per_s:,.0f} tokens/s")
        self.count("  ".join(words))


def run_lesson(options: LessonOptions) -> int:
    """Trains, leaves the model in the folder of the run however it ends, and returns the exit code."""
    check_algorithm_and_envs(options.run, is_resumed=options.resume)
    folder, display = options.output or free_run_folder(options.run), LessonDisplay()
    trainer = Trainer(options.run, folder, display, resume=options.resume)
    num_done = len(trainer.metrics)
    if num_done:
        say(f"goes on after step {num_done}")
    try:
        with progress("steps", trainer.config.steps, num_done) as display.count:
            result = trainer.fit()
    except AgentGymError:
        trainer.save(folder)
        say(f"what was learned in {len(trainer.metrics)} steps is in {folder}")
        raise
    trainer.save(folder)
    return _report(options, trainer, result)


def _report(options: LessonOptions, trainer: Trainer, result: TrainResult) -> int:
    """Prints what was learned; returns the exit code."""
    config, lesson, folder, lines = trainer.config, trainer.lesson, result.folder, trainer.metrics
    assert isinstance(config, LessonConfig) and lesson is not None
    numbers = _numbers(lesson, lines)
    is_interrupted = result.end == "interrupted"
    for line in _lines(config, lesson, numbers):
        say(line)
    if rows := [row for name in ("before", "after") for row in score_rows(name, getattr(result, name))]:
        show_table(["held-out", "success", "95% interval", "reward", "episodes"], rows)
    explain_zero(result.after.success if result.after else None)
    say(f"model: {folder}")
    own = own_code_options(config.family, config.model_backend)
    play = _play_options(lesson.task)
    if is_interrupted:
        again = f"agentgym {config.algo} --resume --output {folder} goes on"
        fail(f"interrupted after step {result.steps} of {config.steps}; what was learned is in {folder}; {again}")
    else:
        say(f"try next: agentgym eval {play} --policy {folder}{own}")
        say(f"          agentgym train {play} --model {folder}{own}")
    if options.json:
        scores = {f"success_{name}": score.success for name in ("before", "after") if (score := getattr(result, name))}
        show_json({"output": str(folder), **numbers, **scores, "interrupted": is_interrupted})
    return 130 if is_interrupted else 0


def _numbers(lesson: Lesson[object], lines: Sequence[Mapping[str, Any]]) -> dict[str, JSON]:
    """Returns the numbers of the whole run from the lines of its steps."""

    def last(name: str) -> Any:
        return next((line[name] for line in reversed(lines) if line.get(name) is not None), None)

    outcomes = [line["demonstration_success"] for line in lines if "demonstration_success" in line]
    numbers: dict[str, JSON] = {
        "steps": len(lines),
        lesson.noun if lesson.num_items else "rows": lesson.num_items or None,
        "loss_first": lines[0]["loss"] if lines else None,
        "tokens": sum(line["tokens"] for line in lines),
        "imitated_tokens": sum(line.get("imitated_tokens", 0) for line in lines) or None,
        "demonstration_success": sum(outcomes) / len(outcomes) if outcomes else None,
    }
    names = ("loss", "accuracy", "margin", "validation_loss", "validation_accuracy", "elapsed_s")
    return numbers | {name: last(name) for name in names}


def _lines(config: LessonConfig, lesson: Lesson[object], numbers: Mapping[str, Any]) -> list[str]:
    """Returns the numbers of the whole run as text."""
    steps, num_items = numbers["steps"], lesson.num_items
    if not steps:
        return []
    losses = f"loss {numbers['loss_first']:.4f} -> {numbers['loss']:.4f}"
    lines = [f"{losses} in {steps} steps, {numbers['elapsed_s']:.0f} s"]
    if numbers["accuracy"] is not None:
        lines.append(f"accuracy {numbers['accuracy']:.2f}, margin {numbers['margin']:.2f}")
    if numbers["validation_loss"] is not None:
        accuracy = numbers["validation_accuracy"]
        text = "" if accuracy is None else f", accuracy {accuracy:.2f}"
        lines.append(f"validation loss {numbers['validation_loss']:.4f}{text}")
    number = steps * config.batch_size
    if num_items:
        learned_items = f"{number} {lesson.noun}, {number / num_items:.1f} passes over {num_items}"
    else:
        success = numbers["demonstration_success"] or 0.0
        learned_items = f"{number} demonstrations, success {success:.3f}"
    learned = f"{numbers['imitated_tokens']:,} of " if numbers["imitated_tokens"] else ""
    return [*lines, f"{learned_items}: {learned}{numbers['tokens']:,} tokens learned"]


def _play_options(task: Task | None) -> str:
    """Returns the options that name a task's environment to another command."""
    if task is None:
        return "--env ID"
    return f"--env {command_name(task.env_id, task.kwargs)}"
