"""A chained file goes on from what it holds, whatever a kill or a resume left of it."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from agentgym.errors import RunFolderError
from agentgym.rollout.record.chain import GENESIS, ChainedFile, line_digest, split_line
from agentgym.rollout.record.folder_digests import (
    discard_digests,
    page_problem,
    page_with_digest,
    read_digests,
    write_digests,
)

TEXTS = [json.dumps({"step": step, "text": "x" * 100_000 if step == 2 else "é"}) for step in range(5)]


def whole(path: Path) -> bytes:
    """The file of all texts, written at once."""
    with ChainedFile(path) as file:
        file.append(TEXTS)
    return path.read_bytes()


def sound(data: bytes) -> bool:
    head = GENESIS
    for line in data.splitlines(keepends=True):
        body, digest = split_line(line)
        if digest != line_digest(head, body):
            return False
        head = digest
    return True


def test_each_line_is_json_with_the_digest_of_itself_and_of_the_line_before(tmp_path: Path) -> None:
    data = whole(tmp_path / "whole")
    assert sound(data)
    lines = data.splitlines()
    assert [{**json.loads(text), "chain": split_line(line)[1]} for text, line in zip(TEXTS, lines, strict=True)] == [
        json.loads(line) for line in lines
    ]
    assert not sound(b"\n".join([*lines[:2], *lines[3:]])) and not sound(data.replace(b'"step": 3', b'"step": 4'))


def test_a_file_that_was_closed_torn_or_cut_back_goes_on_as_if_it_were_not(tmp_path: Path) -> None:
    expected = whole(tmp_path / "whole")
    path = tmp_path / "parts"
    for text in TEXTS[:4]:
        with ChainedFile(path) as file:
            file.append([text])
    with path.open("ab") as torn:
        torn.write(b'{"step": 4, "te')
    with ChainedFile(path) as file:
        assert file.head == split_line(expected.splitlines()[3])[1]
        file.cut(len(b"".join(expected.splitlines(keepends=True)[:2])))
        file.append(TEXTS[2:])
    assert path.read_bytes() == expected
    with ChainedFile(path) as file:
        file.cut(0)
        assert file.head == GENESIS


def test_lines_without_digests_are_followed_by_a_chain_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "old"
    path.write_text(TEXTS[0] + "\n")
    with ChainedFile(path) as file:
        assert file.head == GENESIS
        file.append(TEXTS[1:])
    first, rest = path.read_bytes().split(b"\n", 1)
    assert first.decode() == TEXTS[0] and sound(rest)


def test_digests_of_a_run_are_refused_where_one_was_changed(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    assert read_digests(tmp_path) is None
    write_digests(tmp_path, {"episodes.jsonl": GENESIS}, ("config.yaml",))
    digests = read_digests(tmp_path)
    assert digests is not None and set(digests) == {"config.yaml", "episodes.jsonl", "run"}
    path = tmp_path / "digests.json"
    path.write_text(path.read_text().replace(GENESIS, "1" * 32))
    with pytest.raises(RunFolderError, match="not as it was written"):
        read_digests(tmp_path)
    discard_digests(tmp_path)
    assert read_digests(tmp_path) is None


def test_a_page_with_a_wrong_digest_is_refused_with_the_reason() -> None:
    page = page_with_digest("<html>é\r\n</html>\n").encode()
    assert page_problem(page) == ""
    assert page_problem(page.replace(b"\r", b"")) == "the page is not as it was written"
    assert page_problem(page[:-1]) == "the page is cut: it does not end with its digest"
    assert page_problem(b"<html></html>\n") is None


def test_a_record_with_a_second_name_leaves_that_as_it_was(tmp_path: Path) -> None:
    with ChainedFile(tmp_path / "metrics.jsonl") as file:
        file.append(['{"step":1}'])
    before = (tmp_path / "metrics.jsonl").read_bytes()
    os.link(tmp_path / "metrics.jsonl", tmp_path / "copy.jsonl")
    with ChainedFile(tmp_path / "copy.jsonl") as file:
        file.append(['{"step":2}'])
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert (tmp_path / "copy.jsonl").read_bytes().startswith(before)
