"""Random values: words, names, numbers, codes, dates, texts."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from agentgym.trainers.lessons.made_up.words import FIRST_NAMES, NOUNS, PLACES, VERBS, dictionary
from agentgym.types import JSON

__all__ = ["Values"]

T = TypeVar("T")

VOWELS, CONSONANTS = "aeiou", "bcdfghjklmnprstvwz"
CODES = ("A-0", "A0", "a0", "hex", "#0", "word_0", "0-0", "word-word", "A", "word0")


class Values:
    """Draws values from a random generator.

    `pieces` are tokens of letters: words made of them are as likely to hold any of these as any other.
    """

    def __init__(self, rng: np.random.Generator, pieces: Sequence[str] = ()) -> None:
        self.rng, self.pieces = rng, pieces

    def pick(self, options: Sequence[T]) -> T:
        """Returns one of the options."""
        return options[int(self.rng.integers(len(options)))]

    def draw(self, options: Sequence[Callable[[], T]]) -> T:
        """Returns what one of the functions returns."""
        return self.pick(options)()

    def chance(self, share: float) -> bool:
        """Returns True with this probability."""
        return bool(self.rng.random() < share)

    def between(self, low: int, high: int) -> int:
        """Returns an integer from `low` to `high`, both included."""
        return int(self.rng.integers(low, high + 1))

    def sample(self, options: Sequence[T], size: int) -> list[T]:
        """Returns that many different options in a random order, or all if there are fewer."""
        return [options[i] for i in self.rng.permutation(len(options))[:size]]

    def letters(self, alphabet: str, low: int, high: int) -> str:
        """Returns `low` to `high` letters of the alphabet."""
        return "".join(self.pick(alphabet) for _ in range(self.between(low, high)))

    def digits(self, low: int, high: int) -> str:
        """Returns `low` to `high` digits."""
        return self.letters(string.digits, low, high)

    def syllables(self) -> str:
        """Returns a word that is in no dictionary, but can be spoken."""
        return "".join(
            self.pick(CONSONANTS) + self.pick(VOWELS) + (self.pick(CONSONANTS) if self.chance(0.4) else "")
            for _ in range(self.between(1, 3))
        )

    def word(self) -> str:
        """Returns a word in lower case, English or not."""
        part = self.rng.random()
        if part < 0.4:
            return self.pick(dictionary())
        if part < 0.6:
            return self.syllables()
        if part < 0.75 and self.pieces:
            return "".join(self.pick(self.pieces) for _ in range(self.between(1, 2)))
        if part < 0.85:
            return self.letters(string.ascii_lowercase, 2, 8)
        return self.pick(NOUNS)

    def phrase(self, low: int = 2, high: int = 6) -> str:
        """Returns `low` to `high` words."""
        return " ".join(self.word() for _ in range(self.between(low, high)))

    def sentence(self, low: int = 2, high: int = 6) -> str:
        """Returns `low` to `high` words as a sentence without a meaning."""
        return self.phrase(low, high).capitalize() + "."

    def integer(self) -> int:
        """Returns an integer of one to eight digits, seldom a negative one."""
        num_digits = self.between(1, 8) if self.chance(0.5) else self.between(1, 4)
        value = self.between(10 ** (num_digits - 1) if num_digits > 1 else 0, 10**num_digits - 1)
        return -value if self.chance(0.03) else value

    def number(self) -> float:
        """Returns a number with decimals, or an integer."""
        if self.chance(0.3):
            return self.integer()
        return self.between(1, 10 ** self.between(2, 5)) / self.pick((10, 100, 100, 4))

    def person(self) -> str:
        """Returns a name of one or two words in capitals."""
        part = self.rng.random()
        if part < 0.4:
            return self.pick(FIRST_NAMES)
        if part < 0.6:
            return self.word().capitalize()
        if part < 0.8:
            return f"{self.pick(FIRST_NAMES)} {self.word().capitalize()}"
        return f"{self.syllables().capitalize()} {self.syllables().capitalize()}"

    def code(self) -> str:
        """Returns a text as numbers of orders, rooms and devices are written."""
        kind, upper, lower = self.pick(CODES), string.ascii_uppercase, string.ascii_lowercase
        if kind == "A-0":
            return f"{self.letters(upper, 1, 3)}-{self.digits(2, 6)}"
        if kind == "A0":
            return self.letters(upper, 1, 4) + self.digits(1, 5)
        if kind == "a0":
            return self.letters(lower + string.digits, 3, 10)
        if kind == "hex":
            return self.letters("0123456789abcdef", 4, 12)
        if kind == "#0":
            return f"#{self.digits(2, 6)}"
        if kind == "word_0":
            return f"{self.word()}_{self.digits(1, 4)}"
        if kind == "0-0":
            return f"{self.digits(2, 4)}-{self.digits(2, 4)}"
        if kind == "word-word":
            return f"{self.word()}-{self.word()}"
        return self.letters(upper, 2, 6) if kind == "A" else self.word() + self.digits(1, 3)

    def address_or_date(self) -> str:
        """Returns an address, a date, a time, a path, a URL or a phone number."""
        return self.draw(
            (
                lambda: f"{self.word()}@{self.word()}.{self.pick(('com', 'org', 'net', 'de'))}",
                lambda: f"{self.between(1990, 2031)}-{self.between(1, 12):02}-{self.between(1, 28):02}",
                lambda: f"{self.between(0, 23):02}:{self.between(0, 59):02}",
                lambda: "".join(f"/{self.word()}" for _ in range(self.between(1, 3))) + self.pick(("", ".txt", ".py")),
                lambda: f"{self.between(1, 99)} {self.word().capitalize()} {self.pick(('Street', 'Road', 'Lane'))}",
                lambda: f"https://{self.word()}.{self.pick(('com', 'org'))}/{self.word()}",
                lambda: f"+{self.digits(2, 3)} {self.digits(3, 7)}",
            )
        )

    def text(self) -> str:
        """Returns a text of any kind."""
        part = self.rng.random()
        if part < 0.25:
            return self.word()
        if part < 0.4:
            return self.person()
        if part < 0.6:
            return self.code()
        if part < 0.7:
            return self.pick(PLACES)
        if part < 0.82:
            return self.address_or_date()
        return str(abs(self.integer())) if part < 0.9 else self.phrase()

    def of_type(self, name: str) -> JSON:
        """Returns a value of a type of JSON Schema; of an array, texts or integers."""
        if name == "integer":
            return self.integer()
        if name == "number":
            return self.number()
        if name == "boolean":
            return self.chance(0.5)
        if name == "array":
            draw: Callable[[], JSON] = self.integer if self.chance(0.3) else self.text
            return [draw() for _ in range(self.between(1, 4))]
        return self.text()

    def label(self) -> str:
        """Returns the name of a parameter or of a value."""
        part = self.rng.random()
        if part < 0.6:
            return self.pick(NOUNS)
        if part < 0.75:
            return self.word()
        if part < 0.9:
            return f"{self.pick(NOUNS)}_{self.pick(NOUNS)}"
        return f"{self.word()}_{self.pick(('id', 'no', 'name', 'key', 'count'))}"

    def tool_name(self) -> str:
        """Returns the name of a tool."""
        part = self.rng.random()
        if part < 0.35:
            return f"{self.pick(VERBS)}_{self.pick(NOUNS)}"
        if part < 0.6:
            return self.pick(VERBS)
        if part < 0.75:
            return self.word()
        return f"{self.pick(VERBS)}_{self.word()}" if part < 0.9 else "_".join(self.word() for _ in range(3))
