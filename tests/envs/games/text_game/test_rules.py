"""The rules of the text game: what can be done, what is shown and hidden, and what the player knows."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import pytest

from agentgym.envs.games.text_game.explorer import GameCall, explore, stumble
from agentgym.envs.games.text_game.rules import Play
from agentgym.envs.games.text_game.world import LEVELS, Exit, GameContainer, TextGameWorld, make_text_game_world

ALL_LEVELS = pytest.mark.parametrize("level", LEVELS)


def turns_of(level: int, seed: int, *, careless: float = 0.5) -> Iterator[tuple[Play, GameCall]]:
    """A play before each of its calls (one object, seen as it changes); a share of the calls is careless."""
    game, rng = Play(make_text_game_world(np.random.default_rng(seed), level)), np.random.default_rng(seed)
    for _ in range(game.world.max_turns):
        name, arguments = stumble(game, rng) if rng.random() < careless else explore(game)
        yield game, (name, arguments)
        if name != "look":
            getattr(game, name)(**arguments)
        if game.over:
            return


@pytest.fixture
def small() -> Play:
    """Attic (coin, green key, red key in a box) - hall (blue key) =blue door= cellar (crown in a red chest)."""
    exits = {
        "hall": {"north": Exit("attic"), "east": Exit("cellar", "blue")},
        "attic": {"south": Exit("hall")},
        "cellar": {"west": Exit("hall", "blue")},
    }
    return Play(
        TextGameWorld(
            level=LEVELS[4],
            start="hall",
            exits=exits,
            items={"hall": ("blue key",), "attic": ("coin", "green key"), "cellar": ()},
            containers={
                "hall": (),
                "attic": (GameContainer("box", "red key", locked=False),),
                "cellar": (GameContainer("red chest", "crown", locked=True),),
            },
            treasure="crown",
            chest="red chest",
            door="blue door",
            needed=frozenset({"crown", "red key", "blue key"}),
        )
    )


# ---- the rules


def test_a_quest_from_beginning_to_end(small: Play) -> None:
    answers = [
        small.take("blue key"),
        small.go("north"),
        small.open("box"),
        small.take("red key"),
        small.go("south"),
        small.use("blue key", "blue door"),
        small.go("east"),
        small.use("red key", "red chest"),
        small.take("crown"),
    ]
    assert answers == ["Taken.", "", "Opened.", "Taken.", "", "Opened.", "", "Opened.", "Taken."]
    assert small.is_won and small.over and not small.lost
    assert len(small.milestones) == 6


@pytest.mark.parametrize(
    ("do", "answer"),
    [
        (lambda game: game.go("west"), "There is no exit west."),
        (lambda game: game.go("east"), "The blue door is locked."),
        (lambda game: game.open("blue door"), "The blue door is locked."),
        (lambda game: game.take("crown"), "There is no crown here to take."),
        (lambda game: game.take("Blue key"), "There is no Blue key here to take."),
        (lambda game: game.open("box"), "There is no closed box here."),
        (lambda game: game.use("blue key", "blue door"), "You do not have a blue key."),
        (
            lambda game: (game.take("blue key"), game.use("blue key", "red chest"))[1],
            "There is no locked red chest here.",
        ),
        (lambda game: (game.take("blue key"), game.use("blue key", ""))[1], "There is no locked  here."),
    ],
)
def test_what_cannot_be_done_is_said_and_changes_nothing(do: Callable[[Play], str], answer: str, small: Play) -> None:
    assert do(small) == answer
    assert small.room == "hall"
    assert not small.over
    assert small.milestones <= {"take blue key"}


def test_a_key_opens_only_what_has_its_colour(small: Play) -> None:
    small.go("north")
    small.open("box")
    small.take("red key")
    small.go("south")
    assert small.use("red key", "blue door") == "The red key does not fit the blue door."
    small.take("blue key")
    small.use("blue key", "blue door")
    small.go("east")
    assert small.open("red chest") == "The red chest is locked."
    assert small.use("blue key", "red chest") == "The blue key does not fit the red chest."
    assert small.use("red key", "blue door") == "There is no locked blue door here."


def test_a_box_opens_once_and_needs_no_key(small: Play) -> None:
    small.take("blue key")
    small.go("north")
    assert small.use("blue key", "box") == "There is no locked box here."
    assert small.take("red key") == "There is no red key here to take."
    assert small.open("box") == "Opened."
    assert small.open("box") == "There is no closed box here."
    assert small.items["attic"] == ["red key", "coin", "green key"]


@pytest.mark.parametrize("cursed", ["coin", "green key"])
def test_a_cursed_thing_loses(cursed: str, small: Play) -> None:
    small.go("north")
    assert small.take(cursed) == f"The {cursed} is cursed. You lose."
    assert small.lost and small.over and not small.is_won


def test_a_treasure_that_has_to_be_brought_back_wins_at_the_start_only(small: Play) -> None:
    game = Play(replace(small.world, level=LEVELS[5]))
    answers = []
    while not game.over:
        name, arguments = explore(game)
        answers.append(getattr(game, name)(**arguments))
        if "crown" in game.bag:
            assert game.is_won == (game.room == "hall")
    assert game.is_won
    assert answers[-2:] == ["Taken.", ""]


# ---- what is shown and what is not


def test_the_map_tells_what_was_seen_behind_an_exit(small: Play) -> None:
    assert small.describe() == "Room: hall\nExits: north: ?, east: blue door (locked)\nHere: blue key"
    small.take("blue key")
    small.go("north")
    expected = "Room: attic\nExits: south: hall (back, door)\nHere: box (closed), coin, green key\nBag: blue key"
    assert small.describe() == expected
    small.go("south")
    assert "north: attic (box), east: blue door (locked)" in small.describe()
    small.use("blue key", "blue door")
    assert "east: ?" in small.describe()
    small.go("east")
    assert small.describe().splitlines()[1:3] == ["Exits: west: hall (back, box)", "Here: red chest (locked)"]


def test_without_a_map_exits_tell_only_the_way_back(small: Play) -> None:
    game = Play(replace(small.world, level=LEVELS[5]))
    game.go("north")
    assert "Exits: south: hall (back)\n" in game.describe()
    game.go("south")
    assert "Exits: north: attic, east: blue door (locked)\n" in game.describe()


@ALL_LEVELS
def test_nothing_unseen_is_told(level: int) -> None:
    words = re.compile(r"[a-z]+ key|[a-z]+")
    for seed in range(60):
        for game, _ in turns_of(level, seed):
            hidden = {container.content for room in game.closed for container in game.closed[room]}
            for room in set(game.world.exits) - set(game.visited):
                hidden |= {room, *game.items[room]}
            assert not hidden & set(words.findall(game.describe()))
            assert set(game.known) == set(game.uses) == set(game.visited)
            assert {to for ways in game.known.values() for to in ways.values()} <= set(game.visited)


@ALL_LEVELS
def test_neither_words_nor_the_oracle_depend_on_what_was_not_seen(level: int) -> None:
    for seed in range(60):
        for game, call in turns_of(level, seed, careless=0.0):
            text, items, closed = game.describe(), game.items, game.closed
            game.items = {room: things if room in game.visited else [] for room, things in items.items()}
            game.closed = {room: things if room in game.visited else [] for room, things in closed.items()}
            assert game.describe() == text
            assert explore(game) == call
            game.items, game.closed = items, closed


@ALL_LEVELS
def test_what_is_known_is_kept_up_to_date_at_every_turn(level: int) -> None:
    """Against the definition: what a fresh look at all visited rooms would give."""
    for seed in range(60):
        for game, _ in turns_of(level, seed):
            for room in game.visited:
                exits = game.world.exits[room]
                closed = {way for way, out in exits.items() if (room, out.to) in game.locked_doors}
                assert list(game.known[room].items()) == [
                    (way, out.to) for way, out in exits.items() if out.to in game.visited and way not in closed
                ]
                assert game.unexplored_ways(room) == [
                    way for way, out in exits.items() if out.to not in game.visited and way not in closed
                ]
                assert ("?" in game.uses[room]) == bool(game.unexplored_ways(room))
                assert ("door" in game.uses[room]) == bool(closed)
                assert {"box", "chest"} & set(game.uses[room]) == {c.name.split()[-1] for c in game.closed[room]}
                useful = game.world.needed & set(game.items[room])
                assert game.uses[room].count("key") == sum(thing.endswith(" key") for thing in useful)
                assert (game.world.treasure in game.uses[room]) == (game.world.treasure in useful)


@ALL_LEVELS
def test_every_possible_call_does_something(level: int) -> None:
    for seed in range(60):
        for game, _ in turns_of(level, seed):
            for name, arguments in game.possible():
                if name == "go":
                    out = game.world.exits[game.room][arguments["direction"]]
                    assert (game.room, out.to) not in game.locked_doors
                elif name == "take":
                    assert arguments["item"] in game.items[game.room]
                elif name == "use":
                    assert arguments["item"] in game.bag
