"""reasoning-gym's questions, scored by its own scorers."""

from __future__ import annotations

import gymnasium
import pytest

from agentgym.envs import make_env, policy_for
from agentgym.envs.adapters.reasoning_gym import ReasoningGym
from agentgym.errors import ConfigError, UnknownName
from agentgym.testing import check_env

pytestmark = pytest.mark.adapter


def test_the_question_and_the_score_are_the_library_s_own() -> None:
    import reasoning_gym

    env = gymnasium.make("reasoning_gym/leg_counting")
    for seed in (0, 5, 1_000_000_003):
        theirs = reasoning_gym.create_dataset("leg_counting", seed=seed, size=1)
        assert env.reset(seed=seed)[0] == theirs[0]["question"]
        for reply in (
            theirs[0]["answer"],
            f"It is <answer> {theirs[0]['answer']} </answer>",
            "<answer>-1</answer>",
            "",
        ):
            env.reset(seed=seed)
            answer = reply.partition("<answer>")[2].partition("</answer>")[0].strip() or reply
            score = theirs.score_answer(answer, theirs[0])
            _, reward, terminated, _, info = env.step(reply)
            assert (reward, terminated, info["metrics"]["success"]) == (score, True, float(score >= 1))


def test_a_reply_that_a_scorer_cannot_read_is_wrong_and_counted() -> None:
    env = make_env("reasoning_gym/prime_factorization")
    env.reset(seed=0)
    _, reward, _, _, info = env.step("foo bar")
    assert (reward, info["metrics"]["scorer_raised"]) == (0.0, 1.0)


def test_a_scorer_that_raises_on_its_own_answer_is_at_fault() -> None:
    env = make_env("reasoning_gym/prime_factorization")
    env.reset(seed=0)
    game = env.unwrapped
    assert isinstance(game, ReasoningGym)
    game.entry = {**game.entry, "answer": "no factors"}
    with pytest.raises(Exception, match="no factors"):
        env.step("foo bar")


@pytest.mark.parametrize(
    ("dataset", "answer"),
    [
        ("n_queens", "[row.split() for row in valid_solutions[0].split(chr(10))]"),
        ("n_queens", "setattr(type(self), 'score_answer', lambda *told: 1.0)"),
        ("spiral_matrix", "oracle_answer.split()"),
        ("countdown", "__import__('os').getpid()"),
        ("countdown", "sympify('open(1)')"),
    ],
)
def test_a_reply_is_not_run_as_python(dataset: str, answer: str) -> None:
    env = make_env(f"reasoning_gym/{dataset}")
    for reply in (answer, "I do not know"):
        env.reset(seed=0)
        assert env.step(f"<answer>{reply}</answer>")[1] <= 0.1


def test_a_formula_and_a_list_are_read_as_the_library_reads_them() -> None:
    env = make_env("reasoning_gym/countdown")
    for seed in range(4):
        env.reset(seed=seed)
        game = env.unwrapped
        assert isinstance(game, ReasoningGym)
        assert env.step(game.entry["metadata"]["expression"])[1] == 1.0
    env = make_env("reasoning_gym/n_queens")
    env.reset(seed=0)
    board = [row.split() for row in env.unwrapped.entry["metadata"]["valid_answers"][0].split("\n")]  # type: ignore[attr-defined]
    assert env.step(f"<answer>{board}</answer>")[1] == 0.5
    env = make_env("reasoning_gym/simple_integration")
    for seed in range(4):
        env.reset(seed=seed)
        assert env.step(f"{env.unwrapped.entry['answer']} + sqrt(4)")[1] == 1.0  # type: ignore[attr-defined]


def test_a_reply_that_is_computed_for_ever_is_wrong_and_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agentgym.envs.adapters.reasoning_gym.LIMIT_S", 2.0)
    env = make_env("reasoning_gym/countdown")
    env.reset(seed=0)
    _, reward, _, _, info = env.step("<answer>factorial(factorial(12))</answer>")
    assert (reward, info["metrics"]["scorer_raised"]) == (0.0, 1.0)
    env.reset(seed=0)
    assert env.step("<answer>1</answer>")[4]["metrics"]["scorer_raised"] == 0.0


def test_keywords_are_the_dataset_s_own_and_wrong_ones_are_taught_errors() -> None:
    env = make_env("reasoning_gym/leg_counting", {"min_animals": 1, "max_animals": 1})
    assert env.reset(seed=0)[0].count(",") <= 2
    with pytest.raises(ConfigError, match="makes no leg_counting with the keywords"):
        make_env("reasoning_gym/leg_counting", {"min_animal": 1}).reset(seed=0)
    with pytest.raises(UnknownName, match="did you mean 'leg_counting'"):
        make_env("reasoning_gym/leg_countin")


def test_a_dataset_without_recorded_answers_has_no_oracle() -> None:
    env = make_env("reasoning_gym/graph_color")
    policy = policy_for(env, "oracle")
    observation, _ = env.reset(seed=0)
    with pytest.raises(ConfigError, match="records no answers"):
        policy.reset(env, observation, 0)


@pytest.mark.parametrize("dataset", ["leg_counting", "basic_arithmetic", "word_sorting"])
def test_env_check_finds_nothing(dataset: str) -> None:
    assert check_env(f"reasoning_gym/{dataset}") == []


def test_env_check_tells_of_a_scorer_that_pays_for_anything() -> None:
    findings = check_env("reasoning_gym/game_of_life_halting")
    assert "canaries" in {finding.check for finding in findings}
