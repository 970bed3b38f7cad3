"""Text files of a user may begin with a byte order mark, as editors of Windows write one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from agentgym.chat_templates.named_templates import read_template
from agentgym.chat_templates.template_folder import chat_folder
from agentgym.cli.foreign.trl_file import read_trl
from agentgym.cli.foreign.verl_file import read_verl
from agentgym.cli.options import read_mapping
from agentgym.cli.sandbox import _read
from agentgym.embedded import EMBEDDED
from agentgym.evaluation.play.replies_file import prompt_rows
from agentgym.rewards.judge.config import JudgeConfig
from agentgym.testing.fake_server.model import FakeModel
from agentgym.testing.fake_server.script import FileScript


def prompts(path: Path) -> object:
    return [row.messages for row in prompt_rows((str(path),), {})]


READERS: dict[str, tuple[str, Callable[[Path], object]]] = {
    "run.yaml": ("env: TextGame-v0\n", read_mapping),
    "prompts.jsonl": (json.dumps({"prompt": "Hello"}) + "\n", prompts),
    "template.jinja": (
        "{{ messages[0].content }}",
        lambda path: (chat_folder(EMBEDDED, str(path)) / "chat_template.jinja").read_text(encoding="utf-8"),
    ),
    "base.jinja": ("{{ messages[0].content }}", lambda path: read_template(str(path))),
    "program.py": ("print(1)\n", _read),
    "verl.yaml": ("data:\n  train_batch_size: 8\n", lambda path: read_verl(path, ())),
    "verl.sh": ("python3 -m verl.trainer.main_ppo data.train_batch_size=8\n", lambda path: read_verl(path, ())),
    "trl.py": ("from trl import GRPOConfig\nc = GRPOConfig(beta=0.1)\n", lambda path: read_trl(path, (), None)),
    "script.jsonl": ("[5, 9]\n", lambda path: FileScript(path, FakeModel()).replies),
    "rubric.yaml": ("clear: Is it clear?\n", lambda path: JudgeConfig(url="http://a", rubric=str(path)).criteria()),
    "question.txt": ("Score {reply}.", lambda path: JudgeConfig(url="http://a", template=str(path)).question()),
}


@pytest.mark.parametrize("name", READERS)
def test_a_byte_order_mark_is_no_part_of_a_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    text, reader = READERS[name]
    contents = []
    for encoding in ("utf-8", "utf-8-sig"):
        (tmp_path / name).write_text(text, encoding=encoding)
        contents.append(reader(tmp_path / name))
    assert contents[0] == contents[1]
