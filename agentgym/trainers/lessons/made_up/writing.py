"""The many forms in which an environment or a user writes values."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence

from agentgym.trainers.lessons.made_up.values import Values
from agentgym.types import JSON

__all__ = ["DONE", "in_words", "is_written", "list_words", "plain_label", "write_facts", "write_rows"]

DONE = ("Done.", "ok", "OK.", "Done", "It is done.", "success", "{}", "true")
"""Results that hold no value."""


def in_words(value: JSON) -> str:
    """Returns a value as a sentence has it."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def is_written(value: JSON, text: str) -> bool:
    """True if a text has the value, each part of a list, as words or as JSON."""
    parts = value if isinstance(value, list) else [value]
    return all(in_words(part) in text or json.dumps(part, ensure_ascii=False) in text for part in parts)


def list_words(words: Sequence[str]) -> str:
    """Returns words with commas and an `and`."""
    return " and ".join(filter(None, (", ".join(words[:-1]), *words[-1:])))


def plain_label(values: Values, label: str) -> str:
    """Returns a label as it is, or with spaces."""
    return label.replace("_", " ") if values.chance(0.5) else label


def write_facts(values: Values, facts: Mapping[str, JSON]) -> str:
    """Returns the facts in one of nine forms, in any order; of none, a result without a value."""
    if not facts:
        return values.pick((*DONE, values.sentence(1, 4)))
    items = values.sample(list(facts.items()), len(facts)) if values.chance(0.5) else list(facts.items())
    pairs = [(name, plain_label(values, name), in_words(value)) for name, value in items]
    forms: tuple[Callable[[], str], ...] = (
        lambda: json.dumps(dict(items), ensure_ascii=False),
        lambda: "\n".join(f"{label}: {value}" for _, label, value in pairs),
        lambda: ", ".join(f"{label} {value}" for _, label, value in pairs) + values.pick((".", "")),
        lambda: ", ".join(f"{name}={value}" for name, _, value in pairs),
        lambda: " ".join(f"The {label} is {value}." for _, label, value in pairs),
        lambda: "; ".join(f"{label}: {value}" for _, label, value in pairs),
        lambda: "\n".join(f"- {label}: {value}" for _, label, value in pairs),
        lambda: _join_cells([label for _, label, _ in pairs]) + "\n" + _join_cells([value for _, _, value in pairs]),
        lambda: " ".join(f"{label.capitalize()}: {value}." for _, label, value in pairs),
    )
    return values.draw(forms)


def write_rows(values: Values, rows: Sequence[Mapping[str, JSON]], key: str) -> str:
    """Returns rows of equal columns as JSON, a table or lines that begin with `key`; two columns also without names."""
    names = list(rows[0])
    forms: tuple[Callable[[], str], ...] = (
        lambda: "\n".join(json.dumps(row, ensure_ascii=False) for row in rows),
        lambda: "\n".join(
            (_join_cells(names), *(_join_cells([in_words(row[name]) for name in names]) for row in rows))
        ),
        lambda: "\n".join(
            f"{in_words(row[key])}: " + ", ".join(f"{n} {in_words(row[n])}" for n in names if n != key) for row in rows
        ),
        lambda: json.dumps(list(rows), ensure_ascii=False),
    )
    if len(names) == 2:
        (value,), mark = (name for name in names if name != key), values.pick((": ", " = ", " ", " | ", ", "))
        forms += 2 * ((lambda: "\n".join(f"{in_words(row[key])}{mark}{in_words(row[value])}" for row in rows)),)
    return values.draw((*forms, lambda: _write_loosely(values, rows, key)))


def _write_loosely(values: Values, rows: Sequence[Mapping[str, JSON]], key: str) -> str:
    """Returns rows as a text of no usual form, in which the column `key` may have no name."""
    labels = {name: plain_label(values, name) for name in rows[0]}
    pair = values.pick(("{0} {1}", "{1} {0}", "{0}: {1}", "({0} {1})", "{0}={1}", "{0} is {1}"))
    bare = key if values.chance(0.5) else None
    within, mark = values.pick((" ", ", ", " - ", ", with ")), values.pick(("", "- ", "* ", "> "))
    between = f"\n{mark}" if mark else values.pick(("\n", "; ", ", ", ". ", "\n\n"))
    lines = (
        within.join(in_words(v) if n == bare else pair.format(labels[n], in_words(v)) for n, v in row.items())
        for row in rows
    )
    return mark + between.join(lines)


def _join_cells(cells: Sequence[str]) -> str:
    return " | ".join(cells)
