"""Gemma's notation of values: JSON with bare keys, and strings between two marks instead of quotes."""

from __future__ import annotations

import re
from collections.abc import Mapping

from agentgym.call_json import add_unique, read_json
from agentgym.types import JSON

__all__ = ["GemmaValueReader"]


class GemmaValueReader:
    """Reads values of a text from `position` on; raises ValueError that names what is wrong, and where.

    >>> GemmaValueReader('{name:<|"|>text<|"|>,steps:[1,true]}', '<|"|>').object()
    {'name': 'text', 'steps': [1, True]}
    """

    def __init__(self, text: str, quote: str, position: int = 0) -> None:
        self.text, self.quote, self.position = text, quote, position
        self._depth = 0
        mark = re.escape(quote)
        self._string = re.compile(rf"{mark}((?:[^<]++|<(?!{mark[1:]}))*+){mark}")

    def object(self) -> Mapping[str, JSON]:
        """Reads the object that begins here."""
        pairs: dict[str, JSON] = {}
        self._enter("{")
        while not self._skip("}"):
            add_unique(pairs, self._key(), self._value())
            if not self._skip(","):
                self._expect("}")
                break
        self._depth -= 1
        return pairs

    def end(self) -> None:
        """Raises ValueError unless the text ends here."""
        if self.text[self.position :].strip():
            raise self._error("the end of the call")

    def _value(self) -> JSON:
        self._space()
        if self.text.startswith("{", self.position):
            return self.object()
        if self.text.startswith("[", self.position):
            return self._list()
        if self.text.startswith(self.quote, self.position):
            return self._quoted_string()
        match = BARE.match(self.text, self.position)
        bare = "" if match is None else match[0].strip()
        if match is None or not bare:
            raise self._error("a value")
        self.position = match.end()
        if bare == "None":  # as Gemma 4's own template writes null; a text would be between marks
            return None
        try:
            return read_json(bare)
        except ValueError:
            return bare

    def _list(self) -> JSON:
        values: list[JSON] = []
        self._enter("[")
        while not self._skip("]"):
            values.append(self._value())
            if not self._skip(","):
                self._expect("]")
                break
        self._depth -= 1
        return values

    def _key(self) -> str:
        self._space()
        if self.text.startswith(self.quote, self.position):
            key = self._quoted_string()
            self._expect(":")
            return key
        match = KEY.match(self.text, self.position)
        if match is None:
            raise self._error("a name and a colon")
        self.position = match.end()
        return match[1].strip()

    def _quoted_string(self) -> str:
        match = self._string.match(self.text, self.position)
        if match is None:
            raise ValueError(f"the string that begins at character {self.position} has no end")
        self.position = match.end()
        return match[1]

    def _enter(self, mark: str) -> None:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueError(f"nested too deeply (more than {MAX_DEPTH} levels)")
        self._expect(mark)

    def _skip(self, mark: str) -> bool:
        self._space()
        if not self.text.startswith(mark, self.position):
            return False
        self.position += len(mark)
        return True

    def _expect(self, mark: str) -> None:
        if not self._skip(mark):
            raise self._error(mark)

    def _space(self) -> None:
        match = SPACE.match(self.text, self.position)
        self.position = self.position if match is None else match.end()

    def _error(self, expectation: str) -> ValueError:
        rest = self.text[self.position : self.position + 20]
        return ValueError(f"expected {expectation}, got {rest!r}" if rest else f"expected {expectation}, the call ends")


MAX_DEPTH = 100
SPACE = re.compile(r"\s*+")
KEY = re.compile(r"([^\s<>{}\[\],:]++)\s*+:")
BARE = re.compile(r"[^<>{}\[\],]++")
