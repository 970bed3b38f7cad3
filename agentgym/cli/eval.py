"""`agentgym eval`: held-out episodes by a model or a policy; no trainer, and no torch unless a model plays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import tyro

from agentgym.cli.display.tables import progress, show_table
from agentgym.cli.environment import load_env
from agentgym.cli.options import env_as_option, parse_options, read_mapping, warn_of_idle, with_full_names
from agentgym.cli.run_folder import names_tasks, resumed_config
from agentgym.cli.terminal import explain_zero, fail, say, show_json
from agentgym.engines.server_kind import SERVERS
from agentgym.envs.base.tool_env import UNPAID
from agentgym.errors import AgentGymError, RunFolderError
from agentgym.evaluation.play.endpoint import EndpointUse, Quantiles
from agentgym.evaluation.play.evaluate import Driver, EvalConfig, EvalPlan, EvalResult, open_evaluation
from agentgym.rewards import RewardConfig
from agentgym.rollout.record.branches import BRANCH_COLUMNS, branch_table
from agentgym.rollout.scores.intervals import SAME, Interval
from agentgym.rollout.scores.pass_at_k import AtK, RepeatScores
from agentgym.rollout.scores.statistics import FAILED_CALLS, EvalSummary
from agentgym.tools.sandbox.service_settings import used_by_run
from agentgym.trajectory import Trajectory

__all__ = ["finish", "main", "repeat_rows", "run_plan", "stored_options", "summary_rows"]

Options = TypeVar("Options", bound=EvalConfig)
REPEAT_COLUMNS = ("tasks", "k", "pass@k", "pass^k", "best@k", "")
MAIN_SETTINGS = tuple(
    "env env_kwargs policy num_tasks num_repeats seed temperature top_p stop max_turns turn_tokens engine device "
    "context_window concurrency agent.name output resume json".split()
)
"""The settings that `--help` shows."""
NO_PRICE = "no price is set (--endpoint.price-prompt, --endpoint.price-completion, per million tokens)"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalOptions(EvalConfig):
    """Plays held-out episodes and counts successes: always the same tasks, whatever the policy and the seed."""

    num_tasks: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 50
    """The number of held-out tasks: always the first ones, whatever the seed."""
    num_repeats: Annotated[int, tyro.conf.arg(aliases=["-r"])] = 1
    """Episodes of each task; with several, pass@k, pass^k and best@k are shown for k = 1, 2, 4, ... up to this."""
    output: Annotated[Path | None, tyro.conf.arg(metavar="DIR")] = None
    """The folder for the episodes and the result; by default a new one under runs/."""
    resume: bool = False
    """Resume the run in --output: play only what is missing or failed."""
    json: bool = False
    """Print one line of JSON, and all else on standard error."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym eval ...`; exit code 1 when no episode could be played."""
    args = with_full_names(env_as_option(args), {"--tools": "--data.tools", "--agent": "--agent.name"})
    default = stored_options(EvalOptions, args)
    options = parse_options(EvalOptions, args, prog="agentgym eval", default=default, main_options=MAIN_SETTINGS)
    warn_of_idle("server", options.server, "engine", options.engine, SERVERS)
    with used_by_run(options.sandbox):
        load_env(options.env, options.env_kwargs).close()
        plan = open_evaluation(options, options.output, resume=options.resume)
        return finish(run_plan(plan), as_json=options.json)


def stored_options(kind: type[Options], args: Sequence[str]) -> Options | None:
    """Returns the settings of the evaluation that is resumed, or None for one that the options name themselves.

    Raises as `resumed_config` does, and RunFolderError for another command's run.
    """
    path = None if names_tasks(args) else resumed_config(args)
    if path is None:
        return None
    settings = read_mapping(path)
    if settings.get("kind") != "eval":
        raise RunFolderError(f"{str(path)!r} is that of another command than an evaluation")
    from agentgym.settings.config_class import config_from_mapping

    return config_from_mapping(
        kind, {name: value for name, value in settings.items() if name not in ("kind", "agentgym", "served")}
    )


def run_plan(plan: EvalPlan, driver: Driver | None = None) -> EvalResult | None:
    """Runs the plan with a progress bar; returns None if it was interrupted, after printing how to resume."""
    num_kept = len(plan.episodes) - len(plan.to_play)
    if num_kept:
        say(f"{num_kept} of {len(plan.episodes)} episodes are there already")
    try:
        return _run(plan, driver)
    except KeyboardInterrupt:
        path = plan.folder.path
        fail(f"interrupted; finished episodes are in {path}; the same command with --resume --output {path} goes on")
        return None
    except AgentGymError:
        if plan.folder.num_written:
            say(f"finished episodes are in {plan.folder.path}")
        raise


def finish(result: EvalResult | None, *, as_json: bool) -> int:
    """Shows the result and returns the exit code."""
    if result is None:
        return 130
    _show(result)
    if as_json:
        show_json(result.to_json())
    return 0 if result.summary.num_episodes else 1


def _run(plan: EvalPlan, driver: Driver | None) -> EvalResult:
    won = played = 0

    def note(trajectory: Trajectory) -> None:
        nonlocal won, played
        won, played = won + bool(trajectory.success), played + trajectory.status.trainable
        count(f"success {won / max(1, played):.2f}")

    total = len(plan.episodes)
    with progress("episodes", total, total - len(plan.to_play)) as count:
        return plan.run(note, driver=driver)


def _show(result: EvalResult) -> None:
    config, summary = result.config, result.summary
    keywords = "".join(f" {name}={value}" for name, value in config.env_kwargs.items())
    distinct = f", {summary.num_distinct} distinct," if summary.num_distinct < summary.num_tasks else ""
    size = f"{summary.num_tasks} tasks{distinct} x {config.num_repeats}"
    title = f"{config.env}{keywords}, {config.policy}: {size}, seed {config.seed}"
    show_table(["", "", ""], summary_rows(summary) + use_rows(result.use), title=title)
    if rows := repeat_rows(summary.at_k):
        show_table(
            REPEAT_COLUMNS, rows, title="of k episodes: one succeeds, all succeed, the best reward (95%, by task)"
        )
    if rows := branch_table(trajectory.rows for trajectory in result.trajectories):
        show_table(BRANCH_COLUMNS, rows)
    for line in failure_lines(result):
        say(line)
    won = [trajectory for trajectory in result.trajectories if trajectory.success]
    unpaid = [trajectory for trajectory in won if trajectory.reward is not None and trajectory.reward <= 0.0]
    if unpaid and config.reward == RewardConfig():
        say(f"{len(unpaid)} episodes succeeded and earned nothing. {UNPAID}")
    if config.policy not in ("cheat", "random"):
        explain_zero(summary.success)
    say(f"episodes: {result.output}    look at them: agentgym view {result.output}")


def summary_rows(summary: EvalSummary) -> list[list[str]]:
    """Returns name, value and remark of each number of an evaluation."""
    repeated = summary.num_episodes > summary.num_distinct
    clustered = ", clustered by task" if repeated else ""
    stops = ", ".join(f"{reason} {number}" for reason, number in summary.stop_reasons.items())
    failed = ", ".join(f"{status} {number}" for status, number in summary.failed.items())
    reward = _remark(summary.reward_interval, f"95%{clustered}") or (SAME if summary.num_episodes else "")
    faults = [getattr(summary, name) for name in FAILED_CALLS]
    faults_format = (
        "{} malformed, {} truncated, {} of unknown tools, {} with invalid arguments, {} answered with an error"
    )
    return [
        ["success", _number(summary.success, 3), _remark(summary.success_interval, f"95%, Wilson{clustered}")],
        ["reward", _number(summary.mean_reward, 3), reward],
        ["episodes", str(summary.num_episodes), stops],
        ["failed", str(summary.num_failed), failed],
        ["turns", _number(summary.mean_turns, 1), "per episode"],
        ["tokens", _number(summary.mean_tokens, 1), "sampled per episode"],
        ["failed calls", str(sum(faults)), faults_format.format(*faults)],
    ]


def repeat_rows(scores: Sequence[RepeatScores]) -> list[list[str]]:
    """Returns a row for each k, of all tasks, each environment and each difficulty; none if no task was repeated."""
    if not any(at.k > 1 for score in scores for at in score.at):
        return []
    return [
        [*([f"{_tasks_label(score)}: {score.num_tasks}"] if at is score.at[0] else [""]), *_at_row(at)]
        for score in scores
        for at in score.at
    ]


def _tasks_label(scores: RepeatScores) -> str:
    difficulty = "" if scores.difficulty is None else f", difficulty {scores.difficulty}"
    return f"{scores.env or 'all'}{difficulty}"


def _at_row(at: AtK) -> list[str]:
    def format_score(value: float | None, interval: Interval | None) -> str:
        return _number(value, 3) + ("" if value is None else f" {interval or SAME}")

    return [
        str(at.k),
        format_score(at.pass_at_k, at.pass_at_k_interval),
        format_score(at.pass_hat_k, at.pass_hat_k_interval),
        format_score(at.best_at_k, at.best_at_k_interval),
        f"tasks with fewer episodes: {at.num_short}" if at.num_short else "",
    ]


def use_rows(use: EndpointUse | None) -> list[list[str]]:
    """Returns name, value and remark of each number on the use of a chat endpoint."""
    if use is None:
        return []
    causes = ", ".join(f"{cause.replace('_', ' ')} {number}" for cause, number in use.failures.items())
    without = f"{use.num_without_ids} episodes hold no token ids: they cannot be trained on"
    return [
        ["requests", str(use.num_requests), f"{use.num_retries} of them without a reply{causes and ': '}{causes}"],
        ["prompt tokens", str(use.prompt_tokens), f"{use.cached_tokens} of them cached"],
        ["reply tokens", str(use.completion_tokens), without if use.num_without_ids else ""],
        ["cost", "unknown" if use.cost is None else f"{use.cost:.4f}", NO_PRICE if use.cost is None else ""],
        ["latency", *_seconds(use.latency_s)],
        ["first token", *(_seconds(use.first_token_s) if use.first_token_s else ("none", "nothing was streamed"))],
    ]


def _seconds(quantiles: Quantiles | None) -> tuple[str, str]:
    if quantiles is None:
        return "none", ""
    return f"{quantiles.p50:.3f} s", f"median of a request; 95th percentile {quantiles.p95:.3f} s"


def failure_lines(result: EvalResult) -> list[str]:
    """Returns lines on the number of failed episodes, and on how to replay the first failure."""
    failed = [trajectory for trajectory in result.trajectories if not trajectory.status.trainable]
    if not failed:
        return []
    first = failed[0]
    return [
        f"{len(failed)} episodes failed and count in no mean; the first: {first.error}",
        *([f"replay it: {first.info['replay']}"] if "replay" in first.info else []),
        f"play the failed ones again: the same command with --resume --output {result.output}",
    ]


def _number(value: float | None, digits: int) -> str:
    return "none" if value is None else f"{value:.{digits}f}"


def _remark(interval: object, what: str) -> str:
    return "" if interval is None else f"{interval} ({what})"
