"""Waits between requests that are sent again."""

from __future__ import annotations

from agentgym.engines.openai.backoff import back_off_s


def test_waits_double_up_to_half_a_minute_and_are_spread_over_a_half() -> None:
    for num_retries in range(12):
        whole = min(30.0, 0.5 * 2**num_retries)
        waits = {back_off_s(f"request-{index}", num_retries) for index in range(200)}
        assert len(waits) == 200
        assert whole / 2 <= min(waits) < whole * 0.55 and whole * 0.95 < max(waits) <= whole


def test_a_place_waits_the_same_each_time_and_as_long_as_it_is_told() -> None:
    assert back_off_s("a/1", 3) == back_off_s("a/1", 3)
    assert back_off_s("a/1", 0, 17.0) == 17.0
    assert back_off_s("a/1", 3, 0.1) == back_off_s("a/1", 3)
