"""Evaluation: plays held-out episodes by any policy, computes their scores, and verifies their records."""

from typing import TYPE_CHECKING

from agentgym.lazy_exports import lazy_exports
from agentgym.rollout.scores.intervals import Interval
from agentgym.rollout.scores.pass_at_k import AtK, RepeatScores, best_at_k, pass_at_k, pass_hat_k
from agentgym.rollout.scores.statistics import EvalSummary, summarize

if TYPE_CHECKING:
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

__getattr__, __dir__ = lazy_exports(
    __name__,
    {
        "Chat": "play.chat",
        "EvalConfig": "play.evaluate",
        "EvalResult": "play.evaluate",
        "GenerationConfig": "play.generation",
        "ModelEngine": "play.model_engine",
        "Reply": "play.generation",
        "VerifyReport": "run_check.verify",
        "create_engine": "play.model_engine",
        "eval_episodes": "play.evaluate",
        "eval_tasks": "play.evaluate",
        "evaluate": "play.evaluate",
        "run_episode": "play.model_engine",
        "run_evaluation": "play.evaluate",
        "verify_run": "run_check.verify",
    },
)
