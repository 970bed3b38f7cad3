"""`SearchIndex`: documents ranked by the words of a query."""

from __future__ import annotations

import re
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from agentgym.errors import ConfigError
from agentgym.tools.search.document import Document
from agentgym.tools.search.words import split_words

__all__ = ["Hit", "Postings", "SearchIndex"]

K1, B = 1.2, 0.75
SNIPPET_CHARS = 240
PASSAGE = re.compile(r"(?<=[.!?。！？])\s+|\n+")


@dataclass(frozen=True)
class Hit:
    """A document that was found."""

    document: Document
    score: float
    snippet: str
    """The passage of its text that matches the query best."""


@dataclass(frozen=True, eq=False)
class Postings:
    """The documents of each word: word number w is in `documents[begins[w]:begins[w + 1]]`, `counts` times each."""

    words: tuple[str, ...]
    """The words in alphabetical order."""
    begins: NDArray[np.int64]
    documents: NDArray[np.int32]
    counts: NDArray[np.int32]
    lengths: NDArray[np.int32]
    """The number of words of each document."""


class SearchIndex:
    """Documents and their words, ranked by BM25 (Robertson et al. 1994; k1 = 1.2, b = 0.75, Lucene's idf).

    It is read-only, so any number of episodes and threads can share it. The same documents give the same ranking.
    """

    def __init__(self, documents: Sequence[Document], postings: Postings) -> None:
        self.documents = tuple(documents)
        self.postings = postings

    @classmethod
    def build(cls, documents: Iterable[Document]) -> SearchIndex:
        """Builds the index of documents, of titles and texts. Raises ConfigError for an address used twice."""
        collection: list[Document] = []
        counts: dict[str, tuple[array[int], array[int]]] = {}
        lengths = array("i")
        index_of: dict[str, int] = {}
        for document in documents:
            if index_of.setdefault(document.url, len(collection)) != len(collection):
                raise ConfigError(f"two documents have the address {document.url!r}; an address names one document")
            words = split_words(f"{document.title}\n{document.text}")
            for word, count in Counter(words).items():
                where, how_often = counts.setdefault(word, (array("i"), array("i")))
                where.append(len(collection))
                how_often.append(count)
            lengths.append(len(words))
            collection.append(document)
        if not collection:
            raise ConfigError("there are no documents to index")
        return cls(collection, _postings(counts, lengths))

    def search(self, query: str, limit: int = 5) -> list[Hit]:
        """Returns the best documents that have a word of the query, best first; the earlier one if two are equal."""
        ids = [self._ids[word] for word in dict.fromkeys(split_words(query)) if word in self._ids]
        scores = np.zeros(len(self.documents))
        for number in ids:
            part = slice(self.postings.begins[number], self.postings.begins[number + 1])
            documents, counts = self.postings.documents[part], self.postings.counts[part]
            scores[documents] += self._idf(number) * counts * (K1 + 1) / (counts + self._norms[documents])
        matches = np.flatnonzero(scores)
        best = matches[np.lexsort((matches, -scores[matches]))][: max(limit, 0)]
        weights = {self.postings.words[number]: self._idf(number) for number in ids}
        return [Hit(self.documents[at], float(scores[at]), _snippet(self.documents[at].text, weights)) for at in best]

    def find(self, url: str) -> Document | None:
        """Returns the document of an address, or None.

        If no address matches exactly, the scheme, a fragment and a trailing slash are ignored; the first match counts.
        """
        index = self._exact.get(url.strip(), self._by_plain_url.get(_canonical(url)))
        return None if index is None else self.documents[index]

    def _idf(self, number: int) -> float:
        having = int(self.postings.begins[number + 1] - self.postings.begins[number])
        return float(np.log1p((len(self.documents) - having + 0.5) / (having + 0.5)))

    @cached_property
    def _ids(self) -> dict[str, int]:
        return {word: number for number, word in enumerate(self.postings.words)}

    @cached_property
    def _exact(self) -> dict[str, int]:
        return {document.url: index for index, document in enumerate(self.documents)}

    @cached_property
    def _by_plain_url(self) -> dict[str, int]:
        last_to_first = reversed(list(enumerate(self.documents)))
        return {_canonical(document.url): index for index, document in last_to_first}

    @cached_property
    def _norms(self) -> NDArray[np.float64]:
        lengths = self.postings.lengths.astype(np.float64)
        return K1 * (1 - B + B * lengths / max(float(lengths.mean()), 1.0))


def _postings(counts: dict[str, tuple[array[int], array[int]]], lengths: array[int]) -> Postings:
    words = tuple(sorted(counts))
    begins = np.zeros(len(words) + 1, np.int64)
    np.cumsum([len(counts[word][0]) for word in words], out=begins[1:])
    parts = [[np.frombuffer(counts[word][part], np.int32) for word in words] for part in (0, 1)]
    joined = [np.concatenate(part) if part else np.zeros(0, np.int32) for part in parts]
    return Postings(words, begins, joined[0], joined[1], np.frombuffer(lengths, np.int32).copy())


def _snippet(text: str, weights: dict[str, float]) -> str:
    passages = [passage for passage in PASSAGE.split(text) if passage.strip()] or [""]
    worth = [sum(weights.get(word, 0.0) for word in set(split_words(passage))) for passage in passages]
    best = " ".join(passages[worth.index(max(worth))].split())
    return best if len(best) <= SNIPPET_CHARS else f"{best[:SNIPPET_CHARS].rsplit(' ', 1)[0]} ..."


def _canonical(url: str) -> str:
    url = url.strip().partition("#")[0]
    _, slashes, rest = url.partition("://")
    host, slash, path = (rest if slashes else url).partition("/")
    return f"{host.lower() if slashes else host}{slash}{path}".rstrip("/")
