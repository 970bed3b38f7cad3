"""Evaluation: held-out episodes by any policy, what they say, and whether their records hold."""

from agentgym.evaluation.evaluate import (
    EvalConfig,
    EvalResult,
    eval_episodes,
    eval_tasks,
    evaluate,
    run_evaluation,
)
from agentgym.evaluation.statistics import EvalSummary, Interval, summarize
from agentgym.evaluation.verify import VerifyReport, verify_run

__all__ = [
    "EvalConfig",
    "EvalResult",
    "EvalSummary",
    "Interval",
    "VerifyReport",
    "eval_episodes",
    "eval_tasks",
    "evaluate",
    "run_evaluation",
    "summarize",
    "verify_run",
]
