"""Several rewards: each is a component, and the weighted sum is the reward."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from agentgym.errors import ConfigError
from agentgym.rewards import RewardConfig, open_rewards
from agentgym.rewards.judge.config import JudgeConfig
from agentgym.trainers.batch.credits import credit_groups
from agentgym.trajectory import Group, Status, Trajectory

Make = Callable[..., Trajectory]
FILE = """
from agentgym.rewards import Reward


def by_turn(trajectory, *, each: float = 1.0):
    turns = (each,) * len(trajectory.turns)
    return Reward(sum(turns), {"inner": 5.0}, turns=turns, info={"note": "long"})


def rank(trajectories, tasks):
    return [float(index) for index in range(len(tasks))]


def fails(trajectory):
    raise ValueError("no luck")


def math(prompts, completions, kind, **columns):
    return [1.0 if name == "math" else None for name in kind]


def code(prompts, completions, kind, **columns):
    return [0.5 if name == "code" else None for name in kind]


def of_math(trajectory, task):
    return 1.0 if task.options["kind"] == "math" else None


def huge(trajectory):
    return 1e100
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "mine.py").write_text(FILE)
    return tmp_path / "mine.py"


def score(played: list[Trajectory], *functions: str, **config: Any) -> list[Trajectory]:
    async def main() -> list[Trajectory]:
        async with open_rewards(RewardConfig(function=functions, **config)) as rewards:
            return await rewards.score(played)

    return asyncio.run(main())


def components(trajectory: Trajectory) -> Mapping[str, float]:
    return {name.removeprefix("reward/"): value for name, value in trajectory.metrics.items() if "reward/" in name}


def test_the_weighted_sum_is_the_reward_turn_by_turn(file: Path, episode: Make) -> None:
    played = episode("#### 42", replies=["hm"], truth="42")
    (scored,) = score([played], "gsm8k=2", f"{file}:by_turn=-0.5", settings={"by_turn": {"each": 0.1}})
    assert scored.reward == pytest.approx(2.0 - 0.5 * 0.2)
    assert [turn.reward for turn in scored.turns] == pytest.approx([-0.05, 1.95])
    assert components(scored) == pytest.approx({"gsm8k": 1.0, "by_turn": 0.2})
    assert scored.info["reward"] == {"by_turn": {"inner": 5.0, "note": "long"}}
    assert scored.success is True


def test_those_of_an_episode_and_those_of_a_step_are_summed(file: Path, episode: Make) -> None:
    played = [episode("a", truth="a"), episode("b", truth="x", member=1)]
    scored = score(played, "exact_match", f"{file}:rank=10", "environment")
    assert [trajectory.reward for trajectory in scored] == [1.0 + 0.0 + 0.25, 0.0 + 10.0 + 0.25]
    assert components(scored[1]) == {"exact_match": 0.0, "rank": 1.0, "environment": 0.25}


def test_a_judge_is_one_of_several(chat_endpoint: Any, episode: Make) -> None:
    endpoint = chat_endpoint(lambda body, number: chat_endpoint.make_reply("Score: 7"))
    judge = JudgeConfig(url=endpoint.url)
    (scored,) = score([episode("a", truth="a")], "exact_match", "judge=0.5", judge=judge)
    assert scored.reward == pytest.approx(1.0 + 0.5 * 0.7)
    assert components(scored) == {"exact_match": 1.0, "judge": 0.7}


def test_an_episode_that_one_of_them_fails_to_score_fails(file: Path, episode: Make) -> None:
    (scored,) = score([episode("a", truth="a")], "exact_match", f"{file}:fails")
    assert scored.status is Status.ENV_ERROR
    assert scored.error == "the reward failed: fails: ValueError: no luck"


@pytest.mark.parametrize(
    ("functions", "manner", "expected"),
    [
        (("math=2", "code=3"), "auto", [2.0, 1.5, None]),
        (("of_math=2", "code=3"), "auto", [2.0, 1.5, None]),
        (("of_math=2", "math=3"), "pool", [5.0, None, None]),
    ],
)
def test_a_reward_that_gives_none_does_not_apply_as_in_trl(
    functions: tuple[str, ...],
    manner: Any,
    expected: list[float | None],
    file: Path,
    episode: Make,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kinds = ("math", "code", "other")
    played = [episode("a", member=number, options={"kind": kind}) for number, kind in enumerate(kinds)]
    scored = score(played, *(f"{file}:{function}" for function in functions), manner=manner)
    assert [trajectory.reward for trajectory in scored] == expected
    messages = [record.getMessage() for record in caplog.records if "returned None" in record.getMessage()]
    assert len(messages) == len(set(messages)) == 2
    first, second = (function.partition("=")[0] for function in functions)
    assert str(scored[2].error) == f"the reward failed: none of {first}, {second} applies to it: each returned None"
    if manner == "auto":
        assert components(scored[1]) == {"code": 0.5}
        assert scored[1].info["reward"] == {"not_applicable": [first]}


def test_gdpo_knows_the_rewards_that_apply_to_no_episode_of_a_step(file: Path, episode: Make) -> None:
    played = [episode("a" * length, member=length, options={"kind": "math"}) for length in range(2)]
    scored = score(played, f"{file}:by_turn", f"{file}:code", f"{file}:math")
    group = Group(scored[0].group, scored[0].task, tuple(scored))
    (credited,) = credit_groups([group], "gdpo", {"weights": [1.0, 2.0, 3.0]})  # by_turn, code, math
    assert credited.means == (0.0, 0.0)


def test_a_sum_beyond_the_largest_reward_fails_its_episode(file: Path, episode: Make) -> None:
    for weight in ("2", "1e300"):
        (scored,) = score([episode("a")], f"{file}:huge={weight}", f"{file}:by_turn")
        assert scored.status is Status.ENV_ERROR and "a reward is a finite number" in str(scored.error)


def test_gdpo_compares_each_of_them_by_itself(file: Path, episode: Make) -> None:
    replies = ["red", "green", "red blue", "red"]
    played = [episode(text, member=index, truth="red") for index, text in enumerate(replies)]
    scored = score(played, "exact_match", "f1=100")
    assert [scored[2].metrics[f"reward/{name}"] for name in ("exact_match", "f1")] == pytest.approx([0, 2 / 3])
    group = Group(scored[0].group, scored[0].task, tuple(scored))
    (credited,) = credit_groups([group], "gdpo")
    first, second, third, last = credited.means
    assert first is not None and second is not None and third is not None
    assert first == last > third > second


@pytest.mark.parametrize(
    ("functions", "config", "message"),
    [
        (("gsm8k=much",), {}, "NAME=NUMBER, such as gsm8k=0.5, got 'gsm8k=much'"),
        (("gsm8k", "gsm8k=2"), {}, "two rewards are called 'gsm8k'"),
        (("gsm8k", "judge"), {}, "names the judge, and reward.judge has none"),
        (
            ("gsm8k", "f1"),
            {"settings": {"method": "strict"}},
            "under the name of each .*gsm8k, f1.* got method='strict'",
        ),
        (("gsm8k", "f1"), {"settings": {"gsm8k": {"metod": "strict"}}}, "did you mean 'method'"),
        (("gsm8k",), {"judge": JudgeConfig(url="http://127.0.0.1:1")}, "one reward, got function and judge"),
    ],
)
def test_what_cannot_be_summed_is_refused(functions: tuple[str, ...], config: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        score([], *functions, **config)


def test_a_folder_with_an_equals_sign_is_no_weight(tmp_path: Path, episode: Make) -> None:
    (tmp_path / "x=1").mkdir()
    (tmp_path / "x=1" / "mine.py").write_text(FILE)
    (scored,) = score([episode("a")], f"{tmp_path}/x=1/mine.py:by_turn")
    assert scored.reward == 1.0
