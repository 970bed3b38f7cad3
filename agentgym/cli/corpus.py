"""`agentgym corpus index|search|fetch`: makes documents searchable, and shows what the tools would give a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from agentgym.cli.groups import Subcommand, run_group
from agentgym.cli.options import parse_options
from agentgym.cli.terminal import fail, say, show_json
from agentgym.errors import ConfigError
from agentgym.tools.search import PageNotRecorded, SearchIndex, SearchTools, load_index, read_documents, save_index
from agentgym.types import JSON

__all__ = ["main"]

IndexFile = Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="INDEX")]


@dataclass(frozen=True, kw_only=True)
class IndexOptions:
    """Makes documents searchable: a folder of .txt, .md and .html files, or JSONL rows with `url`, `title`, `text`."""

    source: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="DIR|FILE.jsonl")]
    """The documents."""
    output: Annotated[Path, tyro.conf.arg(aliases=["-o"])]
    """The index file to write; an existing one is replaced."""
    json: bool = False
    """Print one line of JSON, and all else on standard error."""


@dataclass(frozen=True, kw_only=True)
class SearchOptions:
    """Searches an index, and shows what the tool `search` would give a model."""

    index: IndexFile
    """The index file."""
    query: Annotated[tyro.conf.Positional[tuple[str, ...]], tyro.conf.arg(metavar="QUERY")]
    """The words to look for."""
    num_results: Annotated[int, tyro.conf.arg(aliases=["-n"])] = 5
    """The most documents to show."""
    json: bool = False
    """Print one line of JSON, and all else on standard error."""


@dataclass(frozen=True, kw_only=True)
class FetchOptions:
    """Reads a recorded document, and shows what the tool `fetch` would give a model."""

    index: IndexFile
    """The index file."""
    url: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="URL")]
    """The document's address in the corpus."""
    page: int = 1
    """The page of the document, from 1."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym corpus ...`."""
    return run_group(
        "corpus",
        args,
        {
            "index": Subcommand("make a folder or a file of documents searchable", _index),
            "search": Subcommand("search an index as the tool does", _search),
            "fetch": Subcommand("read a document as the tool does", _fetch),
        },
    )


def _index(args: Sequence[str]) -> int:
    options = parse_options(IndexOptions, args, prog="agentgym corpus index")
    index = SearchIndex.build(read_documents(options.source))
    save_index(index, options.output)
    num_words = int(index.postings.lengths.sum())
    say(f"{len(index.documents)} documents, {num_words} words: {options.output}")
    say(f"try it: agentgym corpus search {options.output} WORDS")
    if options.json:
        show_json({"index": str(options.output), "num_documents": len(index.documents), "num_words": num_words})
    return 0


def _search(args: Sequence[str]) -> int:
    options = parse_options(SearchOptions, args, prog="agentgym corpus search")
    if not options.query:
        raise ConfigError("there is no query: agentgym corpus search INDEX WORDS")
    index, query = load_index(options.index), " ".join(options.query)
    say(SearchTools(index, num_results=options.num_results).search(query))
    if options.json:
        hits = index.search(query, options.num_results)
        hit_lines: list[JSON] = [
            {"url": hit.document.url, "title": hit.document.title, "score": hit.score, "snippet": hit.snippet}
            for hit in hits
        ]
        show_json({"query": query, "hits": hit_lines})
    return 0


def _fetch(args: Sequence[str]) -> int:
    options = parse_options(FetchOptions, args, prog="agentgym corpus fetch")
    try:
        say(SearchTools(options.index).fetch(options.url, options.page))
    except PageNotRecorded as error:
        fail(str(error))
        return 1
    return 0
