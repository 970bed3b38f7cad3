"""Keys that Arrow gave a row, as null, are in none of its parts; nulls that JSON holds are kept."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from agentgym.data import DataConfig, open_data
from agentgym.data.digest import data_digest, prompt_digest
from agentgym.data.parquet import open_parquet
from agentgym.data.rows import messages_of
from agentgym.errors import ConfigError
from agentgym.types import Task, ToolCall

Rows = list[dict[str, Any]]
Write = Callable[..., str]


def talk(name: str, arguments: Mapping[str, Any]) -> Rows:
    call = {"id": "c1", "type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "user", "content": "Plan my day."},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "done", "tool_call_id": "c1"},
        {"role": "user", "content": "And now?"},
    ]


def schema(name: str, properties: Mapping[str, Any]) -> dict[str, Any]:
    parameters = {"type": "object", "properties": properties, "required": []}
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


ROWS: Rows = [
    {
        "prompt": talk("weather", {"place": {"city": "Oslo"}, "days": [{"from": 1}]}),
        "tools": [schema("weather", {"place": {"type": "object", "properties": {"city": {"type": "string"}}}})],
        "reward_model": {"ground_truth": [{"name": "weather", "arguments": {"city": "Oslo"}}]},
        "extra_info": {"tools_kwargs": {"weather": {"create_kwargs": {"units": "C"}}}},
    },
    {
        "prompt": talk("timer", {"minutes": 5, "place": {"room": 3}, "days": [{"to": 2}, {"from": 3}]}),
        "tools": [schema("timer", {"minutes": {"type": "integer", "enum": [5, None]}}), schema("stop", {})],
        "reward_model": {"ground_truth": [{"name": "timer", "arguments": {"minutes": 5}}]},
        "extra_info": {"tools_kwargs": {"timer": {"create_kwargs": {"loud": True}}}},
    },
]


def write_parquet(folder: Path, rows: Rows) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "a.parquet")
    return str(folder / "a.parquet")


def save_dataset(folder: Path, rows: Rows) -> str:
    import datasets  # here, and not above: collected by every process, and costly

    datasets.Dataset.from_list(rows).save_to_disk(folder / "saved")
    return str(folder / "saved")


def write_folder(folder: Path, rows: Rows) -> str:
    (folder / "files").mkdir()
    return write_parquet(folder / "files", rows).rpartition("/")[0]


def write_generator(folder: Path, rows: Rows) -> str:
    code = "import datasets\n\ndef rows():\n    return datasets.load_from_disk({!r})\n"
    (folder / "rows.py").write_text(code.format(save_dataset(folder, rows)), encoding="utf-8")
    return f"{folder / 'rows.py'}:rows"


def write_stream(folder: Path, rows: Rows) -> str:
    code = "import datasets\n\nrows = datasets.load_from_disk({!r}).to_iterable_dataset()\n"
    (folder / "rows.py").write_text(code.format(save_dataset(folder, rows)), encoding="utf-8")
    return f"{folder / 'rows.py'}:rows"


ARROW = [write_parquet, save_dataset, write_folder, write_generator, pytest.param(write_stream, marks=pytest.mark.long)]


def tasks_of(path: str, **settings: Any) -> tuple[Task, ...]:
    return open_data(DataConfig(train=path, tools=("look",), **settings)).train


@pytest.mark.parametrize("write", ARROW)
def test_rows_of_every_format_of_arrow_are_those_of_json(write: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in ROWS), encoding="utf-8")
    expected, tasks = tasks_of(str(tmp_path / "a.jsonl")), tasks_of(write(tmp_path, ROWS))
    assert [task.options["tools"] for task in tasks] == [row["tools"] for row in ROWS]
    assert [messages_of(task) for task in tasks] == [messages_of(task) for task in expected]
    assert messages_of(tasks[0])[1].tool_calls[0] == ToolCall(
        "c1", "weather", {"place": {"city": "Oslo"}, "days": [{"from": 1}]}
    )
    assert [task.options for task in tasks] == [task.options for task in expected]
    assert data_digest(tasks, ordered=True) == data_digest(expected, ordered=True)
    assert list(map(prompt_digest, tasks)) == list(map(prompt_digest, expected))


def test_arguments_have_the_order_of_the_schema_in_parquet_and_of_the_row_in_json(tmp_path: Path, jsonl: Write) -> None:
    rows = [{"prompt": talk("add", arguments)} for arguments in ({"a": 1, "b": 2}, {"b": 1, "a": 2})]
    for path, order in ((write_parquet(tmp_path, rows), ["a", "b"]), (jsonl(*rows), ["b", "a"])):
        (call,) = messages_of(tasks_of(path)[1])[1].tool_calls
        assert isinstance(call, ToolCall) and list(call.arguments) == order


def test_a_map_of_arrow_is_an_object(tmp_path: Path) -> None:
    steps = pyarrow.map_(pyarrow.string(), pyarrow.struct({"n": pyarrow.int64(), "of": pyarrow.int64()}))
    schema = pyarrow.schema({"prompt": pyarrow.string(), "steps": steps})
    row = {"prompt": "Go.", "steps": {"a": {"n": 1}, "b": {"of": 2}}}
    table = pyarrow.Table.from_pylist([{**row, "steps": list(row["steps"].items())}], schema)
    pyarrow.parquet.write_table(table, tmp_path / "rows.parquet")
    ((_, cells),) = open_parquet(tmp_path / "rows.parquet").read(["prompt", "steps"])
    assert cells == row


def test_rows_that_python_yields_keep_their_nulls(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text(f"def rows():\n    yield {{'prompt': {talk('find', {'limit': None})!r}}}\n")
    (task,) = tasks_of(f"{tmp_path / 'rows.py'}:rows")
    assert messages_of(task)[1].tool_calls == (ToolCall("c1", "find", {"limit": None}),)


def test_a_digest_is_that_of_rows_with_the_keys_that_arrow_gave() -> None:
    filled = Task("Prompt-v0", 3, {"messages": talk("weather", {"city": "Oslo", "minutes": None})})
    plain = Task("Prompt-v0", 3, {"messages": talk("weather", {"city": "Oslo"})})
    assert data_digest([filled], ordered=True) == data_digest([plain], ordered=True)


def test_nulls_of_json_are_kept_in_arguments_and_schemas(jsonl: Write) -> None:
    arguments = {"query": "tea", "limit": None, "tags": ["a", None, {"b": None}]}
    tools = [schema("find", {"limit": {"type": ["integer", "null"], "default": None, "enum": [1, None]}})]
    (task,) = tasks_of(jsonl({"prompt": talk("find", arguments), "tools": tools}))
    assert messages_of(task)[1].tool_calls[0] == ToolCall("c1", "find", arguments)
    assert task.options["tools"] == tools


@pytest.mark.parametrize("as_parquet", [False, True])
def test_json_inside_of_arrow_keeps_its_nulls(as_parquet: bool, tmp_path: Path) -> None:
    import datasets  # here, and not above: collected by every process, and costly

    text = datasets.Value("string")
    call = {"id": text, "function": {"name": text, "arguments": datasets.Json()}}
    message = {"role": text, "content": text, "tool_calls": datasets.List(call), "tool_call_id": text}
    features = datasets.Features({"prompt": datasets.List(message)})
    prompts = [talk("find", {"limit": None})[:3], talk("timer", {"minutes": 5})[:3]]
    saved = datasets.Dataset.from_list([{"prompt": prompt} for prompt in prompts], features=features)
    path = tmp_path / ("a.parquet" if as_parquet else "saved")
    (saved.to_parquet if as_parquet else saved.save_to_disk)(path)
    arguments = [messages_of(task)[1].tool_calls[0].arguments for task in tasks_of(str(path))]  # type: ignore[union-attr]
    assert arguments == [{"limit": None}, {"minutes": 5}]


def test_a_column_inside_a_mapping_is_null_where_a_row_of_parquet_lacks_it(tmp_path: Path) -> None:
    labels = [{"right": {"answer": 1}}, {"right": {"hint": "x"}}, {"left": 2}]
    path = write_parquet(tmp_path, [{"question": "q", "label": label, "data_source": str(label)} for label in labels])
    tasks = tasks_of(path, columns={"ground_truth": "label.right.answer"})
    assert [task.options.get("ground_truth") for task in tasks] == [1, None, None]
    with pytest.raises(ConfigError, match=r"column 'label\.right' has no 'anser': did you mean 'answer'"):
        tasks_of(path, columns={"ground_truth": "label.right.anser"})


def test_keys_of_extra_info_are_columns_and_null_where_a_row_of_parquet_lacks_them(tmp_path: Path) -> None:
    rows = [{"prompt": "q", "extra_info": {"a": {"x": 1}}}, {"prompt": "r", "extra_info": {"a": {"y": 2}, "b": 3}}]
    tasks = tasks_of(write_parquet(tmp_path, rows))
    assert [task.options["extra_info"] for task in tasks] == [{"a": {"x": 1}, "b": None}, {"a": {"y": 2}, "b": 3}]
