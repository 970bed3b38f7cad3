"""Arithmetic that a model writes: as Python works it out, exactly, and within bounds."""

from __future__ import annotations

import json
import pickle
import re
import time
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.tools import ToolRunner
from agentgym.tools.calculator import calculator
from agentgym.tools.expression import ExpressionError, evaluate_expression, format_value
from agentgym.types import ToolCall

GSM8K = Path(__file__).resolve().parents[3] / "shared" / "data" / "tasks" / "gsm8k" / "test.jsonl"
SUMS = st.recursive(
    st.integers(1, 99).map(str),
    lambda part: st.tuples(part, st.sampled_from("+-*"), part).map(lambda three: f"({three[0]} {three[1]} {three[2]})"),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(SUMS, st.booleans())
def test_an_expression_is_what_python_makes_of_it(text: str, plain: bool) -> None:
    assert evaluate_expression(text, plain=plain).value == eval(text)  # the test's own text


@settings(max_examples=300, deadline=None)
@given(st.text("0123456789+-*/%^().,e sqrtabx=×÷−", max_size=60))
def test_any_text_has_a_value_or_an_error(text: str) -> None:
    began = time.thread_time()
    try:
        assert format_value(evaluate_expression(text))
    except ExpressionError as error:
        assert str(error)
    assert time.thread_time() - began < 2


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2 + 3 * 4 - 6 / 4", "12.5"),
        ("8 / 2 / 2 = 2", "2"),
        ("(1+2)×4−6÷3", "10"),
        ("-2^2", "-4"),
        ("2^3^2", "512"),
        ("2**-1", "0.5"),
        ("0.1 + 0.2", "0.3"),
        ("1,234,567 + 1", "1234568"),
        ("1e3 / 8", "125"),
        ("10 % 3", "1"),
        ("50 * 20%", "10"),
        ("20% + 5", "5.2"),
        ("7 // 2", "3"),
        ("-7 // 2", "-4"),
        ("1 / 3", "about 0.333333333333 (exactly 1/3)"),
        ("1 / 3 * 3", "1"),
        ("-1 / 8", "-0.125"),
        ("sqrt(16)", "4"),
        ("sqrt(2)", "about 1.41421356237"),
        ("round(2.5) - round(-2.5)", "6"),
        ("floor(-0.5) + ceil(0.5) + abs(-3)", "3"),
        ("2^200", "about 1.60693804426e+60"),
        ("(-1)^99999999999", "-1"),
        ("0^0", "1"),
    ],
)
def test_operators_bind_as_usual_and_values_are_exact(text: str, value: str) -> None:
    assert format_value(evaluate_expression(text)) == value


def test_the_numbers_of_an_expression_are_told() -> None:
    assert evaluate_expression("(1+2)×4−6÷3", plain=True).numbers == (1, 2, 4, 6, 3)
    assert evaluate_expression("2 + 3 * 4 - 6 / 4", plain=True).value == Fraction(25, 2)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a number is missing"),
        ("2 +", "a number is missing"),
        ("-3", "a number is missing"),
        ("2 3", "out of place"),
        ("(2", "not closed"),
        ("2)", "out of place"),
        ("1 / (2 - 2)", "divides by zero"),
        ("2 ** 9", "a number is missing"),
        ("self.target", "whole numbers"),
        ("2" * 7, "whole numbers"),
        ("1+" * 60 + "1", "at most 100 characters"),
        ("(" * 100, "a number is missing"),
    ],
)
def test_a_malformed_expression_is_an_error(text: str, message: str) -> None:
    with pytest.raises(ExpressionError, match=message):
        evaluate_expression(text, plain=True, max_chars=100)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("9**9**9**9", "too large"),
        ("10^(-2000)", "too large"),
        ("1e9999", "1233 digits"),
        ("1e99999", "too long"),
        ("*".join(["1e300"] * 5), "1233 digits"),
        ("1" + "%" * 900, "1233 digits"),
        ("2^" * 300 + "2", "128 deep"),
        ("-" * 900 + "1", "128 deep"),
        ("(" * 900, "128 deep"),
        ("1" * 1001, "at most 1000 characters"),
        ("sqrt(-1)", "negative number"),
        ("0^-1", "divides by zero"),
        ("5 % 0", "divides by zero"),
        ("__import__('os')", "numbers"),
        ("exec(1)", "'exec' is not known"),
        ("nan", "'nan' is not known"),
        ("1,23", "',23'"),
    ],
)
def test_a_bomb_is_refused_at_once(text: str, message: str) -> None:
    began = time.thread_time()
    with pytest.raises(ExpressionError, match=re.escape(message)) as caught:
        evaluate_expression(text)
    assert time.thread_time() - began < 1
    assert str(pickle.loads(pickle.dumps(caught.value))) == str(caught.value)


def test_the_tool_answers_a_model_and_counts_what_is_no_expression_as_an_error() -> None:
    calls = [ToolCall("a", "calculator", {"expression": "6 * 7"}), ToolCall("b", "calculator", {"expression": "6 *"})]
    right, wrong = ToolRunner([calculator]).run_directly(calls)
    assert (right.content, right.error) == ("42", None)
    assert "a number is missing" in wrong.content and wrong.error == "tool_error"


@pytest.mark.skipif(not GSM8K.is_file(), reason=f"the shared test data {GSM8K} is not beside this checkout")
def test_recorded_solutions_evaluate_to_their_results() -> None:
    """GSM8K marks its calculations as `<<16-3-4=9>>`: an independent judge of 4,000 expressions."""
    steps = re.findall(r"<<([^<>=]+)=([^<>=]+)>>", GSM8K.read_text(encoding="utf-8"))
    wrong = []
    for text, result in steps:
        try:
            difference = evaluate_expression(text).value - evaluate_expression(result).value
            if abs(difference) > Fraction(1, 20):  # some are rounded
                wrong.append((text, result))
        except ExpressionError as error:
            wrong.append((text, str(error)))
    assert len(steps) > 4000, json.dumps(wrong)
    assert len(wrong) <= 30, wrong
