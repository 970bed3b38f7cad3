"""Evaluation: plays held-out episodes by any policy, computes their scores, and verifies their records."""

from agentgym.evaluation.play.chat import Chat
from agentgym.evaluation.play.evaluate import (
    EvalConfig,
    EvalResult,
    eval_episodes,
    eval_tasks,
    evaluate,
    run_evaluation,
)
from agentgym.evaluation.play.generation import GenerationConfig, Reply
from agentgym.evaluation.play.model_engine import ModelEngine, create_engine, run_episode
from agentgym.evaluation.run_check.verify import VerifyReport, verify_run
from agentgym.rollout.scores.intervals import Interval
from agentgym.rollout.scores.pass_at_k import AtK, RepeatScores, best_at_k, pass_at_k, pass_hat_k
from agentgym.rollout.scores.statistics import EvalSummary, summarize

__all__ = [
    "AtK",
    "Chat",
    "EvalConfig",
    "EvalResult",
    "EvalSummary",
    "GenerationConfig",
    "Interval",
    "ModelEngine",
    "RepeatScores",
    "Reply",
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
