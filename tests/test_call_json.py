"""A call that is a JSON object is read by one rule: nothing that it holds is lost."""

from __future__ import annotations

import pytest

from agentgym.call_json import ARGUMENT_KEYS, MAX_JSON_DEPTH, as_call, check_outside, read_arguments, read_json
from agentgym.types import JSON


@pytest.mark.parametrize("text", ["", "{", "NaN", "[Infinity]", "1e400", '"\\udc00"', '{"a": 1,}', "1 2", "[" * 10**6])
def test_what_is_not_json_is_refused_with_its_reason(text: str) -> None:
    with pytest.raises(ValueError, match="invalid JSON"):
        read_json(text)


@pytest.mark.parametrize("arguments", [{"a": 1}, '{"a": 1}'])
def test_arguments_may_be_an_object_or_the_text_of_one(arguments: object) -> None:
    assert as_call({"name": "go", "arguments": arguments}) == ("go", {"a": 1})  # type: ignore[dict-item]
    assert as_call({"tool": "go", "input": arguments}, ("name", "tool"), ("arguments", "input")) == ("go", {"a": 1})  # type: ignore[dict-item]


@pytest.mark.parametrize("arguments", [None, "", "null", '""', {}, "{}"])
def test_null_and_an_empty_text_are_no_arguments_as_a_missing_key_is(arguments: object) -> None:
    assert as_call({"name": "go", "arguments": arguments}) == as_call({"name": "go"}) == ("go", {})  # type: ignore[dict-item]


@pytest.mark.parametrize("arguments", [[], [1], 0, 3, False, True, "[1]", "3", "true", '"{}"', "north", " "])
def test_any_other_value_that_is_no_object_is_refused(arguments: object) -> None:
    with pytest.raises(ValueError, match=r"the arguments are (a JSON object, got|invalid JSON)"):
        read_arguments(arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("key", [*ARGUMENT_KEYS[1:], "direction", "reason", "function"])
def test_a_key_that_a_call_does_not_have_is_named(key: str) -> None:
    several: list[dict[str, JSON]] = [{}, {"arguments": {}}, {"arguments": {"a": 1}}]
    for arguments in several:
        with pytest.raises(ValueError, match=f'the keys "name" and "arguments", and no "{key}"'):
            as_call({"name": "go", **arguments, key: {"direction": "north"}})
    assert as_call({"name": "go", key: None}) == ("go", {})


def test_of_two_keys_of_arguments_neither_is_dropped() -> None:
    both = ("arguments", "parameters")
    with pytest.raises(ValueError, match='no "parameters"'):
        as_call({"name": "go", "arguments": {}, "parameters": {"a": 1}}, argument_keys=both)
    assert as_call({"name": "go", "arguments": None, "parameters": {"a": 1}}, argument_keys=both) == ("go", {"a": 1})


@pytest.mark.parametrize("label", ["id", "type", "index", "call_id", "tool_call_id"])
def test_a_label_of_a_call_is_no_argument(label: str) -> None:
    assert as_call({label: "function", "name": "go", "arguments": {"a": 1}}) == ("go", {"a": 1})


@pytest.mark.parametrize(
    "value", [None, 1, "go", [], {}, {"name": 1}, {"name": ""}, {"name": "go", "arguments": []}, {"arguments": {}}]
)
def test_what_is_no_call_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"call|arguments"):
        as_call(value)  # type: ignore[arg-type]


def test_arguments_outside_of_the_function_of_a_call_are_named() -> None:
    for key in ARGUMENT_KEYS:
        with pytest.raises(ValueError, match=f'no "{key}" outside of it'):
            check_outside({"function": {"name": "go"}, key: {"a": 1}})
        check_outside({"id": "a", "type": "function", "function": {"name": "go"}, key: None})


@pytest.mark.parametrize(
    "text", ['{"name": "go", "arguments": {"to": "a"}, "arguments": {}}', '{"to": "a", "to": "b"}']
)
def test_a_key_that_occurs_twice_is_refused_so_that_no_value_vanishes(text: str) -> None:
    with pytest.raises(ValueError, match="given twice"):
        read_json(text)


def test_a_value_that_is_nested_too_deeply_for_a_template_is_refused() -> None:
    def nested(depth: int) -> str:
        return "[" * depth + "]" * depth

    assert read_json(nested(MAX_JSON_DEPTH)) is not None
    assert read_json(f"[{', '.join(['[]'] * 2 * MAX_JSON_DEPTH)}]") == [[]] * 2 * MAX_JSON_DEPTH
    for depth in (MAX_JSON_DEPTH + 1, 500, 5_000):
        with pytest.raises(ValueError, match=r"invalid JSON \(nested too deeply\)"):
            read_json(nested(depth))


def test_an_integer_of_too_many_digits_is_refused_in_words_of_the_call() -> None:
    with pytest.raises(ValueError, match=r"the arguments are invalid JSON \(an integer of too many digits\)"):
        read_arguments(f'{{"n": {"9" * 5_000}}}')
