"""A broken file is one ConfigError that names the file, the row and the column, and the nearest right name."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from agentgym.data import DataConfig, open_data
from agentgym.errors import ConfigError

Write = Callable[..., str]
GOOD = {"prompt": "q", "ground_truth": "a", "extra_info": {"index": 0}}
CALL = {"id": "c", "type": "function", "function": {"name": "add", "arguments": "{1}"}}


def refusal(path: str | Path, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        open_data(DataConfig(train=str(path), **settings))
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ({"ground_truth": "a", "promt": "q"}, "has no 'prompt', as other rows do: did you mean 'promt'?"),
        ({**GOOD, "prompt": 5}, "column 'prompt' is a list of messages or a text that is not empty, got int 5"),
        ({**GOOD, "prompt": " "}, "column 'prompt' is a list of messages or a text that is not empty, got str ' '"),
        ({**GOOD, "prompt": None}, "column 'prompt' is a list of messages or a text that is not empty, got null"),
        ({**GOOD, "prompt": []}, "column 'prompt' is a list of messages or a text that is not empty, got list []"),
        ({**GOOD, "prompt": ["q"]}, "column 'prompt': message 0 is an object with a role and a content, got str"),
        ({**GOOD, "prompt": [{"content": "q"}]}, "message 0.role is one of system, developer, user, assistant, tool"),
        ({**GOOD, "prompt": [{"role": "human", "content": "q"}]}, "message 0.role is one of"),
        ({**GOOD, "prompt": [{"role": "user", "content": 3}]}, "message 0.content is a list, got int"),
        ({**GOOD, "prompt": [{"role": "user", "content": ""}]}, "holds messages without text"),
        (
            {**GOOD, "prompt": [{"role": "user", "content": [{"type": "image_url"}]}]},
            "only text is supported",
        ),
        (
            {**GOOD, "prompt": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
            "column 'prompt' ends with the assistant's own message",
        ),
        (
            {**GOOD, "prompt": [{"role": "assistant", "content": "", "tool_calls": [CALL]}]},
            "message 0 has a tool call that cannot be read: the arguments are invalid JSON",
        ),
        ({**GOOD, "ground_truth": None}, "column 'ground_truth' is null, and line 1 has a ground truth"),
        ({**GOOD, "ground_truth": float("inf")}, "column 'ground_truth' holds an infinite number"),
        ({**GOOD, "extra_info": "easy"}, "column 'extra_info' is a mapping, got str 'easy'"),
        ({**GOOD, "data_source": 7}, "column 'data_source' is a text, got int 7"),
        ({**GOOD, "agent_name": "tool_agent"}, "column 'agent_name': 'tool_agent' names no environment"),
        ({**GOOD, "images": ["a.png"]}, "column 'images' holds media; only text is supported"),
        ([GOOD], "is a JSON object with columns, got list"),
    ],
    ids=str,
)
def test_a_row_that_is_wrong_is_named_with_its_column(row: Any, words: str, jsonl: Write) -> None:
    path = jsonl(*[GOOD] * 16, row, GOOD)
    message = refusal(path)
    assert message.startswith(f"{path}, line 17") and words in message


def test_a_parquet_row_is_named_from_zero(tmp_path: Path) -> None:
    rows = [{"question": "q"}] * 17 + [{"question": None}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    assert refusal(tmp_path / "a.parquet").startswith(f"{tmp_path / 'a.parquet'}, row 17: column 'question' is a list")


@pytest.mark.parametrize(
    ("columns", "settings", "words"),
    [
        (("quesion", "answer"), {}, ": did you mean 'quesion'? It has quesion, answer; columns prompt=NAME"),
        (("text", "label"), {}, "no column for the prompt (prompt, messages, question). It has text, label; columns"),
        (("prompt", "label"), {"columns": {"ground_truth": "lable"}}, "'lable' for ground_truth: did you mean 'label'"),
        (("prompt", "label"), {"keep": ("lable",)}, "no column 'lable' to keep: did you mean 'label'? It has prompt"),
        (("prompt", "reward_model"), {}, "column 'reward_model' is a mapping with 'ground_truth', got str 'x'"),
    ],
)
def test_a_column_that_is_not_there_is_named_with_the_nearest(
    columns: tuple[str, ...], settings: dict[str, Any], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({name: ["x"] for name in columns}), path)
    message = refusal(path, **settings)
    assert message.startswith(str(path)) and words in message


def test_a_key_that_is_not_there_is_named_with_the_nearest(jsonl: Write) -> None:
    path = jsonl({"prompt": "q", "reward_model": {"style": "rule", "ground_thruth": "4"}})
    assert "line 1: column 'reward_model' has no 'ground_truth': did you mean 'ground_thruth'?" in refusal(path)


def test_parquet_files_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([GOOD] * 5000), path)
    whole = path.read_bytes()

    def found(content: bytes) -> str:
        path.write_bytes(content)
        return refusal(path)

    assert found(b"").endswith("is empty (0 bytes)")
    assert "is not a parquet file: it begins with b'{\"pr'; it looks like JSON" in found(json.dumps(GOOD).encode())
    assert "is not a parquet file: it begins with b'a,b\\n'" in found(b"a,b\n1,2\n")
    for size in (4, 7, 100, len(whole) // 2, len(whole) - 1):
        assert "is cut off: a parquet file ends with b'PAR1'" in found(whole[:size])
    assert "cannot be read as a parquet file" in found(whole[: len(whole) // 2] + b"PAR1")
    assert "cannot be read as a parquet file" in found(b"PAR1" + bytes(len(whole)) + whole[-2000:])
    pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), path)
    assert refusal(path).endswith("has the columns prompt and no rows")


def test_json_files_that_are_none(tmp_path: Path) -> None:
    def found(content: bytes, name: str = "a.jsonl") -> str:
        (tmp_path / name).write_bytes(content)
        return refusal(tmp_path / name)

    line = json.dumps(GOOD).encode()
    assert "is empty; a JSON object on each line" in found(b"")
    assert "is empty; a JSON object on each line" in found(b"\n \n")
    assert "is an empty list" in found(b"[]", "a.json")
    message = found(line + b"\n" + line[:-20])
    assert "a.jsonl, line 2 is not JSON: Unterminated string" in message and ", at column " in message
    assert message.count("line 2") == 1 and "line 1" not in message
    assert "the file may be cut off" in found(line + b"\n" + line[:-20])
    assert "cut off" not in found(line[:-20] + b"\n" + line + b"\n")
    assert "is not JSON: Expecting" in found(b"[" + line, "a.json")
    assert "a.json, row 1 is a JSON object with columns, got int 3" in found(b"[" + line + b", 3]", "a.json")
    assert "is not UTF-8 text: invalid start byte at byte 0" in found(b"\xff\xfe\x00")
    assert "gzip stream has no end" in found(gzip.compress(line)[:-10], "a.jsonl.gz")
    assert "cannot be read: Not a gzipped file" in found(line, "a.jsonl.gz")


def test_a_generators_row_without_columns_is_named(tmp_path: Path) -> None:
    (tmp_path / "rows.py").write_text("def rows():\n    yield {}\n")
    assert "row 0 has no columns; prompt, messages, question was wanted" in refusal(f"{tmp_path / 'rows.py'}:rows")


def test_a_column_that_is_kept_does_not_hide_another(jsonl: Write) -> None:
    assert "extra_info has one of that name" in refusal(jsonl({**GOOD, "index": 4}), keep=("index",))
