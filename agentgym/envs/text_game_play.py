"""The rules of the text game: what a player does, sees and knows. Pure Python, no Gymnasium."""

from __future__ import annotations

from agentgym.envs.text_game_world import Container, World, path_between

__all__ = ["Play"]


class Play:
    """One play of a world. Each action method gives one sentence for the player; `describe` gives what is in sight.

    The player knows the visited rooms only; `known` never holds what was not seen.
    """

    def __init__(self, world: World) -> None:
        self.world = world
        self.room = world.start
        self.bag: list[str] = []
        self.items = {room: list(things) for room, things in world.items.items()}
        self.closed = {room: list(things) for room, things in world.containers.items()}
        self.locked_doors = {
            frozenset((room, out.to)) for room, exits in world.exits.items() for out in exits.values() if out.door
        }
        self.visited = {world.start: 0}
        self.milestones: set[str] = set()
        self.lost = False

    @property
    def won(self) -> bool:
        """Whether the treasure is held (and, if the level asks for it, brought back)."""
        return self.world.treasure in self.bag and (not self.world.level.bring_back or self.room == self.world.start)

    @property
    def over(self) -> bool:
        """Whether the quest has ended."""
        return self.won or self.lost

    # What a player does

    def go(self, direction: str) -> str:
        """Walks through an exit that is there and not locked."""
        out = self.world.exits[self.room].get(direction)
        if out is None:
            return f"There is no exit {direction}."
        if self._is_locked(self.room, out.to):
            return f"The {out.door} door is locked."
        self.room = out.to
        if out.to not in self.visited:
            self.visited[out.to] = len(self.visited)
        return ""

    def take(self, item: str) -> str:
        """Takes a thing in sight; a cursed one ends the quest."""
        if item not in self.items[self.room]:
            return f"There is no {item} here to take."
        self.items[self.room].remove(item)
        self.bag.append(item)
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
        self.locked_doors.discard(doors[target])
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
    def _label(container: Container) -> str:
        return f"{container.name} ({'locked' if container.locked else 'closed'})"

    def _exit_labels(self) -> list[str]:
        labels = []
        back = self.path_to({self.world.start})
        for way, out in self.world.exits[self.room].items():
            if self._is_locked(self.room, out.to):
                labels.append(f"{way}: {out.door} door (locked)")
            elif out.to not in self.visited:
                labels.append(f"{way}: ?")
            else:
                notes = ["back"] if back and back[0] == way else []
                notes += self._beyond(out.to) if self.world.level.mapped else []
                labels.append(f"{way}: {out.to}" + (f" ({', '.join(notes)})" if notes else ""))
        return labels

    def _beyond(self, first: str) -> list[str]:
        """What was seen and is still of use behind an exit of this room: `?` for a way not yet walked."""
        rooms, queue = {self.room, first}, [first]
        notes: dict[str, None] = {}
        while queue:
            room = queue.pop()
            for note in self.of_use(room):
                notes[note] = None
            for to in self.known[room].values():
                if to not in rooms:
                    rooms.add(to)
                    queue.append(to)
        return sorted(notes)

    # What a player knows

    @property
    def known(self) -> dict[str, dict[str, str]]:
        """Ways between visited rooms: `known[room][direction] = room`."""
        return {
            room: {
                way: out.to
                for way, out in self.world.exits[room].items()
                if out.to in self.visited and not self._is_locked(room, out.to)
            }
            for room in self.visited
        }

    def of_use(self, room: str) -> list[str]:
        """What in a visited room is still worth a visit: `?`, `key`, `box`, `chest`, `door` or the treasure's name."""
        found = ["?"] if self.unexplored(room) else []
        for thing in self.items[room]:
            if thing in self.world.needed:
                found.append("key" if thing.endswith(" key") else thing)
        found += [container.name.split()[-1] for container in self.closed[room]]
        found += ["door"] if any(out.door and self._is_locked(room, out.to) for out in self.world.exits[room].values()) else []
        return found

    def unexplored(self, room: str) -> list[str]:
        """Directions of unlocked ways that were never walked."""
        exits = self.world.exits[room].items()
        return [way for way, out in exits if out.to not in self.visited and not self._is_locked(room, out.to)]

    def path_to(self, goals: set[str]) -> list[str] | None:
        """Directions of a shortest known way to the nearest goal room, `[]` when there, None when there is none."""
        return path_between(self.known, self.room, goals)

    def possible(self) -> list[tuple[str, dict[str, str]]]:
        """Every call that does something here, as (tool name, arguments)."""
        calls: list[tuple[str, dict[str, str]]] = [("look", {})]
        doors = self._locked_doors_here()
        for way, out in self.world.exits[self.room].items():
            if not self._is_locked(self.room, out.to):
                calls.append(("go", {"direction": way}))
        calls += [("take", {"item": item}) for item in self.items[self.room]]
        locked = [*doors, *(container.name for container in self.closed[self.room] if container.locked)]
        calls += [("open", {"target": c.name}) for c in self.closed[self.room] if not c.locked]
        calls += [
            ("use", {"item": item, "target": target})
            for item in self.bag
            for target in locked
            if item == f"{target.split()[0]} key"
        ]
        return calls

    # Rules

    def _is_locked(self, room: str, to: str) -> bool:
        return frozenset((room, to)) in self.locked_doors

    def _locked_doors_here(self) -> dict[str, frozenset[str]]:
        exits = self.world.exits[self.room].values()
        return {f"{out.door} door": frozenset((self.room, out.to)) for out in exits if self._is_locked(self.room, out.to)}

    def _closed_here(self, target: str) -> Container | None:
        return next((container for container in self.closed[self.room] if container.name == target), None)

    def _open(self, container: Container) -> str:
        self.closed[self.room].remove(container)
        self.items[self.room].insert(0, container.content)
        self.milestones.add(f"open {container.name}")
        return "Opened."
