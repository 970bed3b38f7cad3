"""A named table of parts, whose look-up error names the nearest entry."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar

from agentgym.errors import ConfigError, UnknownName, nearest

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """A read-mostly dict from name to part.

    `kind` is the singular noun that messages use; `hint` says where a user sees all names.

    >>> colours = Registry[int]("colour")
    >>> colours.add("red", 1)
    1
    >>> colours["red"]
    1
    """

    def __init__(self, kind: str, hint: str = "") -> None:
        self.kind = kind
        self.hint = hint
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T, *, replace: bool = False) -> T:
        """Registers `entry` and returns it; raises ConfigError when the name is taken and `replace` is false."""
        if name in self._entries and not replace and self._entries[name] is not entry:
            raise ConfigError(f"{self.kind} {name!r} is already registered; pass replace=True to replace it")
        self._entries[name] = entry
        return entry

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator form of `add`."""
        return lambda entry: self.add(name, entry)

    def __getitem__(self, name: str) -> T:
        try:
            return self._entries[name]
        except KeyError:
            hint = f" {self.hint}" if self.hint else f" Known: {', '.join(sorted(self._entries)) or 'none'}."
            near = nearest(name, self._entries) or "."
            raise UnknownName(f"unknown {self.kind} {name!r}{near}{hint}") from None

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
