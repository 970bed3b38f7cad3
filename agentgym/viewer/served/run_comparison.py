"""Runs beside each other: their last evaluations with the numbers of `agentgym compare`, and tasks won and lost."""

from __future__ import annotations

import math
from collections.abc import Sequence

from agentgym.errors import RunFolderError
from agentgym.rollout.record.environments_file import changed_environments, read_environments
from agentgym.rollout.scores.comparison import paired_difference
from agentgym.types import JSON
from agentgym.viewer.served.episode_view import readable
from agentgym.viewer.served.evaluations import Evaluation, last_played
from agentgym.viewer.served.run_settings import changed_settings
from agentgym.viewer.served.run_view import RunView

__all__ = ["compare_runs"]

MAX_TASKS = 1_000


def compare_runs(runs: Sequence[RunView]) -> dict[str, JSON]:
    """Returns each run's last evaluation and its difference from the first one's, and the settings that differ."""
    last = [_last_evaluation(run) for run in runs]
    return {
        "runs": [_compare(run, last[0], evaluation) for run, evaluation in zip(runs, last, strict=True)],
        "settings": changed_settings([run.path for run in runs]),
        "changed_environments": _changed_environments(runs),
    }


def _compare(run: RunView, first: Evaluation | None, own: Evaluation | None) -> dict[str, JSON]:
    view: dict[str, JSON] = {
        "name": readable(run.name),
        "path": readable(str(run.path)),
        "evaluations": [evaluation.to_json() for evaluation in run.evaluations()],
        "last": None if own is None else own.to_json(),
        "over_first": None,
        "won": [],
        "lost": [],
    }
    if first is None or own is None or own is first:
        return view
    difference = paired_difference(first.scores, own.scores)
    won, lost = _changed_tasks(first, own)
    return view | {"over_first": None if difference is None else difference.to_json(), "won": won, "lost": lost}


def _changed_tasks(first: Evaluation, second: Evaluation) -> tuple[list[JSON], list[JSON]]:
    """Returns the tasks that succeed more, and less often than in the first: name, both rates, both first lines."""
    scores, other_scores = first.scores, second.scores
    lines, other_lines = first.lines, second.lines
    won: list[JSON] = []
    lost: list[JSON] = []
    for task in sorted(scores.keys() & other_scores.keys()):
        before, after = (math.fsum(s for s, _ in each[task]) / len(each[task]) for each in (scores, other_scores))
        if before != after:
            (won if after > before else lost).append([readable(task), before, after, lines[task], other_lines[task]])
    return won[:MAX_TASKS], lost[:MAX_TASKS]


def _last_evaluation(run: RunView) -> Evaluation | None:
    played = last_played(run.index)
    return next((each for each in run.evaluations() if (each.phase, each.step) == played), None)


def _changed_environments(runs: Sequence[RunView]) -> list[str]:
    try:
        cards = [read_environments(run.path) for run in runs]
    except RunFolderError:
        return []
    return sorted({readable(name) for other in cards[1:] for name in changed_environments(cards[0], other)})
