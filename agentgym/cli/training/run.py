"""The parts of `agentgym train` that need torch: checks, the run, and its report."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import cast

import yaml

from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.cli.display.tables import show_table
from agentgym.cli.display.training import TrainingDisplay
from agentgym.cli.environment import load_env
from agentgym.cli.options import warn_of_idle
from agentgym.cli.run_folder import own_code_options
from agentgym.cli.terminal import explain_zero, fail, say, show_json
from agentgym.cli.training.options import TrainOptions
from agentgym.engines.server_kind import SERVERS
from agentgym.envs.catalog.resolve import command_name
from agentgym.errors import AgentGymError, ConfigError
from agentgym.rollout.agents.agents import check_agent
from agentgym.rollout.record.branches import BRANCH_COLUMNS, branch_table
from agentgym.rollout.record.environments_file import read_environments
from agentgym.rollout.record.episodes_file import read_episodes
from agentgym.rollout.record.line_reader import FILE_NAME, find_episodes
from agentgym.rollout.scores.intervals import success_interval
from agentgym.trainers.checkpoints.run_folder import check_new_run, free_run_folder, read_settings
from agentgym.trainers.config import TrainConfig
from agentgym.trainers.loop.dry_run import check_names, describe_plan
from agentgym.trainers.loop.self_play import alone
from agentgym.trainers.loop.token_budget import with_token_budget
from agentgym.trainers.loop.trainer import Trainer, TrainResult
from agentgym.trainers.monitoring.metrics import EvalScore
from agentgym.trainers.resolve import resolve_config
from agentgym.trainers.tasks import EnvChoice, env_choices
from agentgym.types import JSON
from agentgym.viewer import TokenText, read_run, write_curve, write_report

__all__ = ["check_algorithm_and_envs", "open_trainer", "print_config", "print_plan", "report", "score_rows"]

logger = logging.getLogger(__name__)


def check_algorithm_and_envs(config: TrainConfig, *, is_resumed: bool = False) -> None:
    """Raises for an algorithm or environment that does not exist or cannot work; warns of settings without effect."""
    check_agent(config.agent)
    resolve_config(
        config, is_resumed=is_resumed
    )  # an algorithm that cannot work is refused before an environment is made
    for choice in _environments(config):
        for kwargs in choice.variants:
            load_env(choice.env, kwargs).close()
    warn_of_idle("server", config.server, "engine", config.engine, SERVERS)
    warn_of_idle("ray", config.ray, "executor", config.executor, ("ray",))


def print_config(config: TrainConfig) -> int:
    """Prints the complete settings as YAML; returns the exit code."""
    complete = with_token_budget(config)
    say(yaml.safe_dump(json.loads(json.dumps(asdict(complete), default=dict)), sort_keys=False).rstrip())
    return 0


def print_plan(options: TrainOptions) -> int:
    """Prints the sizes of the run, if it could open its folder and all of its parts; returns the exit code."""
    folder = _output_folder(options, options.run)
    if options.resume:
        read_settings(folder)
    else:
        check_new_run(folder)
    check_names(options.run)
    plan = describe_plan(options.run, folder if options.resume else None)
    show_table(["", "", ""], [[name, f"{value:,}", remark] for name, value, remark in plan])
    if options.json:
        show_json({name.replace(" ", "_"): value for name, value, _ in plan})
    return 0


@contextmanager
def open_trainer(options: TrainOptions) -> Iterator[Trainer]:
    """Yields the trainer of a new or resumed run, which is displayed while it trains."""
    folder = _output_folder(options, options.run)
    with TrainingDisplay(options.run, folder) as display:
        trainer = Trainer(options.run, folder, display, resume=options.resume)
        display.follow(trainer.config)
        try:
            yield trainer
        except AgentGymError as error:
            _say_what_is_left(folder, str(error))
            raise


def _output_folder(options: TrainOptions, config: TrainConfig) -> Path:
    if options.output is not None:
        return options.output
    if options.resume:
        raise ConfigError("--resume goes on in a run's folder: name it with --output")
    return free_run_folder(config)


def report(config: TrainConfig, result: TrainResult, *, as_json: bool) -> int:
    """Writes the run's curve and report, and prints its result; returns the exit code."""
    folder = result.folder
    episodes = find_episodes(folder) or folder / FILE_NAME
    files: dict[str, str] = {"metrics": str(folder / "metrics.jsonl"), "episodes": str(episodes)}
    if result.checkpoint:
        files |= {"curve": str(folder / "curve.png"), "checkpoint": str(result.checkpoint)}
        data = read_run(folder)
        write_curve(data.metrics, folder / "curve.png", data.evaluations)
        text = TokenText(ChatTokenizer.load(result.checkpoint, needs_template=False).backend)
        files["report"] = str(write_report(folder, decode_token=text, special_ids=text.special_ids))
    if any((folder / "profile").glob("step-*")):
        files["profile"] = str(folder / "profile")
    scored = [("before", result.before), ("after", result.after)]
    if rows := [row for name, score in scored for row in score_rows(name, score)]:
        show_table(["held-out", "success", "95% interval", "reward", "episodes"], rows)
    if config.is_played_outside and episodes.is_file():
        played = (record.trajectory.rows for record in read_episodes(episodes) if record.phase == "train")
        if rows := branch_table(played):
            show_table(BRANCH_COLUMNS, rows)
    explain_zero(result.after.success if result.after else None)
    peak = f"peak memory {result.peak_memory_mb:,.0f} MB"
    say(f"{result.steps} steps in {result.train_s / 60:.1f} minutes of training, {peak}")
    if reason := _early_end(config, result):
        say(f"  ended before step {config.steps}: {reason}")
    for name, path in files.items():
        say(f"  {name:<11}{path}")
    if result.end == "interrupted":
        fail(f"interrupted after step {result.steps}; the same command with --resume --output {folder} goes on")
    else:
        evals = _eval_commands(config, result.checkpoint)
        say(f"try next: {'   '.join([f'agentgym view {folder}', f'agentgym verify {folder}', *evals])}")
    if as_json:
        show_json(_as_json(result, files))
    return 130 if result.end == "interrupted" else 0


def _early_end(config: TrainConfig, result: TrainResult) -> str:
    """Returns why a run ended before its last step; empty if it did not."""
    reasons = {
        "target_success": f"held-out success reached target_success {config.target_success} (None trains on)",
        "patience": f"{config.eval.patience} evaluations in a row were not better (eval.patience)",
        "max_minutes": f"it has taken max_minutes {config.max_minutes}",
        "solved": "every episode succeeded (solved in collapse.stop_on)",
    }
    return reasons.get(result.end, "")


def _say_what_is_left(folder: Path, error: str) -> None:
    """Logs from where a failed run can be resumed, and the files in which its servers logged why."""
    if logs := [path for path in sorted((folder / "servers").rglob("*.log")) if path.name not in error]:
        logger.warning("what the servers said last is in %s", ", ".join(map(str, logs)))
    if checkpoints := sorted((folder / "checkpoints").glob("step-*")):
        logger.warning(
            "the same command with --resume --output %s goes on from step %d", folder, int(checkpoints[-1].name[5:])
        )


def _environments(config: TrainConfig) -> list[EnvChoice]:
    return env_choices(config.practice, config.env, cast(Mapping[str, JSON], config.env_kwargs)) if config.env else []


def _eval_commands(config: TrainConfig, checkpoint: Path | None) -> list[str]:
    """Returns commands that evaluate the checkpoint as the run was evaluated, as far as options can express it."""
    functions = config.reward.function or ()
    functions = (functions,) if isinstance(functions, str) else functions
    reward = f"--reward.function {shlex.join(functions)} " if functions else ""
    own = own_code_options(config.family, config.model_backend)
    if config.data.has_files:
        held_out, train = shlex.join(config.data.eval_files), shlex.join(config.data.train_files)
        data = f"--data.eval {held_out}" if held_out else f"--data.train {train}"
        data += f" --data.eval-fraction {config.data.eval_fraction:g}" if config.data.eval_fraction else ""
        env = "" if config.env == "Prompt-v0" else f"--env {config.env} "
        return (
            [f"agentgym eval {env}{data} {reward}--policy {checkpoint}{own}"]
            if held_out or config.data.eval_fraction
            else []
        )
    return [
        f"agentgym eval --env {command_name(choice.env, alone(choice.kwargs))} {reward}--policy {checkpoint}{own}"
        for choice in _environments(config)
    ]


def score_rows(name: str, score: EvalScore | None) -> list[list[str]]:
    """Returns the score's row, and one for each environment of a mix."""
    if score is None:
        return []
    parts = [_score_row(f"{name} {env}", part) for env, part in score.by_env.items()]
    repeated = [
        [f"{name} pass@{at.k}", f"{at.pass_at_k or 0:.3f}", str(at.pass_at_k_interval), f"{at.best_at_k or 0:.3f}", ""]
        for at in score.at_k
    ]
    return [_score_row(name, score), *repeated, *parts]


def _score_row(name: str, score: EvalScore) -> list[str]:
    interval, num_distinct = success_interval(score.won, score.tasks), len(set(score.tasks))
    played = f"{score.episodes}" + (f" (+{score.failed} failed)" if score.failed else "")
    played += f", {num_distinct} distinct tasks" if num_distinct < score.episodes else ""
    return [name, f"{score.success:.3f}", str(interval), f"{score.reward_mean:.3f}", played]


def _as_json(result: TrainResult, files: dict[str, str]) -> dict[str, JSON]:
    return {
        "steps": result.steps,
        "success_before": result.before.success if result.before else None,
        "success_after": result.after.success if result.after else None,
        **{
            f"pass_at_{at.k}_{name}": at.pass_at_k
            for name, score in (("before", result.before), ("after", result.after))
            for at in (score.at_k if score else ())
        },
        **{
            f"success_{name}/{env}": part.success
            for name, score in (("before", result.before), ("after", result.after))
            for env, part in (score.by_env if score else {}).items()
        },
        "train_s": round(result.train_s, 1),
        "peak_memory_mb": round(result.peak_memory_mb),
        "end": result.end,
        "interrupted": result.end == "interrupted",
        "environments": [dict(each) for each in read_environments(result.folder).values()],
        "files": dict(files),
    }
