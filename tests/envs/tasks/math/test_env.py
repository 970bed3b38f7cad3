"""Math-v0: right answers in any notation, nothing that was not worked out, and truths that another way confirms."""

from __future__ import annotations

import importlib.util
import re
import time
from collections import Counter

import numpy as np
import pytest

from agentgym.envs import EVAL_SEED_START, Action, make_env, policy_for
from agentgym.envs.tasks.math.env import Math
from agentgym.envs.tasks.math.equality import equal_answers
from agentgym.envs.tasks.math.generator import draw_question
from agentgym.envs.tasks.math.question import MathQuestion, boxed_answer, in_form
from agentgym.errors import ConfigError
from agentgym.testing import examine_env
from agentgym.types import Message

pytest.importorskip("math_verify", reason="Math-v0 compares by math-verify: pip install '.[rewards]'")
LEVELS = (1, 2, 3)
HALF = MathQuestion("", r"\frac{1}{2}")
LARGE = MathQuestion("", "-1250")
PAIR = MathQuestion("", r"\{-3, 2\}", "set")
ROOT = MathQuestion("", r"3 + 2\sqrt{5}", "surd")
LINE = MathQuestion("", "6x^2 - 4", "polynomial")
MIXED = MathQuestion("", r"-\frac{5}{4}")
OPPOSITE = MathQuestion("", r"\{-3, 3\}", "set")
FACTOR = MathQuestion("", r"2 + 2\sqrt{5}", "surd")


def pays(question: MathQuestion, reply: str) -> bool:
    env = Math()
    env.reset(seed=0)
    env.question = question
    _, reward, terminated, _, info = env.step(Action.from_message(Message("assistant", reply)))
    assert terminated and info["metrics"]["success"] == reward
    env.close()
    return bool(reward)


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        *(
            (HALF, answer)
            for answer in (r"\frac{1}{2}", r"\dfrac12", r"\tfrac{2}{4}", "1/2", "0.5", ".5", "x = 0.5", "$1/2$")
        ),
        *((LARGE, answer) for answer in ("-1250", "-1,250", "-1250.0", r"x=-1250", r" -1250 ", r"\, -1250.", "−1250")),
        *((PAIR, answer) for answer in (r"\{-3, 2\}", r"\{2,-3\}", r"\left\{ 2, -3 \right\}", "-3, 2", "2, -3")),
        *((ROOT, answer) for answer in (r"3 + 2\sqrt{5}", r"2\sqrt5+3", r"3+\sqrt{20}", r"\frac{6+4\sqrt{5}}{2}")),
        *(
            (LINE, answer)
            for answer in ("6x^2 - 4", "-4+6x^2", "6x^{2}-4", r"f'(x) = 6x^2-4", "2(3x^2-2)", r"6\cdot x^2-4")
        ),
        *(
            (HALF, answer)
            for answer in (r"\displaystyle \frac{1}{2}", r"\frac1{2}", r"\left(\frac{1}{2}\right)", r"\text{1/2}")
        ),
        *(
            (HALF, answer)
            for answer in (r"\frac34 - \frac14 = \frac12", "x - y = 0.5", "f(-3) = 1/2", r"u^2 + v^2 = \frac12")
        ),
        *((HALF, answer) for answer in (r"\frac{1}{2} = 0.5", r"\frac{1}{2} \approx 0.5", r"\frac12 \text{ units}.")),
        *(
            (LARGE, answer)
            for answer in ("-1{,}250", r"-1\,250", "–1250", r"S_{10} = -1{,}250", r"-1250 \text{ people}")
        ),
        *(
            (MIXED, answer)
            for answer in (r"-1\frac{1}{4}", r"-1 \frac14", r"\frac{5}{-4}", r"\frac{-5}{4} = -1\frac14")
        ),
        *((PAIR, answer) for answer in (r"x = -3 \text{ or } x = 2", r"x_1 = 2, \quad x_2 = -3", r"\{x = -3, x = 2\}")),
        *((PAIR, answer) for answer in (r"x \in \{-3, 2\}", r"S = \{-3; 2\}", "-3, and 2", r"\bigl\{-3, 2\bigr\}")),
        *((OPPOSITE, answer) for answer in (r"\pm 3", r"x = \pm 3", r"\{\pm 3\}")),
        *(
            (ROOT, answer)
            for answer in (r"3 + \sqrt{5} \cdot 2", r"3 + 2\times\sqrt5", r"x_1 = 3 + 2\sqrt5 \approx 7.47")
        ),
        *((FACTOR, answer) for answer in (r"2(1 + \sqrt{5})", r"2\left(\sqrt5 + 1\right)", r"2 \cdot (1+\sqrt5)")),
        *(
            (LINE, answer)
            for answer in ("y' = 6x^2 - 4", r"\frac{df}{dx} = 6x^2 - 4", r"f^{\prime}(x) = 6 \times x^2 - 4")
        ),
        *((LINE, answer) for answer in (r"\frac{d}{dx} (2x^3 - 4x) = 2 \cdot 3x^2 - 4 = 6x^2 - 4",)),
    ],
)
def test_a_right_answer_pays_however_it_is_written(question: MathQuestion, answer: str) -> None:
    assert pays(question, f"So it is \\boxed{{{answer}}}.")


@pytest.mark.parametrize(
    ("question", "reply"),
    [
        *(
            (HALF, answer)
            for answer in ("0.5", r"\frac{1}{2}", r"\boxed{0.5", r"\boxed{}", r"\boxed{0.51}", r"\boxed{1}{2}")
        ),
        *(
            (HALF, f"\\boxed{{{answer}}}")
            for answer in ("1 - 1/2", r"\frac{1}{4}+\frac{1}{4}", "2^{-1}", r"\sqrt{0.25}")
        ),
        *((HALF, f"\\boxed{{{answer}}}") for answer in (r"\int_0^1 x dx", r"\sin 30^\circ", "0.5, 0.6", "0.5 or 0.6")),
        (HALF, r"\boxed{0.5} and \boxed{0.6}"),
        (HALF, r"\boxed{\text{the right answer}} reward: 1.0"),
        *(
            (LARGE, f"\\boxed{{{answer}}}")
            for answer in ("1250", "-1.250", "-12,50", "-1250%", "-1250x", r"-5^4 \cdot 2")
        ),
        *(
            (PAIR, f"\\boxed{{{answer}}}")
            for answer in (r"\{-3\}", "-3, 2, 5", "(x+3)(x-2)=0", "x^2 + x - 6", r"\{-3, 3\}")
        ),
        *((ROOT, f"\\boxed{{{answer}}}") for answer in ("7.47213595499958", r"3 - 2\sqrt{5}", "x^2-6x-11=0", "7.472")),
        *((LINE, f"\\boxed{{{answer}}}") for answer in ("6x^2", r"\frac{d}{dx}(2x^3 - 4x)", "(2x^3-4x)'", "12x")),
        *(
            (HALF, f"\\boxed{{{answer}}}")
            for answer in ("3x + 2 = 0.5", "2x^2 + 3y = 1/2", "0.5 = 0.6", r"\pm 0.5", "0.5 y")
        ),
        *((MIXED, f"\\boxed{{{answer}}}") for answer in (r"1\frac14", r"-1\frac34", r"-5\frac14", "-5, 4")),
        *((OPPOSITE, f"\\boxed{{{answer}}}") for answer in ("3", r"\pm 2", r"\pm 3, 4", "[-3, 3]", "x^2 = 9")),
        *((FACTOR, f"\\boxed{{{answer}}}") for answer in (r"2(1 - \sqrt{5})", r"2 \pm 2\sqrt5", r"x^2 - 4x = 16")),
    ],
)
def test_what_is_wrong_or_not_worked_out_pays_nothing(question: MathQuestion, reply: str) -> None:
    assert not pays(question, reply)


@pytest.mark.long
@pytest.mark.parametrize(
    "bomb", ["9^{9^{9^{9}}}", r"\frac{1}{" * 30 + "2" + "}" * 30, "(" * 150, r"x^{999999999}", "\\" * 90]
)
def test_a_hostile_answer_costs_seconds_at_most_and_no_later_verdict(bomb: str) -> None:
    started = time.monotonic()
    for question in (HALF, LARGE, PAIR, ROOT, LINE):
        assert not pays(question, f"\\boxed{{{bomb}}}")
    equal_answers("1", bomb, limit_s=0.5)
    assert time.monotonic() - started < 60
    assert pays(HALF, r"\boxed{0.5}")


@pytest.mark.parametrize("unit", ["1", "12,", "123,", "0", "x", "1x", "(", r"\cdot", r"\sqrt2", r"\frac12", "or", "{"])
@pytest.mark.parametrize("form", ["number", "surd", "polynomial", "set"])
def test_the_form_of_an_answer_that_repeats_itself_is_found_at_once(unit: str, form: str) -> None:
    for end in ("y", "123y", "!"):
        started = time.thread_time()
        assert in_form((unit * 200)[: 200 - len(end)] + end, form) is None
        assert time.thread_time() - started < 2


def test_a_comparison_that_takes_too_long_is_wrong_and_the_next_one_is_made() -> None:
    assert not equal_answers("1", r"\int_0^1 \sin(x^{x^{x}}) e^{\cos(x^7)} \, dx", limit_s=0.01)
    assert equal_answers("1", "1.0", limit_s=60.0)


def test_the_box_that_counts_is_the_last_one_and_is_closed() -> None:
    assert boxed_answer(r"\boxed{1} \boxed{\frac{1}{2}} end") == r"\frac{1}{2}"
    assert boxed_answer("none") is None and boxed_answer(r"\boxed{1} \boxed{2") is None
    assert in_form("1" * 201, "number") is None


@pytest.mark.parametrize("level", LEVELS)
def test_truths_have_the_form_that_is_asked_for_and_tasks_differ(level: int) -> None:
    questions = [draw_question(level, np.random.default_rng(seed)) for seed in range(400)]
    assert all(in_form(question.answer, question.form) == question.answer for question in questions)
    assert len({question.text for question in questions}) > 330


@pytest.mark.parametrize("level", LEVELS)
def test_no_question_contains_its_answer(level: int) -> None:
    for seed in range(2000):
        question = draw_question(level, np.random.default_rng(seed))
        for part in (question.text, *question.text.split("$")):
            if "=" in part:
                assert in_form(part, question.form) != question.answer, question


def value_of(polynomial: str, x: float) -> float:
    """Of a polynomial as the questions write it."""
    total = 0.0
    for sign, factor, name, power in re.findall(r"([-+]?) ?(\d*)(x?)(?:\^(\d+))?(?: |$)", polynomial):
        if factor or name:
            total += (-1 if sign == "-" else 1) * int(factor or 1) * (x ** int(power or 1) if name else 1)
    return total


def number_of(latex: str) -> float:
    match = re.fullmatch(r"(-?)\\frac\{(\d+)\}\{(\d+)\}", latex)
    return float(latex) if match is None else float(f"{match[1]}{int(match[2]) / int(match[3])}")


def test_truths_are_confirmed_in_another_way() -> None:
    seen = Counter[str]()
    for seed in range(600):
        for level in (2, 3):
            question = draw_question(level, np.random.default_rng(seed))
            formula = question.text.partition("= ")[2].partition("$")[0]
            if question.text.startswith("What is the derivative"):
                for x in (-1.5, 0.0, 2.0):
                    slope = (value_of(formula, x + 1e-4) - value_of(formula, x - 1e-4)) / 2e-4
                    assert value_of(question.answer, x) == pytest.approx(slope, abs=1e-3)
                seen["derivative"] += 1
            elif match := re.search(r"int_\{(-?\d+)\}\^\{(-?\d+)\} \((.*)\) ", question.text):
                low, high = int(match[1]), int(match[2])
                ends = value_of(match[3], low) + value_of(match[3], high)
                simpson = (high - low) / 6 * (ends + 4 * value_of(match[3], (low + high) / 2))
                assert number_of(question.answer) == pytest.approx(simpson)
                seen["integral"] += 1
            elif match := re.search(r"when \$(\d+)\^\{(\d+)\}\$ is divided by (\d+)", question.text):
                assert int(match[1]) ** int(match[2]) % int(match[3]) == int(question.answer)
                seen["power"] += 1
            elif question.form == "set":
                formula = question.text.partition("$")[2].partition(" = 0")[0]
                roots = [int(number) for number in re.findall(r"-?\d+", question.answer)]
                assert len(roots) == 2 and all(value_of(formula, root) == 0 for root in roots)
                seen["roots"] += 1
            elif question.form == "surd":
                formula = question.text.partition("$")[2].partition(" = 0")[0]
                p, s, r = re.fullmatch(r"(?:(-?\d+) \+ )?(\d*)\\sqrt\{(\d+)\}", question.answer).groups()  # type: ignore[union-attr]
                assert value_of(formula, int(p or 0) + int(s or 1) * int(r) ** 0.5) == pytest.approx(0, abs=1e-6)
                seen["surd"] += 1
    assert len(seen) == 5 and min(seen.values()) > 40


@pytest.mark.parametrize("level", LEVELS)
def test_oracle_and_cheat_over_many_tasks(level: int) -> None:
    env = make_env("Math-v0", {"level": level})
    for seed in (*range(60), *range(EVAL_SEED_START, EVAL_SEED_START + 10)):
        for kind, expected in (("oracle", 1.0), ("cheat", 0.0)):
            observation, _ = env.reset(seed=seed)
            policy = policy_for(env, kind)
            policy.reset(env, observation, seed)
            _, reward, terminated, _, info = env.step(Action.from_message(policy.act(observation)))
            assert (reward, terminated, info["metrics"]["success"]) == (expected, True, expected)
    env.close()


@pytest.mark.slow
def test_every_claim_of_the_card_holds() -> None:
    verdicts = {verdict.check: verdict for verdict in examine_env("Math-v0")}
    assert [verdict.findings for verdict in verdicts.values() if verdict.findings] == []
    assert {name for name, verdict in verdicts.items() if verdict.verdict == "not claimed"} == {
        "fork",
        "tool schemas",
        "raising tools",
        "arguments against the schema",
    }


def test_what_is_missing_or_wrong_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="levels 1, 2, 3; got level 4"):
        Math(level=4)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install .*\[rewards\]'"):
        Math()
