"""A registry is a mapping whose look-up error teaches, and which never replaces an entry by accident."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentgym.errors import ConfigError, UnknownName
from agentgym.registry import Registry


def colours(hint: str = "") -> Registry[int]:
    registry = Registry[int]("colour", hint)
    registry.add("red", 1)
    registry.add("blue", 2)
    return registry


def test_a_registry_is_a_mapping_in_order_of_registration() -> None:
    registry = colours()
    assert dict(registry) == {"red": 1, "blue": 2}
    assert list(registry) == ["red", "blue"]
    assert len(registry) == 2
    assert "red" in registry
    assert "green" not in registry
    assert registry.get("green") is None


def test_an_unknown_name_is_answered_with_the_nearest_and_all_names() -> None:
    with pytest.raises(UnknownName) as caught:
        colours()["rad"]
    assert str(caught.value) == "unknown colour 'rad': did you mean 'red'? Known: blue, red."


def test_an_unknown_name_is_answered_with_the_hint_where_there_is_one() -> None:
    with pytest.raises(UnknownName) as caught:
        colours("`paint list` shows all.")["zzzz"]
    assert str(caught.value) == "unknown colour 'zzzz'. `paint list` shows all."


def test_an_empty_registry_is_reported_as_empty() -> None:
    with pytest.raises(UnknownName, match="Known: none"):
        Registry[int]("colour")["red"]


def test_a_taken_name_is_refused_unless_replaced_on_purpose() -> None:
    registry = colours()
    with pytest.raises(ConfigError, match="colour 'red' is already registered"):
        registry.add("red", 3)
    assert registry["red"] == 1
    registry.add("red", 3, replace=True)
    assert registry["red"] == 3


def test_the_same_entry_may_be_registered_again() -> None:
    registry = Registry[object]("part")
    part = object()
    assert registry.add("a", part) is part
    assert registry.add("a", part) is part


def test_register_decorates_and_gives_the_decorated_back() -> None:
    registry = Registry[type]("class")

    @registry.register("thing")
    class Thing:
        pass

    assert registry["thing"] is Thing


def check_length(name: str, entry: object) -> None:
    if len(str(entry)) > 9:
        raise ConfigError(f"{name!r} is longer than 9 letters")


def test_an_open_registry_finds_what_stands_in_a_file_and_does_not_list_it(tmp_path: Path) -> None:
    path = tmp_path / "words.py"
    path.write_text("short = 'brief'\nlong = 'everlasting'\n")
    words = Registry[str]("word", check=check_length)
    assert words[f"{path}:short"] == "brief"
    assert list(words) == []
    with pytest.raises(ConfigError, match="longer than 9 letters"):
        words[f"{path}:long"]
    with pytest.raises(UnknownName, match="has no word 'shart'"):
        words[f"{path}:shart"]
    with pytest.raises(ConfigError, match=r"'words\.py' names no word"):
        words["words.py"]


def test_what_the_check_refuses_is_not_registered() -> None:
    words = Registry[str]("word", check=check_length)
    with pytest.raises(ConfigError, match="longer than 9 letters"):
        words.add("forever", "everlasting")
    assert "forever" not in words


def test_a_registry_without_a_check_takes_names_alone() -> None:
    with pytest.raises(UnknownName, match=r"unknown colour 'words\.py:short'"):
        colours()["words.py:short"]
