"""The same rows give the same tasks, whichever kind of file they stand in."""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from agentgym.data import DataConfig, open_data
from agentgym.errors import ConfigError, EnvironmentFault, RunFolderError, UnknownName
from agentgym.types import Task

ROWS: list[Mapping[str, Any]] = [
    {
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"What is {n} + 1?"}],
        "data_source": "sums",
        "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
        "extra_info": {"index": n, "split": "train", "levels": [1, n]},
    }
    for n in range(5)
]
GENERATORS = """
import numpy
from agentgym.types import Task

ROWS = {rows!r}

def dicts():
    for row in ROWS:
        yield dict(row, extra_info=dict(row["extra_info"], index=numpy.int64(row["extra_info"]["index"])))

def tasks():
    yield Task("TextGame-v0", 3, kwargs=dict(level=1))
    yield ROWS[0]

def without_end():
    while True:
        yield from ROWS

def breaks():
    yield ROWS[0]
    yield {{}}["question"]

def number():
    return 5

def words():
    yield "a question"

def nothing():
    return iter(())
"""


def tasks_of(*names: str, **settings: Any) -> tuple[Task, ...]:
    return open_data(DataConfig(train=names, **settings)).train


def expected() -> list[Task]:
    """The tasks of ROWS, made by hand but for their seeds."""
    return [
        Task(
            "Prompt-v0",
            0,
            {
                "messages": row["prompt"],
                "ground_truth": row["reward_model"]["ground_truth"],
                "data_source": "sums",
                "extra_info": row["extra_info"],
            },
        )
        for row in ROWS
    ]


def write_parquet(path: Path, rows: list[Mapping[str, Any]] = ROWS, **settings: Any) -> str:
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, **settings)
    return str(path)


def write_json(path: Path) -> str:
    path.write_text(json.dumps(ROWS, indent=1), encoding="utf-8")
    return str(path)


def write_lines(path: Path) -> str:
    text = "\ufeff" + "\n\n".join(json.dumps(row) for row in ROWS)
    path.write_bytes(gzip.compress(text.encode()) if path.suffix == ".gz" else text.encode())
    return str(path)


def save_dataset(path: Path) -> str:
    import datasets  # here, and not above: collected by every process, and costly

    datasets.Dataset.from_list(ROWS).save_to_disk(path)
    return str(path)


def save_splits(path: Path) -> str:
    import datasets  # here, and not above: collected by every process, and costly

    whole = datasets.Dataset.from_list(ROWS)
    datasets.DatasetDict({"train": whole, "test": whole.select([0])}).save_to_disk(path)
    return f"{path}:train"


def write_data_folder(path: Path) -> str:
    (path / "data").mkdir(parents=True)
    write_parquet(path / "data" / "train-00000-of-00001.parquet")
    write_parquet(path / "data" / "test-00000-of-00001.parquet", ROWS[:2])
    return f"{path}:default:train"


def write_generator(path: Path) -> str:
    path.write_text(GENERATORS.format(rows=ROWS), encoding="utf-8")
    return f"{path}:dicts"


def write_shards(path: Path) -> str:
    path.mkdir()
    write_parquet(path / "b.parquet", ROWS[3:])
    write_parquet(path / "a.parquet", ROWS[:3])
    return f"{path}/*.parquet"


KINDS: dict[str, Callable[[Path], str]] = {
    "a.parquet": write_parquet,
    "a.json": write_json,
    "lines.json": write_lines,
    "a.jsonl": write_lines,
    "a.jsonl.gz": write_lines,
    "saved": save_dataset,
    "splits": save_splits,
    "folder": write_data_folder,
    "rows.py": write_generator,
    "shards": write_shards,
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_file_gives_the_same_tasks(kind: str, tmp_path: Path) -> None:
    name = KINDS[kind](tmp_path / kind)
    tasks = tasks_of(name)
    assert [task.options for task in tasks] == [task.options for task in expected()]
    assert {task.env_id for task in tasks} == {"Prompt-v0"}
    assert [task.seed for task in tasks] == [task.seed for task in tasks_of(write_parquet(tmp_path / "again.parquet"))]
    assert len({task.seed for task in tasks}) == len(tasks)
    assert all(0 <= task.seed < 10**9 for task in tasks)
    assert [Task(**json.loads(json.dumps(vars_of(task)))) for task in tasks] == list(tasks), "a task is JSON"


def vars_of(task: Task) -> dict[str, Any]:
    return {"env_id": task.env_id, "seed": task.seed, "options": task.options, "kwargs": task.kwargs}


def test_the_order_of_files_and_rows_changes_no_task(tmp_path: Path) -> None:
    forth = tasks_of(write_parquet(tmp_path / "a.parquet", ROWS[:2]), write_parquet(tmp_path / "b.parquet", ROWS[2:]))
    back = tasks_of(write_parquet(tmp_path / "c.parquet", ROWS[::-1]))
    assert list(forth) == list(back)[::-1]


def test_many_batches_of_a_file_come_in_order(tmp_path: Path) -> None:
    rows = [{"question": f"q{n}", "answer": str(n)} for n in range(5000)]
    path = write_parquet(tmp_path / "a.parquet", rows, row_group_size=700)
    assert [task.options["ground_truth"] for task in tasks_of(path)] == [str(n) for n in range(5000)]
    assert [task.options["ground_truth"] for task in tasks_of(path, max_rows=1500)] == [str(n) for n in range(1500)]


def test_a_generator_may_yield_tasks_and_have_no_end(tmp_path: Path) -> None:
    place = write_generator(tmp_path / "rows.py").removesuffix(":dicts")
    game, row = tasks_of(f"{place}:tasks")
    assert game == Task("TextGame-v0", 3, kwargs={"level": 1})
    assert row.options == expected()[0].options
    assert len(tasks_of(f"{place}:without_end", max_rows=12)) == 12
    assert [task.options for task in tasks_of(f"{place}:ROWS")] == [task.options for task in expected()]


def test_a_data_set_of_torch_gives_its_items(tmp_path: Path) -> None:
    code = "from torch.utils.data import Dataset\nclass Rows(Dataset):\n    def __len__(self): return 3\n"
    code += "    def __getitem__(self, index): return {'question': f'{index}?', 'answer': str(index)}\nrows = Rows()\n"
    (tmp_path / "rows.py").write_text(code)
    for name in ("Rows", "rows"):
        assert [task.options["ground_truth"] for task in tasks_of(f"{tmp_path / 'rows.py'}:{name}")] == ["0", "1", "2"]


def test_a_generator_is_found_in_a_module(in_folder: Path) -> None:
    write_generator(in_folder / "my_rows_of_data.py")
    assert len(tasks_of("my_rows_of_data:dicts")) == 5


def test_what_a_generator_raises_is_its_own_and_what_it_yields_is_checked(tmp_path: Path) -> None:
    place = write_generator(tmp_path / "rows.py").removesuffix(":dicts")
    with pytest.raises(EnvironmentFault, match=r"rows\.py:breaks raised after 1 rows: KeyError: 'question'") as caught:
        tasks_of(f"{place}:breaks")
    assert isinstance(caught.value.__cause__, KeyError)
    with pytest.raises(ConfigError, match=r"gives rows, dicts or Tasks.*got int 5"):
        tasks_of(f"{place}:number")
    with pytest.raises(ConfigError, match="row 0 is a dict or a Task, got str 'a question'"):
        tasks_of(f"{place}:words")
    with pytest.raises(ConfigError, match="yields no rows"):
        tasks_of(f"{place}:nothing")
    with pytest.raises(UnknownName, match="has no generator of rows 'dict': did you mean 'dicts'"):
        tasks_of(f"{place}:dict")


def test_a_split_is_named_where_there_are_several(tmp_path: Path) -> None:
    name = save_splits(tmp_path / "splits").removesuffix(":train")
    assert len(tasks_of(f"{name}:test")) == 1
    with pytest.raises(ConfigError, match=r"has the splits train, test; say which: .*splits:train"):
        tasks_of(name)
    with pytest.raises(ConfigError, match="has no split 'trian': did you mean 'train'"):
        tasks_of(f"{name}:trian")
    with pytest.raises(ConfigError, match="without splits: leave ':train' out"):
        tasks_of(f"{save_dataset(tmp_path / 'saved')}:train")
    with pytest.raises(ConfigError, match="NAME:CONFIG:SPLIT, got"):
        tasks_of(f"{name}:a:b:c")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("train.parqet", r"no data at 'train\.parqet': did you mean 'train\.parquet'\?"),
        ("trian.parquet", r"no file 'trian\.parquet': did you mean 'train\.parquet'\?"),
        ("nowhere/train.parquet", "no file.*there is no folder 'nowhere'"),
        ("*.jsonl", r"no file matches '\*\.jsonl'"),
        ("notes.txt", r"not a file of a known kind\. Data is a file \(\.parquet, \.jsonl"),
        ("gsm8k", r"no data at 'gsm8k'.*'path/to/file\.py:generator'"),
        ("empty", "the datasets library cannot load 'empty'"),
        ("~nobody.of-that-name.jsonl", "no file '~nobody"),
    ],
)
def test_a_name_that_leads_nowhere_is_a_taught_error(name: str, words: str, in_folder: Path) -> None:
    write_parquet(in_folder / "train.parquet")
    (in_folder / "notes.txt").write_text("hello")
    (in_folder / "empty").mkdir()
    with pytest.raises(ConfigError, match=words):
        tasks_of(name)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("rows.py:tasks", r"no file 'rows\.py'\. It is a function that yields a dict or a Task"),
        ("no_such_module:rows", "no module 'no_such_module' for the generator of rows"),
    ],
)
def test_code_that_is_not_there_is_a_taught_error(name: str, words: str, in_folder: Path) -> None:
    with pytest.raises(UnknownName, match=words):
        tasks_of(name)


def test_a_library_that_is_missing_is_named_with_what_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_parquet(tmp_path / "a.parquet")
    monkeypatch.delitem(sys.modules, "agentgym.data.parquet", raising=False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"needs the library pyarrow.*pip install .*\[data\]'"):
        tasks_of(path)


def test_files_at_an_address_are_fetched_once_and_again_when_they_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    remote = tmp_path / "bucket"
    (remote / "old").mkdir(parents=True)
    write_parquet(remote / "a.parquet", ROWS[:3])
    for name in ("b.jsonl", "c.jsonl", "old/d.jsonl"):
        (remote / name).write_text("".join(json.dumps(row) + "\n" for row in ROWS[3:]))
    address = f"file://{remote}"
    assert tasks_of(f"{address}/a.parquet", f"{address}/[bx].jsonl") == tasks_of(write_lines(tmp_path / "all.jsonl"))
    (copy,) = tmp_path.glob("cache/agentgym/data/*/a.parquet")
    before = copy.stat().st_ino
    assert len(tasks_of(f"{address}/a.parquet")) == 3 and copy.stat().st_ino == before
    (remote / "b.jsonl").write_text(json.dumps(ROWS[0]) + "\n{}\n")
    with pytest.raises(ConfigError, match=rf"{address}/b\.jsonl, line 2"):
        tasks_of(f"{address}/b.jsonl")


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("file:///nowhere/e*.jsonl", RunFolderError, r"no file 'file:///nowhere/e\*\.jsonl'"),
        ("file:///usr/bin", RunFolderError, "no file 'file:///usr/bin'"),
        ("nothing://bucket/a.parquet", ConfigError, "Protocol not known: nothing"),
    ],
)
def test_an_address_without_files_is_named(name: str, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        tasks_of(name)
