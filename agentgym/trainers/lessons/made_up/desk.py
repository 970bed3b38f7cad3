"""Conversations at a desk: the user asks first, then a tool returns the table in which the row has to be found."""

from __future__ import annotations

from collections.abc import Mapping

from agentgym.trainers.lessons.made_up.toolbox import Dialogue, Parameter, Toolbox
from agentgym.trainers.lessons.made_up.words import FIRST_NAMES, NOUNS
from agentgym.trainers.lessons.made_up.writing import DONE, in_words, plain_label, write_facts, write_rows
from agentgym.types import JSON, Message

__all__ = ["desk"]

LETTERS = (
    *("{owner} writes: {words} {subject}", "{owner}: {words} {subject} {more}", "{words} {subject}, {owner}"),
    *("{subject} {words} {owner}", "{words} {owner} {more} {subject}", "{words} {subject} {more} {owner} {words}"),
)
"""The orders in which a letter names the owner of the rows and the row."""
STEPS = ("First {0}, then {1}.", "{0}, {1}.", "Use {0}. Then {1}.", "{1} after {0}.")


class _Desk:
    """The tools of a conversation: one finds the rows of an owner, one may look a row up, and one takes its values."""

    def __init__(self, box: Toolbox) -> None:
        self.box, self.values = box, box.values
        values = self.values
        self.owner = Parameter(box.new_name(values.label), values.pick(("string", "string", "string", "integer")))
        self.key = Parameter(box.new_name(values.label), values.pick(("string", "string", "string", "integer")))
        columns = box.parameters(1, 3)
        self.columns = values.sample([self.key, *columns], 1 + len(columns))
        self.inputs = values.sample(columns, values.between(1, len(columns)))
        if values.chance(0.2):
            self.inputs.append(values.pick((self.key, self.owner)))
        self.details = box.parameters(1, 2) if values.chance(0.25) else []
        self.finder, self.reader, self.action = box.tool_name(), box.tool_name(), box.tool_name()
        if self.details:  # the row has what is looked up, and that has the values
            self.link = self.inputs[0]
            self.inputs = values.sample([self.link, *self.details], values.between(1, 2))
        self.letter = values.pick(LETTERS).format(
            owner="{owner}", subject="{subject}", words=values.phrase(1, 6), more=values.phrase(1, 3)
        )

    def open(self, text: str) -> Dialogue:
        """Returns the dialogue with its tools and the first letter; a sentence may say the order of the tools."""
        box, values = self.box, self.values
        tools = [box.tool(self.finder, [self.owner]), box.tool(self.action, self.inputs)]
        names = [self.finder, self.action]
        if self.details:
            tools.insert(1, box.tool(self.reader, [self.link]))
            names[1:] = [f"{self.reader}, {self.action}"]
        steps = values.pick(STEPS).format(*(plain_label(values, name) for name in names))
        system = f"{steps} {values.sentence(1, 5)}" if values.chance(0.6) else None
        return box.open(tools if system is None else box.with_others(tools, 2), text, system=system)

    def rows(self) -> list[Mapping[str, JSON]]:
        """Returns two to five rows, each with a key of its own."""
        values = self.values
        num_rows = values.pick((2, 2, 3, 3, 4, 5))
        rows: list[Mapping[str, JSON]] = [self.box.arguments(self.columns) for _ in range(num_rows)]
        if self.key.type == "string" and values.chance(0.7):
            rows = [{**row, self.key.name: values.pick((*NOUNS, *FIRST_NAMES))} for row in rows]
        return list({in_words(row[self.key.name]): row for row in rows}.values())


def desk(box: Toolbox) -> Dialogue:
    """Answers two to four letters, each with a table of its own and calls that take values of the row it names."""
    values, tools = box.values, _Desk(box)
    dialogue: Dialogue | None = None
    for _ in range(values.pick((2, 2, 3, 4))):
        rows, owner = tools.rows(), box.value(tools.owner)
        row = values.pick(rows)
        text = tools.letter.replace("{owner}", in_words(owner)).replace("{subject}", in_words(row[tools.key.name]))
        if dialogue is None:
            dialogue = tools.open(text)
        else:
            dialogue.messages.append(Message("user", text))
        values_by_name = {tools.owner.name: owner, **row}
        dialogue.call([write_rows(values, rows, tools.key.name)], (tools.finder, {tools.owner.name: owner}))
        if tools.details:
            details = box.arguments(tools.details)
            values_by_name |= details
            dialogue.call([write_facts(values, details)], (tools.reader, {tools.link.name: row[tools.link.name]}))
        names = [parameter.name for parameter in tools.inputs]
        dialogue.call([values.pick(DONE)], (tools.action, {name: values_by_name[name] for name in names}))
    assert dialogue is not None
    dialogue.end(values.pick(("Done.", "It is done.", "OK.")) if values.chance(0.25) else None)
    return dialogue
