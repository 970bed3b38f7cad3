"""GSM8K-v0: the official answers, and what a reply may make of the form."""

from __future__ import annotations

import gzip
import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from agentgym.envs import EVAL_SEED_START, Action, TextEnv, make_env
from agentgym.envs.tasks.math.final_number import last_number, marked_number, read_number
from agentgym.envs.tasks.math.gsm8k import GSM8K, problems
from agentgym.errors import ConfigError
from agentgym.testing import examine_env
from agentgym.types import Message, ToolCall

SHARED = Path(__file__).resolve().parents[5] / "shared" / "data" / "tasks" / "gsm8k"
OFFICIAL = re.compile(r"#### (\-?[0-9\.\,]+)")
"""The expression of the data set's own evaluation."""


def official(text: str) -> str | None:
    match = OFFICIAL.search(text)
    return match.group(1).strip().replace(",", "") if match else None


def say(env: TextEnv, text: str, *calls: ToolCall) -> tuple[str, float, bool, dict[str, Any]]:
    observation, reward, terminated, _, info = env.step(Action.from_message(Message("assistant", text, None, calls)))
    return observation, reward, terminated, info["metrics"]


def test_every_test_problem_is_scored_by_its_official_answer() -> None:
    env = GSM8K(tool="none")
    for index, problem in enumerate(problems("test")):
        number = official(problem.solution)
        assert number is not None and problem.answer == int(number)
        for text, right in ((problem.solution, 1.0), (f"#### {int(number):,}", 1.0), (f"#### {int(number) + 1}", 0.0)):
            observation, _ = env.reset(seed=EVAL_SEED_START + index)
            assert observation == problem.question
            assert say(env, text)[1:3] == (right, True)
            assert (official(text) == number) is bool(right)
    assert index == 1318


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"the shared test data {SHARED} is not beside this checkout")
def test_the_problems_are_those_of_the_data_set() -> None:
    for split, count in (("test", 1319), ("train", 1000)):
        lines = (SHARED / f"{split}.jsonl").read_bytes().split(b"\n")[:count]
        rows = [json.loads(line) for line in lines]
        assert [(problem.question, problem.solution) for problem in problems(split)] == [  # type: ignore[arg-type]
            (row["question"], row["answer"]) for row in rows
        ]


CASES: list[tuple[str, str | int, bool, str]] = [
    ("#### 72", 72, True, "the form"),
    ("#### 1,234,567", 1234567, True, "commas are taken out, as in the official script"),
    ("#### $18", 18, True, "a currency sign is no part of the number"),
    ("#### \\$18", 18, True, "nor when LaTeX escapes it"),
    ("#### -$5", -5, True, "minus before the currency"),
    ("#### $-5", -5, True, "and behind it"),
    ("#### 72.", 72, True, "a full stop ends the sentence"),
    ("#### 72.00", 72, True, "the same number"),
    ("#### 72.5", 72, False, "another number"),
    ("#### 072", 72, True, "the same number"),
    ("#### +72", 72, False, "the official script reads no plus sign"),
    ("#### 72 dollars", 72, True, "a unit follows"),
    ("#### 72km", 72, True, "a unit follows at once"),
    ("#### 72%", 72, True, "a percent sign is a unit here"),
    ("#### −5", -5, True, "a typographic minus is a minus"),
    ("#### −5", 5, False, "and is not left out"),
    ("#### -5", 5, False, "another number"),
    ("#### １８", 18, True, "full-width digits are digits"),
    ("#### 1e3", 1000, True, "an exponent belongs to the number"),
    ("#### 1e3", 1, False, "which is not its first digit"),
    ("#### 1e999999999", 1, False, "an exponent that nobody writes is no number"),
    ("#### 1/2", "1/2", True, "a fraction is one number"),
    ("#### 0.5", "1/2", True, "and equals its decimal"),
    ("#### 1/2", 1, False, "and not its numerator"),
    ("#### 1/0", 1, False, "a division by zero is none"),
    ("#### 12*6", 12, False, "a sum that is not worked out is no answer"),
    ("#### 12 * 6 = 72", 72, False, "the answer stands alone behind the mark"),
    ("#### 72 = 72 apples", 72, False, "what is equated is not yet answered"),
    ("#### 12 x 6", 12, False, "nor with a letter for the sign"),
    ("#### 3 1/2", 3, False, "a number and a half is not the number"),
    ("#### 18-20", 18, False, "a range is no number"),
    ("#### 18:30", 18, False, "nor is a time"),
    ("#### 1.2.3", 1, False, "nor a version"),
    ("#### 71\n#### 72", 72, True, "wrong, then right: the last mark is the answer"),
    ("#### 72\n#### 71", 72, False, "right, then wrong"),
    ("#### 72\nSo it is not 71.", 72, True, "a number without the mark is none"),
    ("#### 71 72", 72, False, "one number counts, the first behind the mark"),
    ("#### 70, 71, 72", 72, False, "so a list gives nothing away"),
    ("The answer is 72.", 72, False, "no mark"),
    ("\\boxed{72}", 72, False, "another form than was asked for"),
    ("#### \\boxed{72}", 72, False, "the number stands alone"),
    ("**#### 72**", 72, True, "the mark and the number are there"),
    ("####72", 72, False, "the official script wants the space"),
    ("### 72", 72, False, "three signs are a heading"),
    ("####\n72", 72, True, "white space is white space"),
    ("#### seventy-two", 72, False, "words are no number"),
    ("#### NaN", 72, False, "nothing equals it"),
    ("#### inf", 72, False, "nor that"),
    ("#### ", 72, False, "nothing"),
    ("", 72, False, "nothing"),
    ("#### 0x48", 72, False, "another base"),
    ("#### 0x48", 0, True, "as the official script, which stops at the letter"),
    ("#### " + "7" * 100_000, 72, False, "a number of 100,000 digits"),
    ("#### 72" + "0" * 100_000, 72, False, "that begins rightly"),
    ("####" + " " * 100_000 + "72", 72, True, "much white space"),
    ("#### " * 20_000, 72, False, "many marks"),
    ("#### " + "," * 100_000, 72, False, "many commas"),
    ("#### 72\ud800", 72, True, "half a character behind it"),
]


@pytest.mark.parametrize(
    ("text", "truth", "right", "why"), CASES, ids=[f"{case[0][:24]!r}-{case[1]}" for case in CASES]
)
def test_an_answer_is_read_by_its_form(text: str, truth: str | int, right: bool, why: str) -> None:
    env = GSM8K(tool="none")
    env.reset(seed=0)
    answer = read_number(str(truth))
    assert answer is not None
    env.problem = type(env.problem)("How many?", f"#### {truth}", answer)
    began = time.process_time()
    _, reward, terminated, metrics = say(env, text)
    assert (reward, terminated, metrics["success"]) == (float(right), True, float(right)), why
    assert time.process_time() - began < 2


def test_numbers_elsewhere_are_read_where_they_are_asked_for() -> None:
    assert last_number("It is 71, no: 72.") == 72
    assert last_number("none") is None
    assert marked_number("#### 1") == 1
    assert [read_number(text) for text in ("72", " -3 ", "7 2", "x", "")] == [72, -3, None, None, None]


def test_held_out_seeds_play_the_test_set_in_order_and_others_play_training_problems() -> None:
    env = GSM8K()
    played = []
    for seed in (EVAL_SEED_START, EVAL_SEED_START + 1318, EVAL_SEED_START + 1319):
        env.reset(seed=seed)
        played.append(env.problem)
    assert played == [problems("test")[place] for place in (0, 1318, 0)]
    trained = set()
    for seed in range(50):
        env.reset(seed=seed)
        trained.add(env.problem)
    assert trained <= set(problems("train")) and len(trained) > 40
    env.reset(seed=3)
    first = env.problem
    assert len({env.reset()[0] for _ in range(5)} - {first.question}) >= 4  # without a seed it draws on
    for _ in range(5):
        fresh = GSM8K()
        fresh.reset()
        assert fresh.problem in problems("train")  # where nobody gave a seed either
    for split in ("train", "test"):
        split_env = GSM8K(split=split)  # type: ignore[arg-type]
        assert split_env.reset(seed=EVAL_SEED_START + 2)[0] == problems(split)[2].question  # type: ignore[arg-type]
        assert split_env.reset(seed=0, options={"index": 9})[0] == problems(split)[9].question  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="from 0 to 999 in the split train, got 1000"):
        env.reset(seed=0, options={"index": 1000})


@pytest.mark.parametrize("tool", ["calculator", "python"])
def test_calls_come_before_the_answer(tool: Any) -> None:
    env = GSM8K(tool=tool, split="test")
    env.reset(seed=EVAL_SEED_START)
    text = {"calculator": "expression", "python": "code"}[tool]
    observation, reward, terminated, _ = say(env, "#### 18", ToolCall("call_0", tool, {text: "(16 - 3 - 4) * 2"}))
    assert (observation, reward, terminated) == ("18", 0.0, False)
    observation, _, terminated, _ = say(env, "It is 18.")
    assert "no answer in that reply" in observation and not terminated
    assert say(env, "#### 18")[1:3] == (1.0, True)
    env.close()


@pytest.mark.long
@pytest.mark.parametrize("tool", ["none", pytest.param("calculator", marks=pytest.mark.slow)])
def test_every_claim_of_the_card_holds(tool: str) -> None:
    verdicts = {verdict.check: verdict for verdict in examine_env("GSM8K-v0", {"tool": tool})}
    assert [verdict.findings for verdict in verdicts.values() if verdict.findings] == []


def test_with_python_the_card_names_it_and_oracle_and_cheat_play_as_without() -> None:
    verdicts = examine_env("GSM8K-v0", {"tool": "python"}, only=("makes", "card", "oracle", "cheat"))
    assert [verdict.verdict for verdict in verdicts] == ["passed"] * 4


def test_an_unknown_split_or_tool_is_refused() -> None:
    with pytest.raises(ConfigError, match="splits auto, train, test; got split 'dev'"):
        make_env("GSM8K-v0", {"split": "dev"})
    with pytest.raises(ConfigError, match="tools none, calculator, python; got tool 'abacus'"):
        make_env("GSM8K-v0", {"tool": "abacus"})


def test_the_package_holds_the_data_and_its_licence() -> None:
    import agentgym.envs

    folder = Path(agentgym.envs.__file__).parent / "data" / "gsm8k"
    assert "MIT License" in (folder / "LICENSE").read_text(encoding="utf-8")
    assert sum(len(gzip.decompress(path.read_bytes()).splitlines()) for path in folder.glob("*.gz")) == 2319
