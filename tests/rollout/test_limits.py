"""Budgets are checked where they are written down."""

from __future__ import annotations

import pytest

from agentgym.errors import ConfigError
from agentgym.rollout.limits import Limits, SamplingConfig


@pytest.mark.parametrize(
    "name", ["max_turns", "turn_tokens", "trajectory_tokens", "context_window", "deadline_s", "env_step_s"]
)
def test_a_budget_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be greater than 0, got 0"):
        Limits(**{name: 0})


def test_an_unknown_way_to_treat_a_cut_reply_is_refused() -> None:
    with pytest.raises(ConfigError, match='"truncate" or "answer"'):
        Limits(cut_reply="drop")  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), [("temperature", -0.1), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -1)])
def test_a_distribution_that_is_none_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        SamplingConfig(**{name: value})
