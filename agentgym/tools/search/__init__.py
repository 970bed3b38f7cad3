"""Search over a local corpus, and reading of its pages: no network, no server."""

from agentgym.tools.search.document import Document, read_documents
from agentgym.tools.search.index import Hit, SearchIndex
from agentgym.tools.search.index_file import load_index, save_index
from agentgym.tools.search.tools import PageNotRecorded, SearchTools

__all__ = [
    "Document",
    "Hit",
    "PageNotRecorded",
    "SearchIndex",
    "SearchTools",
    "load_index",
    "read_documents",
    "save_index",
]
