"""Worlds of the text game: rooms, doors, keys, containers, a treasure; made from a seed, solvable by construction."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from agentgym.errors import ConfigError

__all__ = [
    "DIRECTIONS",
    "LEVELS",
    "Exit",
    "GameContainer",
    "QuestLevel",
    "TextGameWorld",
    "make_text_game_world",
    "path_between",
]

DIRECTIONS: Mapping[str, tuple[int, int]] = {"north": (0, 1), "east": (1, 0), "south": (0, -1), "west": (-1, 0)}
OPPOSITE = {"north": "south", "south": "north", "east": "west", "west": "east"}
COLOURS = ("red", "blue", "green", "white", "black", "yellow", "purple", "brown")
ROOMS = tuple(
    "hall kitchen library cellar attic garden tower chapel stable pantry study bedroom forge armoury crypt gallery"
    " workshop nursery parlour office vault balcony courtyard barn".split()
)
TREASURES = tuple(
    "crown ring goblet sceptre mirror harp pearl ruby compass medal locket statue amulet lantern flute mask scroll"
    " dagger bracelet coin chalice emerald brooch clock".split()
)


@dataclass(frozen=True, kw_only=True)
class QuestLevel:
    """The requirements of a difficulty level; each level adds to the one before."""

    rooms: tuple[int, int]
    """The fewest and the most rooms."""
    decoys: int
    """The number of cursed things: taking one ends the quest."""
    chest: bool = False
    """The treasure lies in a locked chest; its key lies elsewhere."""
    box: bool = False
    """The chest's key lies in a closed box."""
    door: bool = False
    """The chest is behind a locked door with a key of its own."""
    mapped: bool = True
    """Exits show what was seen beyond them; without this the player has to remember."""
    bring_back: bool = False
    """The treasure has to be brought back to the first room."""


LEVELS: Mapping[int, QuestLevel] = {
    1: QuestLevel(rooms=(3, 4), decoys=2),
    2: QuestLevel(rooms=(4, 6), decoys=3, chest=True),
    3: QuestLevel(rooms=(5, 7), decoys=4, chest=True, box=True),
    4: QuestLevel(rooms=(6, 8), decoys=5, chest=True, box=True, door=True),
    5: QuestLevel(rooms=(8, 12), decoys=6, chest=True, box=True, door=True, mapped=False, bring_back=True),
}


@dataclass(frozen=True, slots=True)
class Exit:
    """A way out of a room; `door` is the colour of its locked door, or None."""

    to: str
    door: str | None = None


@dataclass(frozen=True, slots=True)
class GameContainer:
    """A chest (locked, of a colour) or a box (closed), and the one thing in it."""

    name: str
    content: str
    locked: bool


@dataclass(frozen=True)
class TextGameWorld:
    """One quest. Room names are unique; `items` are what lies open in a room at the start."""

    level: QuestLevel
    start: str
    exits: Mapping[str, Mapping[str, Exit]]
    items: Mapping[str, tuple[str, ...]]
    containers: Mapping[str, tuple[GameContainer, ...]]
    treasure: str
    chest: str | None
    door: str | None
    needed: frozenset[str] = field(default_factory=frozenset)
    """Things that are not cursed: the treasure and the keys."""

    @property
    def quest(self) -> str:
        """The goal as the first observation states it: the treasure, what locks it away, where to bring it."""
        items = ", ".join(item for item in (self.chest, self.door) if item)
        where = f" ({items})" if items else ""
        back = f", back to {self.start}" if self.level.bring_back else ""
        return f"Quest: {self.treasure}{where}{back}"

    @property
    def max_turns(self) -> int:
        """Enough to explore everything, come back for the chest and act; little more."""
        rooms = len(self.exits)
        longest = 2 * (rooms - 1)
        errands = 1 + 2 * bool(self.chest) + self.level.box + 2 * bool(self.door)
        trips = int(self.level.chest) + int(self.level.door) + int(self.level.bring_back)
        return longest + errands + trips * (rooms - 1) + 1


def make_text_game_world(rng: np.random.Generator, level: int) -> TextGameWorld:
    """Draws a world of the level; raises ConfigError for a level that does not exist."""
    if level not in LEVELS:
        raise ConfigError(f"TextGame has no level {level!r}; levels are {min(LEVELS)} to {max(LEVELS)}")
    spec = LEVELS[level]
    plan = _draw_rooms(rng, int(rng.integers(spec.rooms[0], spec.rooms[1] + 1)))
    start = next(iter(plan))
    names = [str(name) for name in rng.permutation(TREASURES)]
    colours = [str(colour) for colour in rng.permutation(COLOURS)]
    treasure, decoys = names[0], names[1 : 1 + spec.decoys - spec.chest]
    items: dict[str, list[str]] = {room: [] for room in plan}
    containers: dict[str, list[GameContainer]] = {room: [] for room in plan}
    inner = _close_a_door(rng, plan, colours[1]) if spec.door else set(plan) - {start}
    outer = [room for room in plan if not spec.door or room not in inner]
    goal_room = _choice(rng, sorted(inner))
    key = f"{colours[0]} key"
    if spec.chest:
        containers[goal_room].append(GameContainer(f"{colours[0]} chest", treasure, locked=True))
        key_room = _choice(rng, [room for room in plan if room != goal_room])
        if spec.box:
            containers[key_room].append(GameContainer("box", key, locked=False))
        else:
            items[key_room].append(key)
        decoys.append(f"{colours[2]} key")
    else:
        items[goal_room].append(treasure)
    if spec.door:
        items[_choice(rng, outer)].append(f"{colours[1]} key")
    for decoy in decoys:
        items[_choice(rng, list(plan))].append(decoy)
    return TextGameWorld(
        level=spec,
        start=start,
        exits=plan,
        items={room: tuple(str(thing) for thing in rng.permutation(things)) for room, things in items.items()},
        containers={room: tuple(things) for room, things in containers.items()},
        treasure=treasure,
        chest=f"{colours[0]} chest" if spec.chest else None,
        door=f"{colours[1]} door" if spec.door else None,
        needed=frozenset({treasure, *([key] if spec.chest else []), *([f"{colours[1]} key"] if spec.door else [])}),
    )


def _choice(rng: np.random.Generator, things: list[str]) -> str:
    return things[int(rng.integers(len(things)))]


def _draw_rooms(rng: np.random.Generator, num_rooms: int) -> dict[str, dict[str, Exit]]:
    """A random tree of rooms on a grid; the first room is the start."""
    names = [str(name) for name in rng.permutation(ROOMS)[:num_rooms]]
    name_at = {(0, 0): names[0]}
    plan: dict[str, dict[str, Exit]] = {names[0]: {}}
    for name in names[1:]:
        free = [
            (x, y, direction)
            for (x, y) in name_at
            for direction, (dx, dy) in DIRECTIONS.items()
            if (x + dx, y + dy) not in name_at
        ]
        x, y, direction = free[int(rng.integers(len(free)))]
        dx, dy = DIRECTIONS[direction]
        name_at[x + dx, y + dy] = name
        plan[name] = {OPPOSITE[direction]: Exit(name_at[x, y])}
        plan[name_at[x, y]][direction] = Exit(name)
    return {room: {way: exits[way] for way in DIRECTIONS if way in exits} for room, exits in plan.items()}


def _close_a_door(rng: np.random.Generator, plan: dict[str, dict[str, Exit]], colour: str) -> set[str]:
    """Locks one passage that leads away from the start; returns the rooms behind it."""
    rooms = list(plan)  # in the order they were added: a passage leads from a room to a later one
    options = [
        (room, way) for room in rooms for way, out in plan[room].items() if rooms.index(out.to) > rooms.index(room)
    ]
    room, way = options[int(rng.integers(len(options)))]
    beyond = plan[room][way].to
    plan[room][way] = Exit(beyond, colour)
    plan[beyond][OPPOSITE[way]] = Exit(room, colour)
    behind, queue = {beyond}, deque([beyond])
    while queue:
        for out in plan[queue.popleft()].values():
            if out.to not in behind and out.to != room:
                behind.add(out.to)
                queue.append(out.to)
    return behind


def path_between(exits: Mapping[str, Mapping[str, str]], start: str, goals: set[str]) -> list[str] | None:
    """The directions of a shortest way from `start` to the nearest of `goals` over `exits[room][direction] = room`."""
    queue: deque[tuple[str, list[str]]] = deque([(start, [])])
    seen = {start}
    while queue:
        room, path = queue.popleft()
        if room in goals:
            return path
        for way, to in exits.get(room, {}).items():
            if to not in seen:
                seen.add(to)
                queue.append((to, [*path, way]))
    return None
