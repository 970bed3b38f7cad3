"""The moves of a careful player of the text game: one rule at a time, from what was seen and nothing else."""

from __future__ import annotations

import numpy as np

from agentgym.envs.games.text_game.rules import Play

__all__ = ["GameCall", "explore", "stumble"]

GameCall = tuple[str, dict[str, str]]


def explore(play: Play, rng: np.random.Generator | None = None) -> GameCall:
    """The next call of a player who always wins in time; `rng` picks among equal unexplored ways (else the first)."""
    world, here = play.world, play.room
    if world.treasure in play.bag:
        return _walk(play, {world.start})
    for item in (world.treasure, *sorted(world.needed)):
        if item in play.items[here]:
            return "take", {"item": item}
    for name, arguments in play.possible():
        if name in ("open", "use"):
            return name, arguments
    errands = {room for room in play.visited if room != here and _worth_going(play, room)}
    if errands and play.path_to(errands):
        return _walk(play, errands)
    ways = play.unexplored_ways(here)
    if ways:
        return "go", {"direction": ways[int(rng.integers(len(ways)))] if rng else ways[0]}
    return _walk(play, {room for room in play.visited if play.unexplored_ways(room)})


def _worth_going(play: Play, room: str) -> bool:
    """True if something in a known room can be done now with what is held."""
    if any(item in play.world.needed for item in play.items[room]):
        return True
    if any(not c.locked or f"{c.name.split()[0]} key" in play.bag for c in play.closed[room]):
        return True
    doors = [out.door for out in play.world.exits[room].values() if (room, out.to) in play.locked_doors]
    return any(f"{door} key" in play.bag for door in doors)


def _walk(play: Play, goals: set[str]) -> GameCall:
    path = play.path_to(goals)
    return ("go", {"direction": path[0]}) if path else ("look", {})


def stumble(play: Play, rng: np.random.Generator) -> GameCall:
    """The call of a careless player, which does something and need not help."""
    calls = play.possible()
    return calls[int(rng.integers(len(calls)))]
