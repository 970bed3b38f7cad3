"""The documents of a corpus, and the reading of their files."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from agentgym.errors import NOT_JSON, ConfigError
from agentgym.tools.search.html_text import html_text

__all__ = ["Document", "read_documents"]

TEXT_KEYS = ("text", "contents", "content")
URL_KEYS = ("url", "id", "_id")


@dataclass(frozen=True, slots=True)
class Document:
    """A page of a corpus: `Document("https://example.org/otter", "Otter", "An otter eats fish.")`."""

    url: str
    """The address in the corpus: the URL that was recorded, or a path."""
    title: str
    text: str

    def __post_init__(self) -> None:
        if not self.url or self.url.split() != [self.url]:
            raise ConfigError(f"a document has an address without spaces, got {self.url!r:.80}")


def read_documents(path: Path) -> Iterator[Document]:
    """Yields the documents of a JSONL file, or of a folder's .txt, .md and .html files, in the order of their paths.

    A row has a `text` (or `contents`), a `url` (or `id`) and optionally a `title`; other keys are ignored. A file's
    address is its path in the folder, with spaces as `%20`. Raises ConfigError with the location of the fault.
    """
    if path.is_dir():
        yield from _from_folder(path)
    elif path.suffix in (".jsonl", ".ndjson"):
        yield from _from_jsonl(path)
    else:
        raise ConfigError(f"a corpus is a folder of texts or a .jsonl file; {str(path)!r} is neither")


def _from_folder(folder: Path) -> Iterator[Document]:
    readers: dict[str, Callable[[str], tuple[str, str]]] = {".txt": _plain, ".md": _markdown, ".html": html_text}
    readers[".htm"] = html_text
    paths = sorted(path for path in folder.rglob("*") if path.suffix.lower() in readers and path.is_file())
    if not paths:
        raise ConfigError(f"there is no .txt, .md or .html file in {str(folder)!r}")
    for path in paths:
        title, text = readers[path.suffix.lower()](_read(path))
        yield Document(path.relative_to(folder).as_posix().replace(" ", "%20"), title or path.stem, text)


def _plain(text: str) -> tuple[str, str]:
    return "", text


def _markdown(text: str) -> tuple[str, str]:
    first = text.lstrip().partition("\n")[0]
    return (first.lstrip("#").strip() if first.startswith("#") else ""), text


def _from_jsonl(path: Path) -> Iterator[Document]:
    for number, line in enumerate(_read(path).split("\n"), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except NOT_JSON as error:
            raise ConfigError(f"{path}, line {number} is not JSON: {error}") from None
        text, url = (_first(row, keys) for keys in (TEXT_KEYS, URL_KEYS))
        if text is None or url is None:
            raise ConfigError(f"{path}, line {number}: a row has a text and a url (or an id), got {line[:80]!r}")
        try:
            yield Document(url, str(row.get("title") or ""), text)
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None


def _first(row: object, keys: tuple[str, ...]) -> str | None:
    values = [row[key] for key in keys if key in row] if isinstance(row, dict) else []
    return str(values[0]) if values and isinstance(values[0], str | int) else None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"cannot read {str(path)!r}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{str(path)!r} is not UTF-8 text: {error}") from error
