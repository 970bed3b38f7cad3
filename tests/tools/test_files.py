"""The tools to edit files: what they show and change, and that no path leads out of the episode's folder."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.envs import Action, ToolEnv
from agentgym.errors import ConfigError, EnvironmentFault, ToolFailure
from agentgym.tools.files import FileTools
from agentgym.tools.scratch import Scratch
from agentgym.types import Message, ToolCall

SECRET = "the secret outside"


class Desk(ToolEnv):
    """A place to write."""

    def start(self, options: dict[str, Any]) -> str:
        return "Write."

    def ask(self, name: str, **arguments: Any) -> tuple[str, str | None]:
        call = ToolCall("c0", name, arguments)
        info = self.step(Action.from_message(Message("assistant", "", tool_calls=(call,))))[-1]
        (result,) = info["tool_results"]
        return result.content, result.error


@pytest.fixture
def desk() -> Iterator[Callable[..., tuple[Desk, FileTools]]]:
    opened: list[Desk] = []

    def make(**settings: Any) -> tuple[Desk, FileTools]:
        sources: list[FileTools] = []

        def source() -> FileTools:
            sources.append(FileTools(**settings))
            return sources[-1]

        env = Desk(tool_sources=[source])
        opened.append(env)
        env.reset(seed=0)
        return env, sources[-1]

    yield make
    for env in opened:
        env.close()


# ---- editing


def test_a_file_is_written_shown_changed_and_listed(desk: Callable[..., Any]) -> None:
    env, source = desk(files={"readme.txt": "one\ntwo\n"})
    assert env.ask("view", path="readme.txt") == ("     1\tone\n     2\ttwo", None)
    assert env.ask("create", path="src/main.py", text="a = 1\nb = 2\nc = 3\n") == (
        "src/main.py is written: 3 lines",
        None,
    )
    assert env.ask("str_replace", path="src/main.py", old="b = 2", new="b = 20") == (
        "src/main.py is changed:\n     1\ta = 1\n     2\tb = 20\n     3\tc = 3",
        None,
    )
    assert env.ask("insert", path="src/main.py", after_line=0, text="# first")[1] is None
    assert env.ask("insert", path="src/main.py", after_line=4, text="d = 4\ne = 5\n")[1] is None
    assert env.ask("view", path="src/main.py", first_line=4, last_line=5)[0] == "     4\tc = 3\n     5\td = 4"
    assert source.read("src/main.py") == "# first\na = 1\nb = 20\nc = 3\nd = 4\ne = 5\n"
    assert env.ask("list")[0] == "readme.txt (8 bytes)\nsrc/\nsrc/main.py (39 bytes)"
    assert env.ask("list", path="src")[0] == "main.py (39 bytes)"


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("view", {"path": "b.txt"}, "there is no 'b.txt'"),
        ("view", {"path": "a.txt", "first_line": 3}, "has lines 1 to 2; 3 to 2 were asked for"),
        ("view", {"path": "folder"}, "'folder' is a folder"),
        ("view", {"path": "a.txt/b"}, "leads through what is no folder"),
        ("view", {"path": ""}, "names no file"),
        ("create", {"path": "a.txt", "text": ""}, "exists already"),
        ("create", {"path": "folder", "text": ""}, "is a folder"),
        ("create", {"path": "x" * 300, "text": ""}, "at most 255 bytes"),
        ("create", {"path": "a/" * 40 + "b", "text": ""}, "at most 16 parts"),
        ("create", {"path": "big", "text": "x" * 2000}, "a file may have 1000"),
        ("create", {"path": "\ud800", "text": ""}, "no file name can have"),
        ("str_replace", {"path": "a.txt", "old": "one", "new": "1"}, "occurs 2 times"),
        ("str_replace", {"path": "a.txt", "old": "three", "new": "3"}, "does not occur"),
        ("str_replace", {"path": "a.txt", "old": "", "new": "3"}, "is empty"),
        ("insert", {"path": "a.txt", "after_line": 3, "text": "x"}, "has 2 lines, so no line 3"),
        ("list", {"path": "nowhere"}, "there is no 'nowhere'"),
        ("list", {"path": "a.txt"}, "leads through what is no folder"),
    ],
)
def test_what_cannot_be_done_is_an_error_and_changes_nothing(
    name: str, arguments: dict[str, Any], message: str, desk: Callable[..., Any]
) -> None:
    env, source = desk(files={"a.txt": "one\none\n", "folder/in.txt": "x"}, max_file_bytes=1000)
    before = env.ask("list")
    text, error = env.ask(name, **arguments)
    assert error == "tool_error" and message in text and source.folder not in text
    assert env.ask("list") == before and source.read("a.txt") == "one\none\n"


def test_a_binary_file_is_told(desk: Callable[..., Any]) -> None:
    env, source = desk()
    for name, content in (("x.png", b"\x89PNG\xff"), ("nul", b"a\0b")):
        (Path(source.folder) / name).write_bytes(content)
        answer = env.ask("view", path=name)
        assert answer == (f"{name!r} is a binary file of {len(content)} bytes, and no text", "tool_error")


def test_the_folder_is_an_episode_s_and_goes_with_it(desk: Callable[..., Any]) -> None:
    env, first = desk()
    env.ask("create", path="a/b", text="x")
    folder = Path(first.folder)
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700 and (folder / "a" / "b").read_text() == "x"
    env.reset(seed=0)
    assert not folder.exists() and env.ask("list") == ("(nothing is there)", None)
    env.close()
    assert first.folder == ""


def test_files_together_have_limits(desk: Callable[..., Any]) -> None:
    env, _ = desk(max_total_bytes=100, max_files=3)
    assert env.ask("create", path="a", text="x" * 90)[1] is None
    assert "no room: all files together may have 100 bytes" in env.ask("create", path="b", text="x" * 20)[0]
    assert env.ask("str_replace", path="a", old="x" * 90, new="x")[1] is None
    assert env.ask("create", path="f/b", text="x" * 20)[1] is None
    assert "no room" in env.ask("create", path="c", text="")[0]
    assert "no room" in env.ask("create", path="g/h/i", text="")[0]
    assert env.ask("list")[0].splitlines() == ["a (1 bytes)", "f/", "f/b (20 bytes)"]


@pytest.mark.parametrize("settings", [{"max_file_bytes": 0}, {"max_total_bytes": 0}, {"max_files": 0}])
def test_limits_are_positive(settings: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be at least 1"):
        FileTools(**settings)


def test_files_to_begin_with_that_do_not_fit_are_the_author_s_mistake() -> None:
    source = FileTools(files={"../x": ""})
    with pytest.raises(ConfigError, match=r"cannot begin with the file '../x'"):
        source.open()
    source.close()


# ---- machines that fail


@contextlib.contextmanager
def limited(name: int, soft: int) -> Iterator[None]:
    """A limit of this process, as a machine has them."""
    before, hard = resource.getrlimit(name)
    resource.setrlimit(name, (soft, hard))
    try:
        yield
    finally:
        resource.setrlimit(name, (before, hard))


def test_a_machine_with_no_more_open_files_is_no_mistake_of_the_model_s(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # other processes use that of the system
    scratch = Scratch(1000, 10_000, 50)
    scratch.write("a/b", b"x", new=True)
    acts = (partial(scratch.read, "a/b"), partial(scratch.write, "a/c", b"x", new=True), partial(scratch.names, "a"))
    before = sorted(os.listdir(Path(scratch.folder).parent))
    with limited(resource.RLIMIT_NOFILE, 0):
        for act in acts:
            with pytest.raises(EnvironmentFault, match="cannot be used: Too many open files"):
                act()
        with pytest.raises(OSError, match="Too many open files"):
            Scratch(1000, 10_000, 50)
    assert sorted(os.listdir(Path(scratch.folder).parent)) == before and scratch.names("a") == ["b (1 bytes)"]
    scratch.close()


def test_what_could_not_be_written_to_its_end_leaves_nothing() -> None:
    scratch = Scratch(1000, 10_000, 50)
    scratch.write("a", b"before", new=True)
    with limited(resource.RLIMIT_FSIZE, 10), pytest.raises(EnvironmentFault, match="File too large"):
        scratch.write("a", b"x" * 500, new=False)
    assert scratch.read("a") == b"before" and scratch.names("") == ["a (6 bytes)"]
    scratch.close()


# ---- attacks


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    (tmp_path / "secret.txt").write_text(SECRET)
    return tmp_path


@pytest.mark.parametrize(
    "path",
    [
        "/etc/passwd",
        "//etc/passwd",
        "../secret.txt",
        "a/../../secret.txt",
        "./.././secret.txt",
        "a/..",
        "..",
        "secret.txt\0.png",
        "~/.ssh/id_rsa",
        "file:///etc/passwd",
        "..\\secret.txt",
        "%2e%2e/secret.txt",
        "/proc/self/environ",
        "/dev/stdin",
    ],
)
@pytest.mark.parametrize("name", ["view", "str_replace", "insert", "create", "list"])
def test_no_path_leads_out(
    name: str, path: str, desk: Callable[..., Any], outside: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # what other processes put beside it is not there
    env, source = desk(files={"a/b": "x"})
    rest = {
        "view": {},
        "list": {},
        "create": {"text": "owned"},
        "insert": {"after_line": 0, "text": "owned"},
        "str_replace": {"old": "e", "new": "owned"},
    }[name]
    before = sorted(os.listdir(Path(source.folder).parent))
    text, error = env.ask(name, path=path, **rest)
    assert SECRET not in text and "root:" not in text
    inside = name == "create" and not path.startswith("/") and ".." not in path.split("/") and "\0" not in path
    assert (error is None) == inside  # odd names are names: they are made inside
    assert sorted(os.listdir(Path(source.folder).parent)) == before
    assert (outside / "secret.txt").read_text() == SECRET


def test_links_are_not_followed_wherever_they_stand(desk: Callable[..., Any], outside: Path) -> None:
    env, source = desk(files={"a": "x"})
    folder = Path(source.folder)
    (folder / "file").symlink_to(outside / "secret.txt")
    (folder / "folder").symlink_to(outside)
    (folder / "up").symlink_to("..")
    (folder / "dangling").symlink_to(outside / "made.txt")
    for path in ("file", "folder/secret.txt", f"up/{outside.name}/secret.txt", "dangling"):
        assert env.ask("view", path=path)[1] == "tool_error"
        assert env.ask("create", path=path, text="owned")[1] == "tool_error"
        assert env.ask("str_replace", path=path, old="secret", new="owned")[1] == "tool_error"
    assert env.ask("create", path="folder/new.txt", text="owned")[1] == "tool_error"
    assert env.ask("list", path="folder")[1] == "tool_error"
    assert SECRET not in env.ask("list")[0]
    assert sorted(os.listdir(outside)) == ["secret.txt"] and (outside / "secret.txt").read_text() == SECRET
    env.close()
    assert (outside / "secret.txt").read_text() == SECRET  # removing the folder removes links, not what they lead to


def test_pipes_and_devices_are_no_files(desk: Callable[..., Any]) -> None:
    env, source = desk()
    os.mkfifo(Path(source.folder) / "pipe")  # opening it for reading would wait for ever
    assert env.ask("view", path="pipe") == ("'pipe' is no plain file", "tool_error")
    assert env.ask("create", path="pipe", text="x")[1] == "tool_error"


def test_a_file_that_grew_too_large_is_not_read(desk: Callable[..., Any]) -> None:
    env, source = desk(max_file_bytes=1000)
    with (Path(source.folder) / "sparse").open("wb") as file:
        file.truncate(1 << 40)
    assert "a file may have 1000" in env.ask("view", path="sparse")[0]


def test_a_folder_that_becomes_a_link_meanwhile_leads_nowhere(outside: Path) -> None:
    scratch = Scratch(1000, 100_000, 100)
    place = Path(scratch.folder) / "d"
    over = threading.Event()

    def swap() -> None:
        while not over.is_set():
            with contextlib.suppress(OSError):  # the other side makes the folder too
                shutil.rmtree(place, ignore_errors=True)
                place.symlink_to(outside)
            if place.is_symlink():
                place.unlink()

    swapping = threading.Thread(target=swap)
    swapping.start()
    try:
        for _ in range(1000):
            for act in (partial(scratch.write, "d/secret.txt", b"owned", new=False), partial(scratch.names, "d")):
                try:
                    act()
                except ToolFailure:
                    continue
    finally:
        over.set()
        swapping.join()
        scratch.close()
    assert (outside / "secret.txt").read_text() == SECRET


@pytest.mark.long
@settings(max_examples=150)
@given(path=st.text(max_size=30) | st.lists(st.sampled_from(["..", ".", "", "a", "/", "b"])).map("/".join))
def test_any_path_gets_an_answer_and_stays_inside(path: str) -> None:
    with tempfile.TemporaryDirectory() as parent, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", parent)  # where nobody else writes
        scratch = Scratch(1000, 10_000, 50)
        assert os.listdir(parent) == [Path(scratch.folder).name]
        try:
            scratch.write(path, b"x", new=True)
            assert scratch.read(path) == b"x"
        except ToolFailure:
            pass
        written = [name for _, _, files in os.walk(scratch.folder) for name in files]
        assert len(written) <= 1
        assert os.listdir(parent) == [Path(scratch.folder).name]
        scratch.close()
        assert os.listdir(parent) == []
