"""The text of a recorded HTML page."""

from __future__ import annotations

from html.parser import HTMLParser

__all__ = ["html_text"]

HIDDEN = frozenset({"script", "style", "template", "noscript"})
BLOCKS = frozenset(
    "address article aside blockquote br dd div dl dt figure footer form h1 h2 h3 h4 h5 h6 header hr li main nav ol p"
    " pre section table td th tr ul".split()
)


def html_text(page: str) -> tuple[str, str]:
    """Returns the title and visible text of a page, one line for each block.

    >>> html_text("<title>Otter</title><p>An <b>otter</b> eats.</p><script>x</script>")
    ('Otter', 'An otter eats.')
    """
    reader = _Reader()
    reader.feed(page)
    reader.close()
    lines = (" ".join(line.split()) for line in "".join(reader.parts).split("\n"))
    return " ".join("".join(reader.title).split()), "\n".join(line for line in lines if line)


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.title: list[str] = []
        self.parts: list[str] = []
        self._hidden_tag = ""
        self._in_title = False
        self._in_pre = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in HIDDEN and not self._hidden_tag:
            self._hidden_tag = tag
        self._in_title = self._in_title or (tag == "title" and not self.title)
        self._in_pre = self._in_pre or tag == "pre"
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        if tag == self._hidden_tag:
            self._hidden_tag = ""
        self._in_title = self._in_title and tag != "title"
        self._in_pre = self._in_pre and tag != "pre"
        if tag in BLOCKS:
            self.parts.append("\n")

    def handle_data(self, data: str) -> None:
        if self._in_title:
            self.title.append(data)
        elif not self._hidden_tag:
            self.parts.append(data if self._in_pre else data.replace("\n", " "))
