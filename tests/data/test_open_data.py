"""Files to tasks, with nothing lost in silence: lengths, held-out tasks, and GSM8K as verl has it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from agentgym.data import DataConfig, open_data
from agentgym.errors import ConfigError, RenderError
from agentgym.types import Message, Task

Write = Callable[..., str]
Count = Callable[[Sequence[Message]], int]
Rows = Callable[[str], list[Mapping[str, Any]]]


def prompts(tasks: Sequence[Task]) -> list[str]:
    return [task.options["messages"][-1]["content"] for task in tasks]  # type: ignore[index, call-overload]


def test_what_is_too_long_is_dropped_and_said(jsonl: Write, words: Count) -> None:
    rows = [{"prompt": "word " * n, "extra_info": {"index": 100 + n}} for n in (3, 9, 5, 8, 4, 7, 6)]
    path = jsonl(*rows)
    data = open_data(DataConfig(train=path, max_prompt_tokens=5), words)
    assert [len(text.split()) for text in prompts(data.train)] == [3, 5, 4]
    assert data.report[-1] == (
        "train: dropped 4 of 7 rows whose prompt is longer than 5 tokens; the longest has 9: "
        f"{path}, line 2, index 109 (9); {path}, line 4, index 108 (8); {path}, line 6, index 107 (7) and 1 more"
    )
    assert len(open_data(DataConfig(train=path, max_prompt_tokens=9), words).report) == 1


def test_dropping_everything_is_refused(jsonl: Write, words: Count) -> None:
    path = jsonl({"prompt": "a b c"}, {"prompt": "a b c d"})
    with pytest.raises(ConfigError, match=r"all 2 prompts are longer.*the shortest has 3, the longest 4"):
        open_data(DataConfig(train=path, max_prompt_tokens=2), words)
    with pytest.raises(ConfigError, match="needs a tokenizer"):
        open_data(DataConfig(train=path, max_prompt_tokens=2))


def test_a_prompt_that_cannot_be_rendered_is_named(jsonl: Write) -> None:
    def count(messages: Sequence[Message]) -> int:
        raise RenderError("two users in a row")

    with pytest.raises(ConfigError, match="line 1: the prompt cannot be rendered: two users in a row"):
        open_data(DataConfig(train=jsonl({"prompt": "a"}), max_prompt_tokens=2), count)


def test_held_out_prompts_are_on_one_side_whatever_their_spelling(jsonl: Write) -> None:
    texts = [f"What is {n} and {n}?" for n in range(400)]
    spelled = [
        *({"prompt": text} for text in texts),
        *({"prompt": f"  {text.upper()}\n"} for text in texts),
        *({"prompt": [{"role": "system", "content": "Think."}, {"role": "user", "content": text}]} for text in texts),
    ]
    data = open_data(DataConfig(train=jsonl(*spelled), eval_fraction=0.25))
    sides = [{" ".join(text.upper().split()) for text in prompts(side)} for side in (data.train, data.eval)]
    assert not sides[0] & sides[1]
    assert len(data.train) + len(data.eval) == 1200 and len(data.eval) == 3 * len(sides[1])
    assert 0.18 < len(data.eval) / 1200 < 0.32
    assert "train: 800 of 1200 rows repeat the prompt of another one, and are kept" in data.report
    assert data.report[-1] == f"eval_fraction 0.25: {len(data.train)} tasks train, {len(data.eval)} evaluate"


def test_a_file_that_grows_or_is_shuffled_moves_no_prompt_to_the_other_side(jsonl: Write) -> None:
    rows = [{"prompt": f"question {n}"} for n in range(300)]
    mixed = random.Random(0).sample([*rows, *({"prompt": f"more {n}"} for n in range(300))], 600)
    few = open_data(DataConfig(train=jsonl(*rows), eval_fraction=0.1))
    many = open_data(DataConfig(train=jsonl(*mixed, name="more.jsonl"), eval_fraction=0.1))
    assert set(prompts(few.train)) <= set(prompts(many.train))
    assert set(prompts(few.eval)) <= set(prompts(many.eval))


def test_a_small_file_has_a_prompt_on_each_side(jsonl: Write) -> None:
    for fraction in (0.001, 0.999):
        data = open_data(
            DataConfig(train=jsonl({"prompt": "a"}, {"prompt": "b"}, {"prompt": "A"}), eval_fraction=fraction)
        )
        assert {text.lower() for text in prompts(data.train)} != {text.lower() for text in prompts(data.eval)}
        assert data.train and data.eval
    with pytest.raises(ConfigError, match="needs at least 2 different prompts, got 1 in 2 rows"):
        open_data(DataConfig(train=jsonl({"prompt": "a"}, {"prompt": "A"}), eval_fraction=0.5))


def test_prompts_on_both_sides_are_refused_or_dropped_from_one(jsonl: Write) -> None:
    train = jsonl({"prompt": "one"}, {"prompt": "Two"}, {"prompt": "two "}, {"prompt": "three"}, name="train.jsonl")
    held_out = jsonl({"prompt": "two"}, {"prompt": "four"}, name="eval.jsonl")
    with pytest.raises(ConfigError, match=r"share 1 prompts, such as that of .*eval\.jsonl, line 1: .*overlap drop"):
        open_data(DataConfig(train=train, eval=held_out))
    data = open_data(DataConfig(train=train, eval=held_out, overlap="drop-train"))
    assert (prompts(data.train), prompts(data.eval)) == (["one", "three"], ["two", "four"])
    assert data.report[-1] == "dropped 2 of 4 train rows: their 1 prompts are on both sides"
    data = open_data(DataConfig(train=train, eval=held_out, overlap="drop-eval"))
    assert (len(data.train), prompts(data.eval)) == (4, ["four"])
    with pytest.raises(ConfigError, match="share all 3 prompts of eval: nothing would be left"):
        open_data(DataConfig(train=train, eval=train, overlap="drop-eval"))


def test_several_files_and_environments_come_together(jsonl: Write) -> None:
    first = jsonl({"prompt": "a"}, name="a.jsonl")
    second = jsonl({"prompt": [{"role": "user", "content": "b"}], "agent_name": "b.py:B"}, name="b.jsonl")
    data = open_data(DataConfig(train=(first, second), eval=jsonl({"prompt": "c"}, name="c.jsonl")))
    assert (prompts(data.train), prompts(data.eval)) == (["a", "b"], ["c"])
    assert data.env_ids == ("Prompt-v0", "b.py:B")
    assert [line.partition(" (")[0] for line in data.report] == [
        f"train: 1 tasks from {first}",
        f"train: 1 tasks from {second}",
        f"eval: 1 tasks from {jsonl({'prompt': 'c'}, name='c.jsonl')}",
    ]


def test_only_held_out_tasks_are_read_where_there_is_no_training(verl_20: Path) -> None:
    data = open_data(DataConfig(eval=str(verl_20)))
    assert (len(data.train), len(data.eval)) == (0, 20)


def test_a_file_that_verl_wrote_is_read_as_it_is(verl_20: Path) -> None:
    data = open_data(DataConfig(train=str(verl_20)))
    assert len(data.train) == 20
    first = data.train[0]
    question = "How many clips did Natalia sell altogether in April and May?"
    instruction = 'Let\'s think step by step and output the final answer after "####".'
    (text,) = prompts([first])
    assert text.startswith("Natalia sold clips to 48") and text.endswith(f"{question} {instruction}")
    assert first.options["ground_truth"] == "72"
    assert first.options["data_source"] == "openai/gsm8k"
    extra = first.options["extra_info"]
    assert isinstance(extra, dict) and (extra["index"], extra["split"]) == (0, "train")
    assert extra["answer"].endswith("#### 72")
    assert "not read: ability" in data.report[0]


@pytest.mark.long
def test_all_of_gsm8k_is_read_from_parquet_and_does_not_leak(gsm8k: Rows, tmp_path: Path) -> None:
    for split in ("train", "test"):
        rows = gsm8k(split)
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / f"{split}.parquet")
        data = open_data(DataConfig(train=str(tmp_path / f"{split}.parquet")))
        assert [task.options["ground_truth"] for task in data.train] == [
            row["reward_model"]["ground_truth"] for row in rows
        ]
        assert prompts(data.train) == [row["prompt"][0]["content"] for row in rows]
        assert [task.options["extra_info"] for task in data.train] == [row["extra_info"] for row in rows]
    whole = open_data(DataConfig(train=str(tmp_path / "train.parquet"), eval=str(tmp_path / "test.parquet")))
    assert len(whole.train) >= 7472 and len(whole.eval) == 1319
