"""Reads Python literals as models write them in calls: character by character, without evaluating anything."""

from __future__ import annotations

import re
import unicodedata

from agentgym.types import JSON

__all__ = ["ZERO_LED", "LiteralReader", "resolve_escapes"]


class LiteralReader:
    """Reads literals of a text from `position` on, which it moves past what it read.

    After a ValueError `position` is where the text goes wrong: its end if the text stops too early. JSON's `true`,
    `false` and `null` are literals too, a string may hold a raw line break, and digits that begin with a zero, which
    Python does not have, are a text.
    Tuples and sets are read as lists, and a key that is not a string as the string that JSON makes of it.
    """

    def __init__(self, text: str, position: int = 0) -> None:
        self.text = text
        self.position = position
        self._depth = 0

    def value(self) -> JSON:
        """Reads the literal that begins here, after white space; raises ValueError that names what is there instead."""
        self.space()
        opening = self.text[self.position : self.position + 1]
        if opening and opening in "[({":
            return self._container(opening)
        if STRING_START.match(self.text, self.position) is not None:
            return self._strings()
        if (number := self.take(NUMBER)) is not None:
            return _number(number)
        word = WORD.match(self.text, self.position)
        if word is None or word[0] not in CONSTANTS:
            raise self.error("a literal")
        self.position = word.end()
        return CONSTANTS[word[0]]

    def space(self) -> None:
        """Moves past white space."""
        self.take(SPACE)

    def take(self, pattern: re.Pattern[str]) -> re.Match[str] | None:
        """Returns the pattern's match here and moves past it; None if it does not match."""
        match = pattern.match(self.text, self.position)
        self.position = self.position if match is None else match.end()
        return match

    def skip(self, mark: str) -> bool:
        """Returns True if `mark` follows here, after white space, and moves past it."""
        self.space()
        if not self.text.startswith(mark, self.position):
            return False
        self.position += len(mark)
        return True

    def expect(self, mark: str) -> None:
        """Moves past `mark`; raises ValueError that names what is here instead."""
        if not self.skip(mark):
            raise self.error(mark)

    def error(self, expectation: str) -> ValueError:
        """Returns an error that names what is wrong here."""
        rest = self.text[self.position : self.position + 20]
        what = f"got {rest!r}" if rest else "the text ends"
        return ValueError(f"expected {expectation} at character {self.position}, {what}")

    def _container(self, opening: str) -> JSON:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise ValueError(f"nested too deeply (more than {MAX_DEPTH} levels)")
        self.position += 1
        value = self._braces() if opening == "{" else self._items("]" if opening == "[" else ")")
        self._depth -= 1
        return value

    def _items(self, closing: str) -> JSON:
        """Reads the rest of a list, of a tuple, or of a value in parentheses."""
        values: list[JSON] = []
        while not self.skip(closing):
            values.append(self.value())
            if not self.skip(","):
                self.expect(closing)
                return values[0] if closing == ")" and len(values) == 1 else values
        return values

    def _braces(self) -> JSON:
        """Reads the rest of a dictionary or of a set."""
        pairs: dict[str, JSON] = {}
        values: list[JSON] = []
        while not self.skip("}"):
            value = self.value()
            if values or not self.skip(":"):
                values.append(value)
                if pairs:
                    raise self.error(":")
            else:
                pairs[_key(value)] = self.value()
            if not self.skip(","):
                self.expect("}")
                break
        return values or pairs

    def _strings(self) -> str:
        """Reads one string, or several adjacent ones, which are one."""
        parts: list[str] = []
        while (start := STRING_START.match(self.text, self.position)) is not None:
            match = self.take(STRING)
            if match is None:
                self.position = len(self.text)
                raise ValueError(f"the string that begins at character {start.start()} has no end")
            raw = next(group for group in match.groups()[1:] if group is not None)
            prefix = match[1].lower()
            if "b" in prefix or "f" in prefix:
                raise ValueError(f"bytes and f-strings are no values ({match[0][:20]})")
            parts.append(raw if "r" in prefix else resolve_escapes(raw))
            self.space()
        return "".join(parts)


def resolve_escapes(raw: str) -> str:
    """Returns the inside of a string with its escapes resolved; one that Python does not know stays as it is."""
    if "\\" not in raw:
        return raw
    text = ESCAPE.sub(_character, raw)
    # Two halves of a character, as JSON writes them, become one; half a character is an error.
    try:
        return text.encode("utf-16", "surrogatepass").decode("utf-16") if SURROGATE.search(text) else text
    except UnicodeDecodeError:
        raise ValueError("a lone surrogate") from None


def _character(match: re.Match[str]) -> str:
    escape = match[0][1:]
    if escape in SIMPLE_ESCAPES:
        return SIMPLE_ESCAPES[escape]
    if escape[0] in "01234567":
        return chr(int(escape, 8))
    if len(escape) == 1 or escape[0] not in "xuUN":
        return match[0]
    if escape[0] != "N":
        return chr(int(escape[1:], 16))
    try:
        return unicodedata.lookup(escape[2:-1])
    except KeyError:
        raise ValueError(f"no character is named {escape[2:-1]!r}") from None


def _number(match: re.Match[str]) -> int | float | str:
    digits = match[0].replace("_", "")
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of more than {MAX_DIGITS} digits")
    if match["based"]:
        value = int(match["based"], 0)
        return -value if digits.startswith("-") else value
    if match["whole"]:
        return match[0] if ZERO_LED.match(match[0]) else int(digits)
    number = float(digits)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"the number {digits[:20]} is too large")
    return number


def _key(value: JSON) -> str:
    if isinstance(value, str):
        return value
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, int | float):
        return str(value)
    raise ValueError("a key is a string")


MAX_DEPTH = 100
MAX_DIGITS = 300
CONSTANTS: dict[str, JSON] = {
    "True": True,
    "False": False,
    "None": None,
    "true": True,
    "false": False,
    "null": None,
}
SIMPLE_ESCAPES = {"\n": "", **dict(zip("\\'\"abfnrtv", "\\'\"\a\b\f\n\r\t\v", strict=True))}
SPACE = re.compile(r"\s*+")
SURROGATE = re.compile("[\ud800-\udfff]")
WORD = re.compile(r"\w++")
NUMBER = re.compile(
    r"""[+-]?+(?:
        (?P<based>0(?:[xX][0-9a-fA-F]++|[oO][0-7]++|[bB][01]++))
        | (?P<whole>[0-9](?:_?[0-9])*+)(?![.eE])
        | (?:[0-9](?:_?[0-9])*+(?:\.[0-9]*+)?+|\.[0-9]++)(?:[eE][+-]?+[0-9]++)?+
    )(?![\w.])""",
    re.VERBOSE,
)
ZERO_LED = re.compile(r"[+-]?+0[0-9_]++(?![\w.])")
"""Matches digits that are an identifier, or an integer that is written as in a date."""
STRING_START = re.compile(r"""[uUrRbBfF]{0,2}["']""")
STRING = re.compile(
    r"""([uUrRbBfF]{0,2})(?:
        '''((?:[^'\\]++|\\.|'(?!''))*+)'''
        | \"\"\"((?:[^"\\]++|\\.|"(?!""))*+)\"\"\"
        | '(?!'')((?:[^'\\]++|\\.)*+)'
        | "(?!"")((?:[^"\\]++|\\.)*+)"
    )""",
    re.DOTALL | re.VERBOSE,
)
ESCAPE = re.compile(r"\\(?:[0-7]{1,3}|x[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|N\{[^{}]{1,100}\}|.)", re.DOTALL)
