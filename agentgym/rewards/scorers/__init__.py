"""Scorers by name: functions of an episode and its task, whose `options["ground_truth"]` is the true answer."""

from agentgym.rewards.scorers.answer import exact_match, f1
from agentgym.rewards.scorers.code_tests import code
from agentgym.rewards.scorers.environment import environment_reward
from agentgym.rewards.scorers.gsm8k import gsm8k
from agentgym.rewards.scorers.math_answer import math
from agentgym.rewards.scorers.reply_format import format_score

__all__ = ["code", "environment_reward", "exact_match", "f1", "format_score", "gsm8k", "math"]
