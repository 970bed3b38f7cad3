"""The progress of a call: a picture that is updated in a notebook, lines on standard error in a script."""

from __future__ import annotations

import sys
import time
from importlib import import_module
from typing import Any

from agentgym.notebook.html_view import html_curves, html_table

__all__ = ["ProgressView"]

PAUSE_S = 0.25
"""The least seconds between two pictures."""
MAX_LINES = 4


class ProgressView:
    """Shows what a call does: `say` a line, `count` episodes, `add` a point of each curve."""

    def __init__(self, title: str, *, is_shown: bool = True) -> None:
        self.title = title
        self.is_shown = is_shown
        self._lines: list[str] = []
        self._curves: dict[str, list[tuple[float, float]]] = {}
        self._handle: Any = None
        self._drawn_at = 0.0

    def say(self, line: str) -> None:
        """Shows a line."""
        self._lines = [*self._lines, line][-MAX_LINES:]
        if self.is_shown and not _in_notebook():
            print(line, file=sys.stderr, flush=True)
        self._draw()

    def count(self, number: int, total: int, remark: str) -> None:
        """Shows that `number` of `total` episodes have been played: as a line at each tenth."""
        if (number - 1) * 10 // total != number * 10 // total:
            self.say(f"episodes {number}/{total}, {remark}")

    def add(self, x: float, **values: float) -> None:
        """Adds a point at `x` to the curve of each name."""
        for name, y in values.items():
            self._curves.setdefault(name, []).append((x, y))
        if time.monotonic() - self._drawn_at > PAUSE_S:
            self._draw()

    def _draw(self) -> None:
        if not (self.is_shown and _in_notebook()):
            return
        self._drawn_at = time.monotonic()
        if self._handle is None:
            self._handle = import_module("IPython.display").display(self, display_id=True)
        else:
            self._handle.update(self)

    def __repr__(self) -> str:
        return "\n".join([self.title, *self._lines])

    def _repr_html_(self) -> str:
        """Returns the curves, and the last lines."""
        return html_table(self.title, [[line] for line in self._lines], html_curves(self._curves))


def _in_notebook() -> bool:
    """True in a process that a notebook runs its cells in, and not in IPython's shell."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return getattr(shell, "kernel", None) is not None
