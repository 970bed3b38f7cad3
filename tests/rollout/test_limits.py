"""Budgets are checked where they are written down."""

from __future__ import annotations

import pytest

from agentgym.errors import ConfigError
from agentgym.rollout.limits import Limits, SamplingConfig


@pytest.mark.parametrize(
    "name", ["max_turns", "turn_tokens", "trajectory_tokens", "context_window", "deadline_s", "env_step_s"]
)
def test_a_budget_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} must be above 0, got 0"):
        Limits(**{name: 0})


def test_an_unknown_way_to_treat_a_cut_reply_is_refused() -> None:
    with pytest.raises(ConfigError, match="'truncate' or 'answer'"):
        Limits(cut_reply="drop")  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "value"), [("temperature", -0.1), ("top_p", 0.0), ("top_p", 1.1), ("top_k", -1)])
def test_an_invalid_distribution_is_refused(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=name):
        SamplingConfig(**{name: value})


@pytest.mark.parametrize(
    ("window", "num_turns", "limits", "tokens"),
    [
        (1024, None, Limits(), 256),
        (1024, 32, Limits(), 256),
        (1024, 3, Limits(), 341),
        (1024, 1, Limits(), 1024),
        (1024, None, Limits(max_turns=1), 1024),
        (40_960, 20, Limits(), 8192),
        (40_960, 20, Limits(context_window=2000), 500),
        (131_072, 1, Limits(), 8192),
        (None, 20, Limits(), 4096),
        (1024, 20, Limits(turn_tokens=64), 64),
    ],
)
def test_a_reply_may_take_a_quarter_of_the_window_or_more_where_turns_are_few(
    window: int | None, num_turns: int | None, limits: Limits, tokens: int
) -> None:
    assert limits.turn_tokens_in(window, num_turns) == tokens
