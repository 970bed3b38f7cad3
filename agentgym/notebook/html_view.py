"""HTML for notebooks: tables and curves in which every text is escaped."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

__all__ = ["MAX_REPR", "html_curves", "html_table", "short_text"]

MAX_REPR = 1500
"""The most characters of the repr of a run, a result, a trajectory or a configuration."""
MAX_CELL = 2000
"""The most characters of a cell of a table."""
MAX_ROWS = 200
COLORS = ("#2563eb", "#ea580c", "#0d9488", "#9333ea")
WIDTH, HEIGHT = 480, 110


def short_text(text: str, longest: int = MAX_REPR) -> str:
    """Returns the text, its middle left out where it is longer than `longest`."""
    half = longest // 2 - 3
    return text if len(text) <= longest else f"{text[:half]} ... {text[-half:]}"


def html_table(title: str, rows: Sequence[Sequence[object]], below: str = "") -> str:
    """Returns a table whose cells are plain text; `below` is HTML that follows it."""
    visible = rows[:MAX_ROWS]
    lines = ["".join(f"<td {CELL}>{escape(short_text(str(cell), MAX_CELL))}</td>" for cell in row) for row in visible]
    more = f"<p>and {len(rows) - MAX_ROWS} more rows</p>" if len(rows) > MAX_ROWS else ""
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return (
        f'<div class="mathjax_ignore tex2jax_ignore"><b>{escape(short_text(title, 300))}</b>'
        f"<table>{body}</table>{more}{below}</div>"
    )


CELL = 'style="text-align:left;vertical-align:top;white-space:pre-wrap;unicode-bidi:isolate"'


def escape(text: str) -> str:
    """Returns the text as HTML, with control characters and those that turn its direction spelled out."""
    plain = "".join(char if char.isprintable() or char in "\n\t" else f"\\u{ord(char):04x}" for char in text)
    return html.escape(plain)


def html_curves(curves: Mapping[str, Sequence[tuple[float, float]]]) -> str:
    """Returns a picture (SVG) of curves by name, each of points (x, y) in ascending x; empty without two points."""
    points = [point for curve in curves.values() for point in curve]
    xs, ys = [x for x, _ in points], [y for _, y in points]
    if not points or min(xs) == max(xs):
        return ""
    low, high = min(0.0, *ys), max(1.0, *ys)
    x_scale, y_scale = WIDTH / (max(xs) - min(xs)), HEIGHT / (high - low)
    lines, legend = [], []
    for (name, curve), color in zip(((name, curve) for name, curve in curves.items() if curve), COLORS, strict=False):
        path = " ".join(f"{(x - min(xs)) * x_scale + 40:.1f},{(high - y) * y_scale + 8:.1f}" for x, y in curve)
        lines.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="2"/>')
        legend.append(f'<span style="color:{color}">{escape(name)}</span>')
    frame = f'<path d="M40 8V{HEIGHT + 8}H{WIDTH + 40}" fill="none" stroke="gray"/>'
    right, bottom = WIDTH + 40, HEIGHT + 22
    labels = (
        *((36, 14, "end", high), (36, HEIGHT + 8, "end", low)),
        *((40, bottom, "start", min(xs)), (right, bottom, "end", max(xs))),
    )
    texts = "".join(f'<text x="{x}" y="{y}" text-anchor="{anchor}">{value:g}</text>' for x, y, anchor, value in labels)
    size = f'width="{WIDTH + 50}" height="{HEIGHT + 28}"'
    svg = f'<svg {size} font-size="11" fill="gray">{frame}{"".join(lines)}{texts}</svg>'
    return f"<div>{svg}<br>{' &nbsp; '.join(legend)}</div>"
