"""The tools `search` and `fetch`: a model finds documents of a corpus, and reads them page by page."""

from __future__ import annotations

from pathlib import Path

from agentgym.errors import AgentGymError, ConfigError, nearest
from agentgym.tools.calling.definition import Tool, as_tool, tool
from agentgym.tools.search.index import SearchIndex
from agentgym.tools.search.index_file import load_index

__all__ = ["PageNotRecorded", "SearchTools"]

FEW = 1000
"""The largest corpus in which a near address is looked for: in a larger one that takes seconds."""


class PageNotRecorded(AgentGymError, LookupError):
    """An address that the corpus does not have, or a page beyond a document's last; the message is for the model."""


class SearchTools:
    """Gives an environment the tools `search` and `fetch` over an index: `tools=SearchTools("papers.index").tools`.

    Only the index is read: `fetch` uses no network. One object serves any number of episodes.
    """

    def __init__(self, index: SearchIndex | str | Path, *, num_results: int = 5, page_chars: int = 4000) -> None:
        if num_results < 1 or page_chars < 1:
            raise ConfigError(f"num_results and page_chars are at least 1, got {num_results} and {page_chars}")
        self.index = index if isinstance(index, SearchIndex) else load_index(Path(index))
        self._num_results, self._page_chars = num_results, page_chars

    @property
    def tools(self) -> tuple[Tool, ...]:
        """The two tools, for a ToolEnv."""
        return as_tool(self.search), as_tool(self.fetch)

    @tool(blocking=False)
    def search(self, query: str) -> str:
        """Searches the corpus. Gives titles, addresses and a passage of the best documents.

        Args:
            query: The words to look for.
        """
        hits = self.index.search(query, self._num_results)
        if not hits:
            return "No document has a word of that query."
        return "\n".join(
            f"{number}. {hit.document.title or '(no title)'}\n   {hit.document.url}\n   {hit.snippet}"
            for number, hit in enumerate(hits, 1)
        )

    @tool(blocking=False)
    def fetch(self, url: str, page: int = 1) -> str:
        """Reads a document of the corpus.

        Args:
            url: Its address, as search gives it.
            page: Which page of it, from 1.
        """
        document = self.index.find(url)
        if document is None:
            documents = self.index.documents
            near = nearest(url, (document.url for document in documents)) if len(documents) <= FEW else ""
            raise PageNotRecorded(
                f"no page {url[:200]!r} is recorded{near or '.'} search gives the addresses there are"
            )
        pages = pages_of(document.text, self._page_chars)
        if not 1 <= page <= len(pages):
            raise PageNotRecorded(f"{document.url} has {len(pages)} pages, from 1; there is no page {page}")
        more = f"\n[page {page} of {len(pages)}]" if len(pages) > 1 else ""
        return f"{document.title}\n{pages[page - 1]}{more}"


def pages_of(text: str, page_chars: int) -> list[str]:
    """Splits a text into pages of at most `page_chars`, between lines or words; joined they are the text.

    >>> pages_of("one two three", 8)
    ['one two ', 'three']
    """
    pages, begin = [], 0
    while len(text) - begin > page_chars:
        window = text[begin : begin + page_chars]
        cut = window.rfind("\n") + 1
        if cut <= page_chars // 2:
            cut = window.rfind(" ") + 1
        if cut <= page_chars // 2:
            cut = page_chars
        pages.append(text[begin : begin + cut])
        begin += cut
    return [*pages, text[begin:]]
