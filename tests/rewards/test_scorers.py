"""Scorers by name, against what their sources say."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.rewards import REWARDS, InvalidReward, Reward, RewardConfig, UnusableReward, open_rewards
from agentgym.trajectory import Status, Trajectory

Make = Callable[..., Trajectory]
GSM8K = Path(__file__).resolve().parents[3] / "shared" / "data" / "tasks" / "gsm8k" / "test.jsonl"


@pytest.fixture
def score(episode: Make) -> Callable[..., Reward]:
    """`score("gsm8k", "#### 3", 3)` is what the scorer gives for a reply and a truth."""

    def of(name: str, reply: str, truth: object = None, *, reasoning: str | None = None, **settings: Any) -> Reward:
        played = episode(reply, reasoning=reasoning, **({} if truth is None else {"truth": truth}))
        reward = REWARDS[name](played, played.task, **settings)
        assert isinstance(reward, Reward)
        return reward

    return of


def test_every_scorer_of_the_documentation_has_its_name() -> None:
    assert sorted(REWARDS) == ["code", "environment", "exact_match", "f1", "format", "gsm8k", "math"]


def test_a_task_without_a_truth_is_a_failure(score: Callable[..., Reward]) -> None:
    for name in sorted(set(REWARDS) - {"format", "environment"}):
        with pytest.raises(InvalidReward, match=r'no options\["ground_truth"\]'):
            score(name, "42")


# ---- gsm8k


@pytest.mark.parametrize(
    ("reply", "truth", "strict", "flexible"),
    [
        ("So she has\n#### 72", "72", 1, 1),
        ("#### 1,234", "1234", 1, 1),
        ("#### $1,234.50", "1234.5", 1, 1),
        ("#### \\$12", 12, 1, 1),
        ("#### -5", "-5", 1, 1),
        ("#### -$5", "-5", 1, 1),
        ("#### 5", "-5", 0, 0),
        ("#### 72.", "72", 1, 1),
        ("#### 72.00", "72", 1, 1),
        ("#### 3\n#### 4", "4", 1, 1),
        ("#### 3\n#### 4", "3", 0, 0),
        ("The answer is 72.", "72", 0, 1),
        ("####72", "72", 0, 1),
        ("#### seventy-two", "72", 0, 0),
        ("#### 72 is what 3 friends have", "72", 1, 0),
        ("", "72", 0, 0),
        ("#### 72" + " and so on" * 40, "72", 0, 0),
        ("#### 72", "She has 12*6=<<12*6=72>>72.\n#### 72", 1, 1),
    ],
)
def test_gsm8k(score: Callable[..., Reward], reply: str, truth: object, strict: float, flexible: float) -> None:
    for method, expected in (("strict", strict), ("flexible", flexible)):
        reward = score("gsm8k", reply, truth, method=method)
        assert (reward.value, reward.success) == (expected, bool(expected))


def test_gsm8k_pays_for_the_form_where_that_is_asked_for(score: Callable[..., Reward]) -> None:
    values = [score("gsm8k", reply, "72", format_score=0.1, score=2.0).value for reply in ("#### 72", "#### 3", "no")]
    assert values == [2.0, 0.1, 0.0]
    assert score("gsm8k", "#### 3", "72", format_score=0.1).success is False


@pytest.mark.parametrize("truth", ["seventy-two", "#### none", "", [72], {"answer": 72}])
def test_gsm8k_refuses_a_truth_that_is_no_number(score: Callable[..., Reward], truth: object) -> None:
    with pytest.raises(InvalidReward, match="ground truth of gsm8k"):
        score("gsm8k", "#### 72", truth)


@pytest.mark.skipif(not GSM8K.is_file(), reason=f"the shared test data {GSM8K} is not beside this checkout")
def test_all_answers_of_gsm8k_are_right_and_their_neighbours_wrong(score: Callable[..., Reward]) -> None:
    rows = [json.loads(line) for line in GSM8K.read_text(encoding="utf-8").splitlines()]
    assert len(rows) == 1319
    for row in rows:
        answer = row["answer"]
        steps, _, last = answer.rpartition("#### ")
        number = last.strip().replace(",", "")
        neighbour = f"{steps}#### {int(number) + 1:,}"
        for truth in (answer, number, int(number)):
            assert score("gsm8k", answer, truth).value == 1.0
            assert score("gsm8k", neighbour, truth).value == 0.0
            assert score("gsm8k", f"It is {int(number):,}.", truth, method="flexible").value == 1.0
            assert score("gsm8k", f"It is {int(number) - 1:,}.", truth, method="flexible").value == 0.0


# ---- math


def scored(name: str, played: list[Trajectory], **settings: Any) -> list[Trajectory]:
    async def main() -> list[Trajectory]:
        async with open_rewards(RewardConfig(function=name, concurrency=1, **settings)) as rewards:
            return await rewards.score(played)

    return asyncio.run(main())


CASES = [
    (r"Thus \boxed{\frac{1}{2}}.", "0.5", 1),
    (r"\boxed{x^2+2x+1}", "(x+1)^2", 1),
    (r"\boxed{\{1, 2\}}", r"\{2, 1\}", 1),
    (r"first \boxed{1}, no: \boxed{2}", "1", 0),
    (r"The answer is $\frac{3}{4}$", r"$\frac{6}{8}$", 1),
    ("It is 42", "42", 1),
    (r"\boxed{41}", r"\boxed{42}", 0),
    (r"\boxed{\frac{", "42", 0),
    ("", "42", 0),
]


@pytest.mark.long
def test_math_knows_what_is_equal(episode: Make) -> None:
    results = scored("math", [episode(reply, truth=truth) for reply, truth, _ in CASES])
    assert [result.reward for result in results] == [float(right) for *_, right in CASES]
    assert [result.success for result in results] == [bool(right) for *_, right in CASES]


def test_math_can_ask_for_a_box(score: Callable[..., Reward]) -> None:
    assert score("math", "It is 42", "42", boxed=True).value == 0.0
    assert score("math", r"It is \boxed{42}", "42", boxed=True).value == 1.0


@pytest.mark.long
def test_math_that_computes_for_ever_is_killed(episode: Make) -> None:
    (failed,) = scored("math", [episode(r"\boxed{9^{9^{9^{9}}}}", truth="1")], timeout_s=3.0)
    assert failed.status is Status.ENV_ERROR and "no answer within 3 s" in str(failed.error)


def test_math_refuses_a_truth_that_it_cannot_read(score: Callable[..., Reward]) -> None:
    with pytest.raises(InvalidReward, match="cannot read the ground truth"):
        score("math", "42", "$$")


# ---- exact match and F1


@pytest.mark.parametrize(
    ("reply", "truth", "exact", "overlap"),
    [
        ("The Eiffel Tower!", "eiffel tower", 1, 1.0),
        ("in the  city of Paris", ["London", "City of Paris"], 0, 6 / 7),
        ("Paris", ["London", "Rome"], 0, 0.0),
        ("a an the", "...", 1, 1.0),
        ("", "Paris", 0, 0.0),
        ("42", 42, 1, 1.0),
        ("cat cat dog", "cat dog dog", 0, 2 / 3),
    ],
)
def test_words_are_compared_as_squad_does(
    score: Callable[..., Reward], reply: str, truth: object, exact: float, overlap: float
) -> None:
    assert score("exact_match", reply, truth).value == exact
    reward = score("f1", reply, truth)
    assert reward.value == pytest.approx(overlap)
    assert reward.success is bool(exact)


@given(st.lists(st.sampled_from(["cat", "dog", "emu"])), st.lists(st.sampled_from(["cat", "dog", "emu"]), min_size=1))
def test_f1_is_the_harmonic_mean(words: list[str], true: list[str]) -> None:
    from agentgym.rewards.scorers.answer import _overlap

    shared = sum(min(count, Counter(true)[word]) for word, count in Counter(words).items())
    precision, recall = (shared / len(words) if words else 0.0), shared / len(true)
    expected = 2 * precision * recall / (precision + recall) if shared else 0.0
    assert _overlap(words, true) == pytest.approx(expected)


def test_an_answer_may_stand_in_a_tag(score: Callable[..., Reward]) -> None:
    for reply, value in [
        ("It is <answer>Paris</answer>, surely.", 1.0),
        ("<answer>Rome</answer> no, <answer> Paris </answer>", 1.0),
        ("<answer>Paris", 0.0),
        ("Paris", 0.0),
    ]:
        assert score("exact_match", reply, "Paris", tag="answer").value == value
        assert score("f1", reply, "Paris", tag="answer").value == value


@pytest.mark.parametrize("truth", [[], {"a": 1}, [["x"]]])
def test_a_truth_without_a_text_is_refused(score: Callable[..., Reward], truth: object) -> None:
    for name in ("exact_match", "f1"):
        with pytest.raises(InvalidReward, match="a text or a list of them"):
            score(name, "x", truth)


# ---- format


@pytest.mark.parametrize(
    ("reply", "right"),
    [
        ("<think>so</think> <answer>4</answer>", True),
        ("<answer>4</answer><think>so</think>", False),
        ("<think>so</think><answer>4", False),
        ("<think>so</think><answer>4</answer><answer>5</answer>", False),
        ("<think>so<answer>4</think></answer>", False),
        ("", False),
    ],
)
def test_tags_stand_once_and_in_order(score: Callable[..., Reward], reply: str, right: bool) -> None:
    reward = score("format", reply, tags=["think", "answer"])
    assert (reward.value, reward.success) == (float(right), right)


def test_reasoning_that_was_parsed_counts_as_written(score: Callable[..., Reward]) -> None:
    assert score("format", "<answer>4</answer>", reasoning="so", tags=["think", "answer"]).value == 1.0
    pattern = r"^<think>.+</think>\s*<answer>.+</answer>$"
    assert score("format", "<answer>4\n</answer>", reasoning="so\nso", pattern=pattern, score=0.5).value == 0.5
    assert score("format", "4", reasoning="so", pattern=pattern).value == 0.0
    with pytest.raises(UnusableReward, match="pattern or tags"):
        score("format", "4")


# ---- code

ADD = "Here:\n```python\ndef add(a, b):\n    return a + b\n```\nDone."


@pytest.mark.parametrize(
    ("reply", "truth", "value"),
    [
        (ADD, "assert add(1, 2) == 3", 1.0),
        (ADD, "assert add(1, 2) == 4", 0.0),
        ("def add(a, b): return a + b", "assert add(1, 2) == 3", 1.0),
        ("```python\nx = 1\n```\nbetter:\n" + ADD, ["assert add(1, 2) == 3", "assert add('a', 'b') == 'ab'"], 1.0),
        (ADD, ["assert add(1, 2) == 3", "assert add(1, 2) == 4"], 0.5),
        (ADD, {"test": "def check(f):\n    assert f(2, 2) == 4", "entry_point": "add"}, 1.0),
        (ADD, {"inputs": [[1, 2], [3, 4]], "outputs": [3, 8], "fn_name": "add"}, 0.5),
        ("print(int(input()) * 2)", {"inputs": ["3\n", "4"], "outputs": ["6\n", "8  \n\n"]}, 1.0),
        ("print(int(open(0).read()) * 2)", '{"inputs": ["3", "4"], "outputs": ["6", "9"]}', 0.5),
        ("if __name__ == '__main__': print('yes')", {"inputs": [""], "outputs": ["yes"]}, 1.0),
        ("print('6')\nraise SystemExit(1)", {"inputs": [""], "outputs": ["6"]}, 0.0),
        ("no program at all", "assert add(1, 2) == 3", 0.0),
        ("import sys\nsys.exit(0)", "assert False", 0.0),
        ("import os\nos._exit(0)", "assert False", 0.0),
        ("x = bytearray(8 << 30)", "assert True", 0.0),
        ("import numpy_that_is_not_there", "assert True", 0.0),
        ("print('x' * (1 << 26))", {"inputs": [""], "outputs": ["x"]}, 0.0),
    ],
)
def test_code_is_scored_by_its_tests(score: Callable[..., Reward], reply: str, truth: object, value: float) -> None:
    reward = score("code", reply, truth, partial=True)
    assert (reward.value, reward.components, reward.success) == (value, {"tests_passed": value}, value == 1.0)
    assert score("code", reply, truth).value == float(value == 1.0)


@pytest.mark.long
def test_a_program_that_takes_for_ever_is_wrong_and_its_other_tests_fail(score: Callable[..., Reward]) -> None:
    program = "def f(x):\n    while x: pass\n    return x"
    tests = ["assert f(0) == 0", "f(1)", "assert f(0) == 0"]
    assert score("code", program, tests, partial=True, seconds=0.5, wall_seconds=50.0).value == pytest.approx(1 / 3)
    assert score("code", "import time\ntime.sleep(60)", "assert True", wall_seconds=1.0).value == 0.0


def test_a_program_sees_no_key_of_the_environment(
    score: Callable[..., Reward], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "s3cret")
    assert score("code", "import os\nassert 'OPENAI_API_KEY' not in os.environ", "assert True").value == 1.0


@pytest.mark.parametrize("truth", [[], {"inputs": ["1"], "outputs": []}, {"inputs": [], "outputs": []}, 3, [3]])
def test_a_truth_without_tests_is_refused(score: Callable[..., Reward], truth: object) -> None:
    with pytest.raises(InvalidReward):
        score("code", ADD, truth)


def test_code_runs_in_a_pool(episode: Make) -> None:
    played = [episode(ADD, truth="assert add(1, 2) == 3"), episode("import os; os._exit(0)", truth="assert False")]
    results = scored("code", played)
    assert [result.reward for result in results] == [1.0, 0.0]
    assert [re.sub(r"\d", "", name) for name in results[0].metrics] == ["reward/tests_passed", "success"]


def test_a_fence_and_many_blanks_are_read_in_a_time_in_proportion() -> None:
    from agentgym.rewards.scorers.code_tests import FENCE

    before = time.thread_time()
    assert FENCE.search("```" + " " * 200_000 + "x") is None
    assert time.thread_time() - before < 1.0
