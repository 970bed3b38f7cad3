"""A named table of parts, whose look-up error names the nearest entry."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Generic, TypeVar, cast

from agentgym.errors import ConfigError, UnknownName, nearest
from agentgym.loading import Wanted, is_code_path, load_named

__all__ = ["Registry"]

T = TypeVar("T")


class Registry(Mapping[str, T], Generic[T]):
    """A read-mostly dict from name to part.

    `kind` is the singular noun that messages use; `hint` is a sentence on where a user sees all names. `check` raises
    ConfigError for an object that cannot be an entry. A table with a check is open: a name may also be
    `path/to/file.py:name` or `package.module:name`. Such an entry is the user's own, loaded on access and not listed.

    >>> colours = Registry[int]("colour")
    >>> colours.add("red", 1)
    1
    >>> colours["red"]
    1
    """

    def __init__(self, kind: str, hint: str = "", *, check: Callable[[str, T], None] | None = None) -> None:
        self.kind = kind
        self.hint = hint
        self._check = check
        self._entries: dict[str, T] = {}

    def add(self, name: str, entry: T, *, replace: bool = False) -> T:
        """Registers `entry` and returns it.

        Raises ConfigError when the name is taken and `replace` is false, and for an entry that the check refuses.
        """
        if name in self._entries and not replace and self._entries[name] is not entry:
            raise ConfigError(f"{self.kind} {name!r} is already registered; pass replace=True to replace it")
        if self._check is not None:
            self._check(name, entry)
        self._entries[name] = entry
        return entry

    def register(self, name: str) -> Callable[[T], T]:
        """Decorator form of `add`."""
        return lambda entry: self.add(name, entry)

    def __getitem__(self, name: str) -> T:
        if name in self._entries:
            return self._entries[name]
        if self._check is not None and is_code_path(name):
            return self._own(name, self._check)
        hint = f" {self.hint}" if self.hint else f" Known: {', '.join(sorted(self._entries)) or 'none'}."
        near = nearest(name, self._entries) or "."
        raise UnknownName(f"unknown {self.kind} {name!r}{near}{hint}")

    def _own(self, name: str, check: Callable[[str, T], None]) -> T:
        entry = cast(T, load_named(name, Wanted(noun=self.kind, hint=self.hint)))
        check(name, entry)
        return entry

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
