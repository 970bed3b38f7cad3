"""The rules of the text game: what a player does, sees and knows. Pure Python, no Gymnasium."""

from __future__ import annotations

from agentgym.envs.games.text_game.world import GameContainer, TextGameWorld, path_between

__all__ = ["Play"]


class Play:
    """One play of a world. Each action method returns one sentence for the player; `describe` returns what is in sight.

    The player knows the visited rooms only, and `known` and `uses` hold nothing else. Passages form a tree and one is
    closed only until it is first walked, so the way back from a visited room is always the same.
    """

    known: dict[str, dict[str, str]]
    """The ways between visited rooms: `known[room][direction] = room`."""
    uses: dict[str, list[str]]
    """The things of use in a visited room: `?` (a way not walked), `key`, `box`, `chest`, `door`, the treasure."""

    def __init__(self, world: TextGameWorld) -> None:
        self.world = world
        self.room = world.start
        self.bag: list[str] = []
        self.items = {room: list(things) for room, things in world.items.items()}
        self.closed = {room: list(things) for room, things in world.containers.items()}
        self.locked_doors = {
            (room, out.to) for room, exits in world.exits.items() for out in exits.values() if out.door
        }
        self.visited = {world.start: 0}
        self.milestones: set[str] = set()
        self.lost = False
        self.known, self.uses = {}, {}
        self._way_back = {world.start: ""}
        self._learn(world.start)

    @property
    def is_won(self) -> bool:
        """True if the treasure is held (and, if the level asks for it, brought back)."""
        return self.world.treasure in self.bag and (not self.world.level.bring_back or self.room == self.world.start)

    @property
    def over(self) -> bool:
        """True if the quest has ended."""
        return self.is_won or self.lost

    # What a player does

    def go(self, direction: str) -> str:
        """Walks through an exit that is there and not locked."""
        out = self.world.exits[self.room].get(direction)
        if out is None:
            return f"There is no exit {direction}."
        if (self.room, out.to) in self.locked_doors:
            return f"The {out.door} door is locked."
        left, self.room = self.room, out.to
        if self.room not in self.visited:
            self.visited[self.room] = len(self.visited)
            self._learn(left)
            self._learn(self.room)
            self._way_back[self.room] = next(iter(self.known[self.room]))
        return ""

    def take(self, item: str) -> str:
        """Takes a thing in sight; a cursed one ends the quest."""
        if item not in self.items[self.room]:
            return f"There is no {item} here to take."
        self.items[self.room].remove(item)
        self.bag.append(item)
        self._learn(self.room)
        if item not in self.world.needed:
            self.lost = True
            return f"The {item} is cursed. You lose."
        self.milestones.add(f"take {item}")
        return "Taken."

    def open(self, target: str) -> str:
        """Opens a closed container that is not locked."""
        container = self._closed_here(target)
        if container is None:
            locked = target in self._locked_doors_here()
            return f"The {target} is locked." if locked else f"There is no closed {target} here."
        if container.locked:
            return f"The {target} is locked."
        return self._open(container)

    def use(self, item: str, target: str) -> str:
        """Uses a key that is held on a locked chest or door of its colour."""
        if item not in self.bag:
            return f"You do not have a {item}."
        container, doors = self._closed_here(target), self._locked_doors_here()
        if target not in doors and (container is None or not container.locked):
            return f"There is no locked {target} here."
        if item != f"{target.split()[0]} key":
            return f"The {item} does not fit the {target}."
        if container is not None:
            return self._open(container)
        self.locked_doors -= {(self.room, doors[target]), (doors[target], self.room)}
        self._learn(self.room)
        self.milestones.add(f"open {target}")
        return "Opened."

    # What a player sees

    def describe(self) -> str:
        """The room, its exits, what is here, what is held; one line each."""
        lines = [f"Room: {self.room}", f"Exits: {', '.join(self._exit_labels())}"]
        if here := [*(self._label(c) for c in self.closed[self.room]), *self.items[self.room]]:
            lines.append(f"Here: {', '.join(here)}")
        if self.bag:
            lines.append(f"Bag: {', '.join(self.bag)}")
        return "\n".join(lines)

    @staticmethod
    def _label(container: GameContainer) -> str:
        return f"{container.name} ({'locked' if container.locked else 'closed'})"

    def _exit_labels(self) -> list[str]:
        labels = []
        for way, out in self.world.exits[self.room].items():
            if (self.room, out.to) in self.locked_doors:
                labels.append(f"{way}: {out.door} door (locked)")
            elif out.to not in self.visited:
                labels.append(f"{way}: ?")
            else:
                notes = ["back"] if way == self._way_back[self.room] else []
                notes += sorted(self._beyond(out.to, self.room)) if self.world.level.mapped else []
                labels.append(f"{way}: {out.to}" + (f" ({', '.join(notes)})" if notes else ""))
        return labels

    def _beyond(self, room: str, entered_from: str) -> set[str]:
        """The things that were seen and are still of use in a room and beyond it."""
        notes = set(self.uses[room])
        for to in self.known[room].values():
            if to != entered_from:
                notes |= self._beyond(to, room)
        return notes

    # What a player knows

    def unexplored_ways(self, room: str) -> list[str]:
        """The directions of unlocked ways that were never walked."""
        exits = self.world.exits[room].items()
        return [way for way, out in exits if out.to not in self.visited and (room, out.to) not in self.locked_doors]

    def path_to(self, goals: set[str]) -> list[str] | None:
        """The directions of a shortest known way to the nearest goal room, `[]` when there, None when there is none."""
        return path_between(self.known, self.room, goals)

    def possible(self) -> list[tuple[str, dict[str, str]]]:
        """Every call that does something here, as (tool name, arguments)."""
        calls: list[tuple[str, dict[str, str]]] = [("look", {})]
        exits = self.world.exits[self.room].items()
        closed = self.closed[self.room]
        locked = [*self._locked_doors_here(), *(container.name for container in closed if container.locked)]
        calls += [("go", {"direction": way}) for way, out in exits if (self.room, out.to) not in self.locked_doors]
        calls += [("take", {"item": item}) for item in self.items[self.room]]
        calls += [("open", {"target": container.name}) for container in closed if not container.locked]
        calls += [
            ("use", {"item": item, "target": target})
            for item in self.bag
            for target in locked
            if item == f"{target.split()[0]} key"
        ]
        return calls

    def _learn(self, room: str) -> None:
        """Brings `known` and `uses` up to date for a visited room, after something about it has changed."""
        exits = self.world.exits[room].items()
        self.known[room] = {way: out.to for way, out in exits if out.to in self.visited}
        uses = ["?"] if self.unexplored_ways(room) else []
        needed = [thing for thing in self.items[room] if thing in self.world.needed]
        uses += ["key" if thing.endswith(" key") else thing for thing in needed]
        uses += [container.name.split()[-1] for container in self.closed[room]]
        uses += ["door"] if any((room, out.to) in self.locked_doors for _, out in exits) else []
        self.uses[room] = uses

    # Rules

    def _locked_doors_here(self) -> dict[str, str]:
        """Maps the name of a locked door of this room to the room behind it."""
        if not self.locked_doors:
            return {}
        exits = self.world.exits[self.room].values()
        return {f"{out.door} door": out.to for out in exits if (self.room, out.to) in self.locked_doors}

    def _closed_here(self, target: str) -> GameContainer | None:
        return next((container for container in self.closed[self.room] if container.name == target), None)

    def _open(self, container: GameContainer) -> str:
        self.closed[self.room].remove(container)
        self.items[self.room].insert(0, container.content)
        self._learn(self.room)
        self.milestones.add(f"open {container.name}")
        return "Opened."
