"""ProgressView is lines on standard error in a script, and a picture that is updated in a notebook."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from agentgym.notebook.html_view import html_curves, html_table
from agentgym.notebook.progress_view import ProgressView


def test_a_script_shows_lines_and_a_tenth_of_the_episodes(capsys: pytest.CaptureFixture[str]) -> None:
    loud, silent = ProgressView("play"), ProgressView("play", is_shown=False)
    for progress in (loud, silent):
        progress.say("training")
        for number in range(1, 51):
            progress.count(number, 50, "success 0.50")
            progress.add(number, success=0.5)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == ["training", *(f"episodes {n}/50, success 0.50" for n in range(5, 51, 5))]


def test_a_notebook_has_one_picture_that_is_updated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pictures: list[str] = []

    class Handle:
        def update(self, progress: ProgressView) -> None:
            pictures.append(progress._repr_html_())

    def display(progress: ProgressView, *, display_id: bool) -> Handle:
        pictures.append(progress._repr_html_())
        return Handle()

    ipython = SimpleNamespace(get_ipython=lambda: SimpleNamespace(kernel=object()))
    monkeypatch.setitem(sys.modules, "IPython", ipython)  # type: ignore[arg-type]
    monkeypatch.setitem(sys.modules, "IPython.display", SimpleNamespace(display=display))  # type: ignore[arg-type]
    progress = ProgressView("<b>")
    progress.add(1, success=0.0)
    progress.add(2, success=1.0)
    progress.say("step 2")
    assert "".join(capsys.readouterr()) == ""
    assert "polyline" in pictures[-1] and "step 2" in pictures[-1] and "<b>&lt;b&gt;</b>" in pictures[-1]
    count = len(pictures)
    for _ in range(100):
        progress.add(3, success=1.0)
    assert len(pictures) <= count + 2  # a picture takes longer than a point


def test_html_is_escaped_and_bounded() -> None:
    page = html_table("<t>", [["<img onerror=x>", "a\x1b[0m\u202eb"], *[["x" * 5000]] * 300], "")
    assert "<img" not in page and "\x1b" not in page and "\u202e" not in page and "&lt;t&gt;" in page
    assert len(page) < 600_000 and "more rows" in page
    assert html_curves({"a": [(0, 1.0)]}) == html_curves({}) == ""
    assert "&lt;s&gt;" in html_curves({"<s>": [(0, 0.5), (1, 3.0)], "none": []})
