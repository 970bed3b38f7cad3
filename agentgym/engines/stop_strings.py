"""Stop strings: texts that end a reply, however its tokens split them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import TypeAlias

from agentgym.errors import ConfigError

__all__ = ["Decode", "ends_with_stop", "find_stop", "may_end_stop", "stop_strings"]

Decode: TypeAlias = Callable[[Sequence[int]], str]
"""Returns the text of ids, special tokens included."""


def stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    """Returns stop strings as a tuple, one alone too; raises ConfigError for an empty one."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if not all(stops):
        raise ConfigError(f'stop is a list of texts that are not empty, such as ["</answer>"], got {stop!r}')
    return stops


def find_stop(ids: Sequence[int], stop: Sequence[str], decode: Decode) -> tuple[int, str] | None:
    """Returns how many ids it takes to complete the first stop string, and that string; None if there is none.

    The text of fewer ids begins that of more, except for the bytes of an incomplete character at its end.
    """
    text = decode(ids)
    if not any(part in text for part in stop):
        return None
    num_ids = bisect_left(range(len(ids)), True, key=lambda number: any(part in decode(ids[:number]) for part in stop))
    text = decode(ids[:num_ids])
    return num_ids, min((part for part in stop if part in text), key=lambda part: text.find(part) + len(part))


def may_end_stop(index: int, stop: Sequence[str], decode: Decode) -> bool:
    """Returns False for an id that surely completes no stop string, because its text lacks their last characters.

    The text of an id alone may lack spaces, and has U+FFFD in place of a part of a character.
    """
    text = decode([index])
    return "\ufffd" in text or any(part[-1] in text or part[-1].isspace() for part in stop)


def ends_with_stop(ids: Sequence[int], stop: Sequence[str], decode: Decode) -> bool:
    """Returns True if the last of the ids completes a stop string; it looks at the whole reply only if it may."""
    reach = 1 + max(len(part.encode()) for part in stop)  # an id has a byte or more, the first one may lose a space
    tail = decode(ids[-reach:])
    return any(part in tail for part in stop) and find_stop(ids, stop, decode) is not None
