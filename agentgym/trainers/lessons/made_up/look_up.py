"""Conversations about a table, of which the user names one row after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from agentgym.trainers.lessons.made_up.toolbox import Dialogue, Parameter, Toolbox
from agentgym.trainers.lessons.made_up.words import FIRST_NAMES, NOUNS
from agentgym.trainers.lessons.made_up.writing import DONE, in_words, list_words, plain_label, write_rows
from agentgym.types import JSON, Message

__all__ = ["look_up"]

SMALL_SHARE = 0.8
"""The share of small tables, each asked for many rows: in those a model learns that rows have to be found."""
KEY_TYPES = ("string", "string", "integer")


class _Table:
    """A table, the tool that takes values of a row, and the parameters of that tool."""

    def __init__(self, box: Toolbox, *, is_small: bool) -> None:
        self.box, self.values, self.is_small = box, box.values, is_small
        values = self.values
        self.key = Parameter(box.new_name(values.label), values.pick(KEY_TYPES))
        num_columns = 1 if box.is_easy else values.pick((1, 2, 2, 3)) if is_small else values.between(1, 3)
        columns = box.parameters(num_columns, num_columns)
        order = values.sample([self.key, *columns], 1 + len(columns))
        if order[0] == self.key and values.chance(0.6):  # a value that comes before the key is harder to find
            order = [*order[1:], self.key]
        self.rows = self._rows(order)
        self.parameters = values.sample(columns, values.between(1, len(columns)))
        if values.chance(0.4 if is_small else 0.3):
            self.parameters = [self.key, *self.parameters]
        self.tool = box.tool_name()
        self.text = write_rows(values, self.rows, self.key.name)

    def _rows(self, order: Sequence[Parameter]) -> list[Mapping[str, JSON]]:
        values = self.values
        num_rows = values.pick((2, 3, 4, 5) if self.is_small else (2, 2, 2, 3, 3, 4, 5, 7))
        rows = [self.box.arguments(order) for _ in range(num_rows)]
        if self.is_small and self.key.type == "string":
            rows = [{**row, self.key.name: values.pick((*NOUNS, *FIRST_NAMES))} for row in rows]
        return list({in_words(row[self.key.name]): row for row in rows}.values())  # each key once

    def ask(self, row: Mapping[str, JSON]) -> str:
        """Returns the words that ask for a call with the values of a row."""
        values, tool, key = self.values, self.tool, self.key.name
        subject, plain = in_words(row[key]), tool.replace("_", " ")
        labels = list_words([plain_label(values, parameter.name) for parameter in self.parameters])
        return values.pick(
            (
                f"Call {tool} for {subject}",
                f"Call {tool} with {labels} of {subject}",
                f"{plain}: {subject}",
                f"Please {plain} for the {plain_label(values, key)} {subject}",
                f"{values.phrase(1, 5)} {subject} {values.phrase(1, 3)}: {plain}",
            )
        )

    def answer(self, dialogue: Dialogue, row: Mapping[str, JSON]) -> None:
        """Adds the call with the values of a row, and its result."""
        result = self.values.pick(DONE) if self.is_small else self.box.result()
        dialogue.call([result], (self.tool, {parameter.name: row[parameter.name] for parameter in self.parameters}))


def look_up(box: Toolbox) -> Dialogue:
    """A table is in the opening or in a result; the row that the user names has the values for the next call.

    Then the user names further ones: many, if the table is small.
    """
    values = box.values
    table = _Table(box, is_small=box.is_easy or values.chance(SMALL_SHARE))
    row = values.pick(table.rows)
    has_finder = not box.is_easy and values.chance(0.3 if table.is_small else 0.7)
    dialogue = _open_with_finder(table, row) if has_finder else _open_with_table(table, row)
    table.answer(dialogue, row)
    counts = (5, 6, 7, 8) if box.is_easy else (4, 5, 6, 7) if table.is_small else (1, 1, 1, 2, 3, 4)
    for _ in range(values.pick(counts) - 1):
        row = values.pick(table.rows)
        dialogue.messages.append(Message("user", table.ask(row)))
        table.answer(dialogue, row)
    dialogue.end(values.pick(("Done.", "It is done.", "OK.")) if values.chance(0.25) else None)
    return dialogue


def _open_with_table(table: _Table, row: Mapping[str, JSON]) -> Dialogue:
    """Returns a dialogue that begins with the table and the question, in any order."""
    box, ask = table.box, table.ask(row)
    tools = box.with_others([box.tool(table.tool, table.parameters)], 1 if table.is_small else 3)
    return box.open(tools, table.values.pick((f"{table.text}\n{ask}.", f"{ask}.\n{table.text}")))


def _open_with_finder(table: _Table, row: Mapping[str, JSON]) -> Dialogue:
    """Returns a dialogue in which a tool returns the table, and takes the key, the owner of the rows or nothing."""
    box, values, key, ask = table.box, table.values, table.key, table.ask(row)
    finder, chosen = box.tool_name(), values.rng.random()
    keys = [key] if chosen < 0.25 else []
    inputs = {key.name: row[key.name]} if keys else {}
    if chosen > 0.6:  # what the rows are found by is not in them
        owner = Parameter(box.new_name(values.label), values.pick(KEY_TYPES))
        keys, inputs = [owner], {owner.name: box.value(owner)}
        label, name = plain_label(values, owner.name), in_words(inputs[owner.name])
        ask = values.pick((f"{ask}, {label} {name}", f"{name}: {ask}", f"{ask} of {name}"))
    hint = values.pick(("lists them", "shows all", "knows more", "comes first"))
    tools = box.with_others([box.tool(table.tool, table.parameters), box.tool(finder, keys)], 3)
    dialogue = box.open(tools, f"{ask}. {plain_label(values, finder)} {hint}.")
    dialogue.call([table.text], (finder, inputs))
    return dialogue
