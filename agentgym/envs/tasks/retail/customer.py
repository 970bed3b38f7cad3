"""The customer of Retail-v0: states wishes, answers questions, and leaves when all is dealt with."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from agentgym.envs.tasks.retail.shop import Customer
from agentgym.envs.tasks.retail.wishes import Wish

__all__ = ["Brief", "ScriptedUser", "SimulatedUser"]

PATIENCE = 4
"""The number of replies that lead nowhere after which the customer leaves."""
REQUEST = re.compile(
    r"\?|\b(please|kindly|could you|can you|may i|i need|"
    r"(?:i|we)(?:'ll|'d| will| would)? need(?! to (?:escalate|hand|pass))|"
    r"(?:give|send|tell) (?:me|us)|share your|provide|let me know|what is|which)\b"
)
CLOSING = re.compile(r"\b(anything|something) (else|more|further)\b")
REPORT = re.compile(
    r"\b(done|completed|processed|cancell?ed|returned|exchanged|changed|refunded|all set|manager|escalated|handed over|"
    r"cannot|can't|can not|unable|not possible|not allowed|sorry(?! to hear)|costs?|total|dollars)\b"
)
CONFIRM = re.compile(r"\b(confirm|shall i|should i|proceed|go ahead|want me to|correct|all right|okay|yes)\b")
TOPICS = {
    "email": r"e-?mail",
    "name": r"\b(names?|zip|postal|identify|identity|verify|who am i)\b",
    "order": r"\border(?:'s)? (number|id)\b|\b(which|what) (of (the|your) )?orders?\b|\bnumber of (the|your) order\b|"
    r"\bthe order (that )?you\b",
    "item": r"\b(which|what) (items?|ones?|products?|things?)\b|\bwhat (would|do) you \w+ to \w+|\bis it the\b|"
    r"\b(whole|entire) order\b",
    "instead": r"\binstead\b|\b(which|what) (new|other|variant|version|option|size|colou?r|kind)\b|\bfor what\b|"
    r"\binto what\b|\bin exchange\b|\bprefer\b|\bdo you want the\b|"
    r"\b(exchanged?|changed?|replaced?) (it )?(for|to|with)\b",
    "reason": r"\bwhy\b|\breasons?\b|\bno longer needed\b|\bby mistake\b",
    "refund": r"\brefund|\bpay|\bcard|\bmoney\b",
}
NO_MATTER = "I have no preference about that."
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")
IDENTIFIER = re.compile(
    r"\bW\d{5}\b|\b(?:visa|mastercard)-\d{4}\b|\b[a-z]+_[a-z]+_\d{4}\b|\bitem #?\d{4}\b", re.IGNORECASE
)
"""The names of orders, cards, customers and items, which are no numbers that a customer asks for."""
MAX_NUMBERS = 8
"""A message with more numbers reports none: the customer does not search for the right one."""


@dataclass(frozen=True, kw_only=True)
class Brief:
    """The knowledge of a simulated customer."""

    customer: Customer
    wishes: Sequence[Wish]
    level: int
    """1: says everything at once; 2: answers what is asked; 3: remembers no order number and no e-mail address."""

    def instructions(self) -> str:
        """The same knowledge as a text, for a model that plays the customer."""
        customer = self.customer
        facts = (
            f"zip code {customer.zip_code}"
            if self.level == 3
            else f"e-mail {customer.email}, zip code {customer.zip_code}"
        )
        lines = [
            f"You are {customer.first_name} {customer.last_name} ({facts}), "
            "a customer who writes to the desk of a shop."
        ]
        for number, wish in enumerate(self.wishes, 1):
            order = wish.hint if self.level == 3 else f"The order is {wish.order_id}."
            lines.append(f"Wish {number}: {' '.join((wish.opening, order, *wish.facts.values()))}")
        lines.append(
            "Bring up one wish after the other; say only what is asked for, in short sentences, as a customer."
        )
        return "\n".join(lines)


@runtime_checkable
class SimulatedUser(Protocol):
    """Plays a customer for an episode. An exception in it is a fault of the environment, not a mistake of the desk."""

    is_over: bool
    """True if the customer has left."""

    def begin(self, brief: Brief) -> str:
        """The first message."""

    def answer(self, text: str) -> str:
        """The answer to a message of the desk."""


class ScriptedUser:
    """Answers by rules: the facts that a question names, yes if something is to be confirmed, the next wish."""

    def __init__(self) -> None:
        self.is_over = False

    def begin(self, brief: Brief) -> str:
        """Brings up the first wish."""
        self._brief, self._index, self._patience = brief, 0, PATIENCE
        self.is_over, self._was_told = False, False
        return f"Hello. {self._state_wish()}"

    def answer(self, text: str) -> str:
        """Answers what was asked for; if nothing was, the message counts as the answer to the wish."""
        self._was_told = self._was_told or tells(text, self._wish.told)
        request = text.casefold().replace("’", "'")
        if not REQUEST.search(request) or CLOSING.search(request):
            return self._next(is_report=bool(REPORT.search(request) or CLOSING.search(request)))
        facts = [self._fact(topic) for topic, words in TOPICS.items() if re.search(words, request)]
        facts = [fact for fact in facts if fact != NO_MATTER] or facts
        is_wanted = not facts or re.search(rf"\b{re.escape(self._wish.insists)}\b", request)
        if is_wanted and CONFIRM.search(request):
            facts.append("Yes, please.")
        if not facts:
            return self._lose_patience(self._state_wish())
        return " ".join(dict.fromkeys(facts))

    @property
    def _wish(self) -> Wish:
        return self._brief.wishes[self._index]

    def _state_wish(self) -> str:
        if self._brief.level > 1:
            return self._wish.opening
        return " ".join((self._wish.opening, f"It is order {self._wish.order_id}.", *self._wish.facts.values()))

    def _fact(self, topic: str) -> str:
        customer, is_forgetful = self._brief.customer, self._brief.level == 3
        if topic == "email" and not is_forgetful:
            return f"My e-mail address is {customer.email}."
        if topic in ("email", "name"):
            forgotten = "I do not know which e-mail address I gave. " if topic == "email" else ""
            return f"{forgotten}I am {customer.first_name} {customer.last_name}, zip code {customer.zip_code}."
        if topic == "order":
            return self._wish.hint if is_forgetful else f"It is order {self._wish.order_id}."
        return self._wish.facts.get(topic, NO_MATTER)

    def _next(self, *, is_report: bool) -> str:
        if not is_report:
            return self._lose_patience("All right. And?")
        if self._wish.told and not self._was_told:
            return self._lose_patience("But you have not told me the number that I asked for.")
        self._index += 1
        if self._index == len(self._brief.wishes):
            self.is_over = True
            return "Thank you, that is all. Goodbye."
        self._was_told = False
        return f"Thank you. There is something else. {self._state_wish()}"

    def _lose_patience(self, text: str) -> str:
        self._patience -= 1
        if self._patience > 0:
            return text
        self.is_over = True
        return "This leads nowhere. Goodbye."


def numbers_in(text: str) -> set[str]:
    """The numbers of a message, but for those that name an order, a card, a customer or an item."""
    numbers = NUMBER.findall(IDENTIFIER.sub(" ", text))
    return {number.replace(",", "").removesuffix(".00").removesuffix(".0") for number in numbers}


def tells(text: str, number: str) -> bool:
    """True if a message contains a number and is no list of many; always true for the number "".

    >>> tells("That makes 1,250 dollars.", "1250")
    True
    """
    numbers = numbers_in(text)
    return not number or (number in numbers and len(numbers) <= MAX_NUMBERS)
