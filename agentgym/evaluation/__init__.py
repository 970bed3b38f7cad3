"""Evaluation: held-out episodes by any policy, what they say, and whether their records hold."""

from agentgym.evaluation.evaluate import (
    EvalConfig,
    EvalResult,
    eval_episodes,
    eval_tasks,
    evaluate,
    run_evaluation,
)
from agentgym.evaluation.intervals import Interval
from agentgym.evaluation.model_engine import ModelEngine, create_engine, run_episode
from agentgym.evaluation.pass_at_k import AtK, RepeatScores, best_at_k, pass_at_k, pass_hat_k
from agentgym.evaluation.statistics import EvalSummary, summarize
from agentgym.evaluation.verify import VerifyReport, verify_run

__all__ = [
    "AtK",
    "EvalConfig",
    "EvalResult",
    "EvalSummary",
    "Interval",
    "ModelEngine",
    "RepeatScores",
    "VerifyReport",
    "best_at_k",
    "create_engine",
    "eval_episodes",
    "eval_tasks",
    "evaluate",
    "pass_at_k",
    "pass_hat_k",
    "run_episode",
    "run_evaluation",
    "summarize",
    "verify_run",
]
