"""The space of all text, alone and in vector environments."""

from __future__ import annotations

import copy

import pytest
from gymnasium.vector.utils import create_shared_memory, read_from_shared_memory, write_to_shared_memory
from hypothesis import given
from hypothesis import strategies as st

from agentgym.envs import Text
from agentgym.errors import ConfigError, EnvironmentFault


@given(st.text())
def test_every_text_is_in_the_space_and_survives_json_and_shared_memory(text: str) -> None:
    space = Text()
    assert text in space
    assert space.from_jsonable(space.to_jsonable([text])) == [text]
    shared = create_shared_memory(space, n=2)
    write_to_shared_memory(space, 1, text, shared)
    texts = read_from_shared_memory(space, shared, n=2)
    assert tuple(texts) == ("", text)
    write_to_shared_memory(space, 0, "later", shared)
    assert copy.deepcopy(texts) == ("later", text)


def test_a_surrogate_survives_shared_memory() -> None:
    shared = create_shared_memory(Text(), n=1)
    write_to_shared_memory(Text(), 0, "\ud800", shared)
    assert read_from_shared_memory(Text(), shared, n=1)[0] == "\ud800"


def test_a_length_limit_holds() -> None:
    space = Text(3, seed=0)
    assert "日本語" in space
    assert "four" not in space
    assert 3 not in space
    assert all(space.sample() in space for _ in range(50))
    with pytest.raises(ConfigError, match="at least 1"):
        Text(0)


def test_samples_follow_the_seed() -> None:
    first, second = Text(seed=1), Text(seed=1)
    assert [first.sample() for _ in range(5)] == [second.sample() for _ in range(5)]
    with pytest.raises(ConfigError, match="mask"):
        first.sample(mask=1)


def test_spaces_are_equal_when_their_limits_are() -> None:
    assert Text() == copy.deepcopy(Text())
    assert Text(3) != Text()


def test_a_text_too_long_for_shared_memory_is_refused_with_the_way_out() -> None:
    shared = create_shared_memory(Text(), n=1)
    with pytest.raises(EnvironmentFault, match="shared_memory=False"):
        write_to_shared_memory(Text(), 0, "x" * 300_000, shared)
