"""GSM8K, laid out as verl's preprocessing lays it out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from agentgym.types import Message

HERE = Path(__file__).parent
SHARED = HERE.parents[2] / "shared" / "data" / "tasks" / "gsm8k"
INSTRUCTION = 'Let\'s think step by step and output the final answer after "####".'
Row = Mapping[str, Any]


@pytest.fixture(autouse=True)
def cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the datasets library caches goes with the test."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")


@pytest.fixture(scope="session")
def verl_20() -> Path:
    """The first 20 rows of GSM8K's training set, in a file that `datasets` wrote in verl's layout."""
    return HERE / "gsm8k" / "verl_20.parquet"


@pytest.fixture(scope="session")
def gsm8k() -> Callable[[str], list[Row]]:
    """All rows of GSM8K's `train` or `test`, in verl's layout; a last line that is cut is left out."""
    if not SHARED.is_dir():
        pytest.skip(f"GSM8K is not beside this checkout ({SHARED})")

    def read(split: str) -> list[Row]:
        lines = (SHARED / f"{split}.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
        return [verl_row(json.loads(line), split, index) for index, line in enumerate(lines) if line.endswith("\n")]

    return read


def verl_row(example: Mapping[str, str], split: str, index: int) -> Row:
    """One row as verl's examples/data_preprocess/gsm8k.py makes it: its five columns, in its order."""
    match = re.search(r"#### (-?[0-9.,]+)", example["answer"])
    assert match is not None
    return {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{example['question']} {INSTRUCTION}"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": match.group(1).replace(",", "")},
        "extra_info": {"split": split, "index": index, **example},
    }


@pytest.fixture(scope="session")
def words() -> Callable[[Sequence[Message]], int]:
    """Counts words, for whoever asks for tokens."""
    return lambda messages: sum(len(message.content.split()) for message in messages)


@pytest.fixture
def jsonl(tmp_path: Path) -> Callable[..., str]:
    """Writes rows as JSON lines and gives the path."""

    def write(*rows: Any, name: str = "rows.jsonl") -> str:
        path = tmp_path / name
        path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
        return str(path)

    return write


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty folder that is the current one."""
    monkeypatch.chdir(tmp_path)
    yield tmp_path
