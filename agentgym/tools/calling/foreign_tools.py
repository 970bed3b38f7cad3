"""Tools that come from elsewhere, such as a server or a document: their names, and those that cannot be offered."""

from __future__ import annotations

import functools
import hashlib
import logging
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from agentgym.errors import ConfigError, ToolSchemaError, nearest
from agentgym.tools.calling.definition import Tool

__all__ = ["fit_names", "make_tools", "warn_once"]

log = logging.getLogger(__name__)
MAX_CHARS = 64
NUM_DIGITS = 8
MAX_REASONS = 3
"""The most reasons that one warning gives."""
MAX_REASON_CHARS = 200


def fit_names(names: Iterable[str], others: str = "_-") -> list[str]:
    """Returns a tool's name for each of `names`, which are distinct: ASCII letters, digits and `others`, at most 64.

    Other characters become `_`, and a first digit gets one before it. A name that is too long, or that another has,
    ends in a digest of the original.

    >>> fit_names(["docs/read", "1password"])
    ['docs_read', '_1password']
    """
    names = list(names)
    used_names = set(names)
    fitted = []
    for name in names:
        short = re.sub(rf"[^A-Za-z0-9{re.escape(others)}]+", "_", name)
        if name and not re.match(r"[A-Za-z_]", short):
            short = f"_{short}"
        if len(short) > MAX_CHARS or (short != name and short in used_names):
            digest = hashlib.sha256(name.encode("utf-8", "replace")).hexdigest()[:NUM_DIGITS]
            short = f"{short[: MAX_CHARS - NUM_DIGITS - 1]}_{digest}"
        used_names.add(short)
        fitted.append(short)
    return fitted


def make_tools(
    owner: str,
    makers: Mapping[str, Callable[[], Tool]],
    names: Sequence[str] | None,
    aliases: Mapping[str, str],
    others: Sequence[str] = (),
) -> list[Tool]:
    """Returns the tools of `names`, or all that can be made: one warning counts the rest, `others` included.

    `makers` make the tools by their names, and `aliases` are further names for them. Raises ConfigError for a name that
    `owner` lacks, ToolSchemaError for one whose tool cannot be made, and if none can.
    """
    real_names = {**aliases, **{name: name for name in makers}}
    for name in names or ():
        if name not in real_names:
            hint = nearest(name, real_names) or f"; it has {', '.join(makers) or 'none'}"
            raise ConfigError(f"{owner} has no tool {name!r}{hint}")
    tools, reasons = [], list(others)
    for name in makers if names is None else names:
        try:
            tools.append(makers[real_names[name]]())
        except (ToolSchemaError, RecursionError) as error:
            reason = f"tool {name!r}: {str(error).removeprefix(f'{owner}: ').removeprefix(f'tool {name!r}: ')}"
            if names is not None:
                raise ToolSchemaError(f"{owner}: {reason}") from None
            reasons.append(reason[:MAX_REASON_CHARS])
    if reasons and not tools:
        raise ToolSchemaError(f"{owner} has no tool that can be offered: {reasons[0]}")
    if reasons:
        more = f"; and {len(reasons) - MAX_REASONS} more" if len(reasons) > MAX_REASONS else ""
        first_reasons = "; ".join(reasons[:MAX_REASONS])
        total = len(makers) + len(others)
        warn_once(f"{owner}: {len(reasons)} of {total} tools cannot be offered and are left out: {first_reasons}{more}")
    return tools


@functools.lru_cache(maxsize=1024)
def warn_once(text: str) -> None:
    """Logs a warning, the first time in this process."""
    log.warning("%s", text)
