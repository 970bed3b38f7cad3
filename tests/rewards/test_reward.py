"""What a reward may be, and what becomes of an episode with it."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.rewards import InvalidReward, Reward, RewardFailure
from agentgym.rewards.reward import apply_failure, apply_reward, components_of, read_reward
from agentgym.trajectory import Status, Trajectory

Make = Callable[..., Trajectory]


class Unreadable(Mapping[str, float]):
    """A mapping that raises what a test wants."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __getitem__(self, name: str) -> float:
        raise self.error

    def __iter__(self) -> Iterator[str]:
        return iter(("value",))

    def __len__(self) -> int:
        return 1


class Hidden:
    """A value that cannot even be shown."""

    def __repr__(self) -> str:
        raise RuntimeError("no text")


UNUSABLE = [
    *(math.nan, math.inf, -math.inf, "1", None, [1.0], {}, {"value": 1, "valeu": 2}, Hidden(), {"value": Hidden()}),
    *({"value": None}, {"score": None}, 10**400, 10**5000, {"value": 10**400}, {"score": 1.0, "acc": 10**400}),
    *({"value": 1, "turns": [10**400]}, {"value": 1, "components": {"a": 10**400}}, {"value": 1, "success": math.nan}),
    *({"value": 1, "info": {"a": math.nan}}, {"value": 1, "info": {(1, 2): 3}}, {"value": 1, 3: 4}),
    *(Unreadable(OSError("gone")), Unreadable(SystemExit(1)), Unreadable(RecursionError())),
]


@pytest.mark.parametrize("value", UNUSABLE, ids=lambda value: type(value).__name__)
def test_what_is_no_finite_number_is_refused(value: Any) -> None:
    with pytest.raises(InvalidReward):
        read_reward(value)


@pytest.mark.parametrize(
    "fields",
    [
        {"value": 1.0, "turns": [0.5, 0.4]},
        {"value": 1.0, "turns": [0.5, math.nan]},
        {"value": 1.0, "components": {"length": math.inf}},
        {"value": 1e308},
        {"value": 1.0, "components": [1]},
        {"value": 1.0, "turns": "ab"},
        {"value": 1.0, "success": "yes"},
        {"value": 1.0, "success": math.inf},
        {"score": "high"},
    ],
)
def test_parts_that_do_not_fit_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(InvalidReward):
        read_reward(fields)


def test_numbers_rewards_and_mappings_are_read() -> None:
    assert read_reward(True) == Reward(1.0)
    assert read_reward(np.float32(0.5)) == Reward(0.5)
    assert read_reward({"value": 1, "success": True, "turns": None}) == Reward(1.0, success=True)
    reward = read_reward({"score": -1.0, "acc": False, "pred": "41"})
    assert (reward.value, reward.components, reward.info) == (-1.0, {"acc": 0.0}, {"pred": "41"})


@pytest.mark.parametrize("value", [np.bool_(True), {"value": np.bool_(True)}, {"score": np.bool_(True)}])
def test_numpys_bool_is_a_number(value: Any) -> None:
    assert read_reward(value) == Reward(1.0)
    reward = read_reward({"value": 0.5, "components": {"right": np.bool_(True)}, "success": np.bool_(False)})
    assert (reward.components, reward.success) == ({"right": 1.0}, False)


@pytest.mark.parametrize("verdict", [False, True, np.bool_(False), np.bool_(True)])
def test_verls_acc_is_the_verdict_where_it_is_a_bool(verdict: Any, episode: Make) -> None:
    scored = apply_reward(episode("a"), read_reward({"score": 0.1, "acc": verdict, "pred": None}))
    assert (scored.reward, scored.success, scored.metrics["reward/acc"]) == (0.1, bool(verdict), float(verdict))
    for number in (0.0, np.float32(0.5), 1):
        assert read_reward({"score": 0.1, "acc": number}).success is None


def test_a_component_that_is_none_does_not_apply(episode: Make) -> None:
    reward = read_reward({"value": 1.0, "components": {"right": 1.0, "short": None}})
    assert (reward.components, reward.info) == ({"right": 1.0}, {"not_applicable": ["short"]})
    components = components_of(apply_reward(episode("a", metrics={"other": 1.0}), reward))
    assert components["right"] == 1.0 and math.isnan(components["short"]) and len(components) == 2


def test_notes_that_json_has_no_form_for_are_texts() -> None:
    notes = {"seen": {1}, "share": np.float32(0.5), "kept": MappingProxyType({"a": (1, 2)})}
    assert Reward(1.0, info=notes).info == {"seen": "{1}", "share": "0.5", "kept": {"a": [1, 2]}}  # type: ignore[arg-type]


def test_the_value_stands_at_the_last_turn_and_replaces_the_environments(episode: Make) -> None:
    played = episode("c", replies=["a", "b"], metrics={"success": 1.0, "reward/old": 3.0})
    scored = apply_reward(played, Reward(0.7, {"answer": 1.0, "length": -0.3}, success=False))
    assert [turn.reward for turn in scored.turns] == [0.0, 0.0, 0.7]
    assert scored.reward == 0.7
    assert scored.metrics == {"success": 0.0, "reward/answer": 1.0, "reward/length": -0.3}
    assert scored.info == {"environment_reward": 0.75}
    assert (scored.status, scored.rows) == (played.status, played.rows)


def test_without_a_verdict_the_environments_stays(episode: Make) -> None:
    assert apply_reward(episode("a", metrics={"success": 1.0}), Reward(0.0)).success is True
    assert apply_reward(episode("a"), Reward(0.0)).success is False


def test_scoring_again_keeps_the_environments_reward_in_sight(episode: Make) -> None:
    once = apply_reward(episode("a"), Reward(0.5, info={"verdict": "so so"}))
    assert once.info == {"environment_reward": 0.25, "reward": {"verdict": "so so"}}
    assert apply_reward(once, Reward(0.9)).info == {"environment_reward": 0.25}


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=9))
def test_turns_sum_to_the_value(turns: list[float]) -> None:
    assert Reward(math.fsum(turns), turns=tuple(turns)).turns == tuple(turns)
    with pytest.raises(InvalidReward, match="sum to the value"):
        Reward(math.fsum(turns) + max(1.0, abs(math.fsum(turns))) * 1e-3, turns=tuple(turns))


def test_turns_are_as_many_as_the_episodes(episode: Make) -> None:
    played = episode("b", replies=["a"])
    assert [turn.reward for turn in apply_reward(played, Reward(1.0, turns=(1.5, -0.5))).turns] == [1.5, -0.5]
    with pytest.raises(InvalidReward, match="each of the 2 turns, got 3"):
        apply_reward(played, Reward(1.0, turns=(0.5, 0.25, 0.25)))


def test_an_episode_without_a_reward_is_a_failed_one(episode: Make) -> None:
    failed = apply_failure(episode("a", info={"shown": 1}), RewardFailure("ValueError: no", "Traceback ..."))
    assert (failed.status, failed.reward, failed.success) == (Status.ENV_ERROR, None, None)
    assert failed.error == "the reward failed: ValueError: no"
    assert failed.info == {"shown": 1, "traceback": "Traceback ..."}


def test_errors_pickle() -> None:
    failure = pickle.loads(pickle.dumps(RewardFailure("no", "Traceback")))
    assert (str(failure), failure.traceback) == ("no", "Traceback")
