"""A row becomes a task: verl's columns and plain ones, renamed ones, agents, values that JSON does not know."""

from __future__ import annotations

import datetime
import decimal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.data import DataConfig, open_data
from agentgym.data.rows import messages_of
from agentgym.data.table import to_json_value
from agentgym.errors import ConfigError, UnknownName
from agentgym.openai_wire import REASONING
from agentgym.types import Message, Task

Write = Callable[..., str]
USER = {"role": "user", "content": "What is 1 + 1?"}


def only(path: str, env_id: str | None = None, **settings: Any) -> Task:
    (task,) = open_data(DataConfig(train=path, **settings), env_id=env_id).train
    return task


@pytest.mark.parametrize(
    "row",
    [
        {"prompt": [USER], "reward_model": {"style": "rule", "ground_truth": "2"}},
        {"prompt": "What is 1 + 1?", "ground_truth": "2"},
        {"question": "What is 1 + 1?", "answer": "2"},
        {"messages": [USER], "ground_truth": "2"},
        {"messages": [{**USER, "name": None, "tool_calls": None}], "answer": "2", "extra_info": None},
    ],
    ids=lambda row: "+".join(row),
)
def test_the_usual_columns_are_read_without_a_setting(row: dict[str, Any], jsonl: Write) -> None:
    task = only(jsonl(row))
    assert task.options == {"messages": [USER], "ground_truth": "2"}
    assert task.env_id == "Prompt-v0"


def test_columns_are_renamed_and_reached_into(jsonl: Write) -> None:
    row = {"problem": "Prove it.", "label": {"answer": [1, 2]}, "origin": "book", "level": 3, "prompt": "not this"}
    columns = {"prompt": "problem", "ground_truth": "label.answer", "data_source": "origin"}
    task = only(jsonl(row), columns=columns, keep=("level",))
    assert task.options == {
        "messages": [{"role": "user", "content": "Prove it."}],
        "ground_truth": [1, 2],
        "data_source": "book",
        "extra_info": {"level": 3},
    }


def test_the_report_lists_how_each_column_is_read(jsonl: Write) -> None:
    path = jsonl({"question": "q", "answer": "a", "solution": "s", "ability": "math"})
    (line,) = open_data(DataConfig(train=path)).report
    assert line == f"train: 1 tasks from {path} (prompt: question; ground_truth: answer; not read: solution, ability)"


def test_a_whole_conversation_is_kept_as_it_is(jsonl: Write) -> None:
    function = {"name": "add", "arguments": '{"a": 1, "b": 1}'}
    messages = [
        {"role": "system", "content": "Use the tools."},
        {"role": "user", "content": [{"type": "text", "text": "1 + 1?"}]},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "content": "2", "tool_call_id": "c"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "2 + 2?"},
    ]
    assert only(jsonl({"prompt": messages})).options == {"messages": messages}


@pytest.mark.parametrize("key", ["parameters", "args", "input"])
def test_a_call_whose_arguments_are_under_another_key_is_refused_with_its_place(key: str, jsonl: Write) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "add", key: {"a": 1}}}
    reply = {"role": "assistant", "content": None, "tool_calls": [call]}
    with pytest.raises(ConfigError, match=f"line 1: column 'prompt': message 1 has a tool call .*no \"{key}\""):
        only(jsonl({"prompt": [USER, reply, {"role": "tool", "content": "2", "tool_call_id": "c"}, USER]}))


@pytest.mark.parametrize("name", REASONING)
def test_reasoning_in_the_history_of_a_prompt_has_any_usual_name(name: str, jsonl: Write) -> None:
    reply = {"role": "assistant", "content": "2", name: [{"type": "text", "text": "One more."}]}
    assert messages_of(only(jsonl({"prompt": [USER, reply, USER]})))[1] == Message("assistant", "2", "One more.")
    sealed = {**reply, name: [{"type": "reasoning.encrypted", "data": "x"}]}
    with pytest.raises(ConfigError, match=rf"line 1: column 'prompt': message 1\.{name} holds no text"):
        only(jsonl({"prompt": [USER, sealed, USER]}))


def test_agents_name_environments(jsonl: Write) -> None:
    def env_of(agent: str | None, env_id: str | None = None, **settings: Any) -> str:
        return only(jsonl({"prompt": "q", "agent_name": agent}), env_id, **settings).env_id

    assert env_of(None) == env_of("single_turn_agent") == "Prompt-v0"
    assert env_of(None, "a.py:A") == env_of("single_turn_agent", "a.py:A") == env_of("tool_agent", "a.py:A") == "a.py:A"
    assert env_of("tool_agent", "a.py:A", agents={"tool_agent": "b.py:B"}) == "b.py:B"
    assert env_of("single_turn_agent", agents={"single_turn_agent": "b.py:B"}) == "b.py:B"
    assert env_of("tools.py:Search", "a.py:A") == "tools.py:Search"
    assert env_of("Search-v3") == "Search-v3"
    with pytest.raises(
        ConfigError, match=r"'tool_agnt' names no environment: did you mean 'tool_agent'\? agents tool_"
    ):
        env_of("tool_agnt", agents={"tool_agent": "b.py:B"})
    for env_id in ("Prompt-v0", "ToolPrompt-v0"):  # what a command has where none was given
        with pytest.raises(ConfigError, match=r"'my_agent' names no environment"):
            env_of("my_agent", env_id)
    with pytest.raises(ConfigError, match=r"'tool_agent' names no environment.*, and --tools gives it tools"):
        env_of("tool_agent", "Prompt-v0")


def test_another_environment_is_another_task(jsonl: Write) -> None:
    path = jsonl({"prompt": "q"})
    assert only(path).seed != only(path, "a.py:A").seed


def test_a_null_of_a_column_makes_no_other_task(tmp_path: Path, jsonl: Write) -> None:
    rows = [{"prompt": "q", "extra_info": {"a": 1}}, {"prompt": "r", "extra_info": {"b": [{"c": 2}]}}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    tables = [open_data(DataConfig(train=path)).train for path in (str(tmp_path / "a.parquet"), jsonl(*rows))]
    assert tables[0][0].options["extra_info"] == {"a": 1, "b": None}
    assert [task.seed for task in tables[0]] == [task.seed for task in tables[1]]


def test_rows_without_a_ground_truth_are_those_of_another_source(jsonl: Write) -> None:
    rows = [
        {"prompt": "q", "data_source": "sums", "ground_truth": 2},
        {"prompt": "r", "data_source": "chat", "ground_truth": None},
        {"prompt": "s", "data_source": "sums", "ground_truth": 3},
    ]
    tasks = open_data(DataConfig(train=jsonl(*rows))).train
    assert [task.options.get("ground_truth") for task in tasks] == [2, None, 3]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (np.int64(3), 3),
        (np.float32(0.5), 0.5),
        (np.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
        (np.str_("a"), "a"),
        (np.bool_(True), True),
        (float("nan"), None),
        ((1, [2.5]), [1, [2.5]]),
        (datetime.date(2024, 5, 1), "2024-05-01"),
        (datetime.datetime(2024, 5, 1, 12), "2024-05-01T12:00:00"),
        (decimal.Decimal("2.00"), 2),
        (decimal.Decimal("2.5"), 2.5),
        (decimal.Decimal("NaN"), None),
        (np.float64("nan"), None),
    ],
    ids=repr,
)
def test_values_become_json(value: object, expected: object) -> None:
    value_read = to_json_value({"a": value}, "here")
    assert value_read == {"a": expected}
    assert type(value_read["a"]) is type(expected)  # type: ignore[index, call-overload]


@pytest.mark.parametrize(
    "value", [b"PNG", {1: 2}, float("inf"), {"a": {3}}, object()], ids=lambda value: type(value).__name__
)
def test_a_value_that_json_cannot_hold_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r"^here holds "):
        to_json_value(value, "here")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


@pytest.mark.long
@given(json_values)
def test_json_stays_as_it_is(value: Any) -> None:
    assert to_json_value(value, "here") == value


def test_settings_that_cannot_work_are_refused() -> None:
    with pytest.raises(UnknownName, match="unknown part 'promt' of a row in columns: did you mean 'prompt'"):
        DataConfig(train="a.jsonl", columns={"promt": "question"})
    for settings in ({"max_prompt_tokens": 0}, {"max_rows": 0}, {"eval_fraction": 1.0}, {"eval_fraction": -0.1}):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            DataConfig(train="a.jsonl", **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="give one of them"):
        DataConfig(train="a.jsonl", eval="b.jsonl", eval_fraction=0.1)
    with pytest.raises(ConfigError, match="train names none"):
        DataConfig(eval_fraction=0.1)
    with pytest.raises(ConfigError, match="there is no data"):
        open_data(DataConfig())
