"""Reads YAML of any origin: whatever is wrong with a text is one error, and a small text gives a small value."""

from __future__ import annotations

import yaml

__all__ = ["check_size", "parse_yaml"]

MAX_DEPTH = 100
TOO_DEEP = f"it is nested more than {MAX_DEPTH} levels deep"
MAX_MERGED = 10_000
MAX_VALUES = 1_000_000


Base: type[yaml.SafeLoader | yaml.CSafeLoader] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The parser in C where libyaml is there: it takes a tenth of the time of the one in Python."""


class _Loader(Base):  # type: ignore[misc, valid-type]
    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        super().flatten_mapping(node)
        if len(node.value) > MAX_MERGED:
            raise ValueError(f"its keys `<<` merge more than {MAX_MERGED:,} values")


def parse_yaml(text: str, *, max_values: int = MAX_VALUES) -> object:
    """Returns the value of a YAML or JSON text; raises ValueError, with one line, for anything that is none.

    So is text that is nested more than 100 levels deep, holds itself, or has more than `max_values` values, where those
    that aliases repeat count each time.
    """
    try:
        _check_events(text)
        value = yaml.load(text, _Loader)
        check_size(value, max_values)
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError) as error:  # tags such as `!!int ""`
        raise ValueError(" ".join(str(error).split())[:300] or type(error).__name__) from error
    return value


def _check_events(text: str) -> None:
    """Raises ValueError for text that is nested so deeply that libyaml would end the process."""
    depth = aliases = 0
    for event in yaml.parse(text, _Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        aliases += isinstance(event, yaml.AliasEvent)
        if depth > MAX_DEPTH:
            raise ValueError(TOO_DEEP)
        if aliases > MAX_MERGED:
            raise ValueError(f"it has more than {MAX_MERGED:,} aliases")


def check_size(value: object, max_values: int = MAX_VALUES) -> None:
    """Raises ValueError for a value that is nested too deeply, or of too many values, shared ones counted each time."""
    if _measure(value, {}, 0)[0] > max_values:
        raise ValueError(f"it holds more than {max_values:,} values")


def _measure(value: object, measures: dict[int, tuple[int, int]], depth: int) -> tuple[int, int]:
    """Returns the number of values in a value, and the depth of its containers."""
    if not isinstance(value, dict | list | tuple | set):
        return 1, 0
    if id(value) not in measures:
        if depth == MAX_DEPTH:
            raise ValueError(TOO_DEEP)
        items = [*value, *value.values()] if isinstance(value, dict) else value
        parts = [_measure(item, measures, depth + 1) for item in items]
        measures[id(value)] = 1 + sum(size for size, _ in parts), 1 + max((levels for _, levels in parts), default=0)
    size, levels = measures[id(value)]
    if depth + levels > MAX_DEPTH:
        raise ValueError(TOO_DEEP)
    return size, levels
