"""BM25 as its formula says, index files that are stable and checked, documents that are read or refused by place."""

from __future__ import annotations

import json
import math
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentgym.errors import ConfigError
from agentgym.tools.search import Document, SearchIndex, load_index, read_documents, save_index
from agentgym.tools.search.html_text import html_text
from agentgym.tools.search.words import split_words

OTTER = Document("wiki/otter", "Otter", "The otter eats fish. It lives in rivers.\nAn otter swims well.")
HERON = Document("https://Example.org/heron/", "Heron", "The heron eats fish and frogs.")
STONE = Document("wiki/stone", "Stone", "A stone lies in the river for a thousand years.")
PAGES = [OTTER, HERON, STONE]


def scored_by_hand(texts: list[str], query: str) -> list[float]:
    """BM25 word by word, from the formula."""
    documents = [Counter(text.split()) for text in texts]
    mean = sum(sum(counts.values()) for counts in documents) / len(documents)
    scores = []
    for counts in documents:
        total = 0.0
        for word in dict.fromkeys(query.split()):
            having = sum(word in words for words in documents)
            idf = math.log(1 + (len(documents) - having + 0.5) / (having + 0.5))
            norm = 1.2 * (1 - 0.75 + 0.75 * sum(counts.values()) / mean)
            total += idf * counts[word] * 2.2 / (counts[word] + norm) if counts[word] else 0.0
        scores.append(total)
    return scores


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.sampled_from("abcdef"), min_size=1, max_size=12).map(" ".join), min_size=1, max_size=8),
    st.lists(st.sampled_from("abcdefg"), min_size=1, max_size=4).map(" ".join),
)
def test_scores_are_those_of_the_formula(texts: list[str], query: str) -> None:
    index = SearchIndex.build(Document(f"d{number}", "", text) for number, text in enumerate(texts))
    scores = {hit.document.url: hit.score for hit in index.search(query, len(texts))}
    expected = {f"d{number}": score for number, score in enumerate(scored_by_hand(texts, query)) if score}
    assert scores == pytest.approx(expected)
    assert list(scores.values()) == sorted(scores.values(), reverse=True)


def test_the_best_document_comes_first_with_the_passage_that_matches() -> None:
    index = SearchIndex.build(PAGES)
    hits = index.search("Which OTTER swims?")
    assert (hits[0].document, hits[0].snippet) == (OTTER, "An otter swims well.")
    assert [hit.document.url for hit in index.search("fish")] == [HERON.url, OTTER.url]
    assert index.search("fish", 1)[0].document == HERON
    assert index.search("quantum") == index.search("") == []


def test_equal_documents_are_ranked_by_their_place() -> None:
    index = SearchIndex.build(Document(f"d{number}", "", "the same words") for number in range(20))
    assert [hit.document.url for hit in index.search("same", 20)] == [f"d{number}" for number in range(20)]


def test_addresses_are_found_however_they_are_written() -> None:
    index = SearchIndex.build(PAGES)
    for url in (
        HERON.url,
        "http://example.org/heron",
        "https://EXAMPLE.ORG/heron#food",
        " https://example.org/heron/ ",
    ):
        assert index.find(url) == HERON
    assert index.find("wiki/otter") == OTTER
    assert index.find("https://example.org/Heron") is None
    with pytest.raises(ConfigError, match="two documents have the address 'wiki/otter'"):
        SearchIndex.build([OTTER, STONE, OTTER])
    with pytest.raises(ConfigError, match="no documents"):
        SearchIndex.build([])


def test_each_document_is_found_by_its_own_address() -> None:
    pages = [Document(url, "", url) for url in ("page#1", "page#2", "http://a/b", "https://a/b", "a/b/", "a/b")]
    index = SearchIndex.build(pages)
    assert [index.find(page.url) for page in pages] == pages
    assert (index.find("page"), index.find("https://A/b/#top"), index.find("page#3")) == (pages[0], pages[2], pages[0])


def test_words_are_those_of_any_script() -> None:
    assert split_words("The Otter's ２nd café_au-lait") == ["the", "otter", "s", "2nd", "café", "au", "lait"]
    assert split_words("水獺 eats 魚") == ["水", "獺", "eats", "魚"]
    assert split_words("\ud800 ?") == []


# ---- the file


def test_the_same_documents_give_the_same_file_and_the_same_answers(tmp_path: Path) -> None:
    first, again = tmp_path / "a.index", tmp_path / "b.index"
    save_index(SearchIndex.build(PAGES), first)
    save_index(load_index(first), again)
    assert first.read_bytes() == again.read_bytes()
    built, loaded = SearchIndex.build(PAGES), load_index(again)
    for query in ("otter", "the river", "fish frogs"):
        assert built.search(query) == loaded.search(query)
    assert loaded.documents == tuple(PAGES)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.index", "b.index"]


def test_the_format_is_what_it_is_said_to_be(tmp_path: Path) -> None:
    path = tmp_path / "a.index"
    save_index(SearchIndex.build([Document("u", "T", "b a b")]), path)
    magic, header, body = path.read_bytes().split(b"\n", 2)
    assert magic == b"agentgym search index 1"
    sizes = json.loads(header)["sections"]
    assert sizes == {"documents": 19, "words": 5, "begins": 32, "postings": 12, "counts": 12, "lengths": 4}
    assert body.startswith(b'["u", "T", "b a b"]a\nb\nt')
    counts = np.frombuffer(body[-16:-4], "<i4")
    assert counts.tolist() == [1, 2, 1]


def test_a_torn_file_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "pages.index"
    save_index(SearchIndex.build(PAGES), path)
    whole = path.read_bytes()
    for size in (*range(0, len(whole), 37), len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(ConfigError, match=r"pages\.index"):
            load_index(path)
    for place in range(0, len(whole), 23):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(ConfigError, match=r"pages\.index"):
            load_index(path)
    path.write_bytes(whole.replace(b"index 1", b"index 9", 1))
    with pytest.raises(ConfigError, match="of version 9, this reads 1"):
        load_index(path)
    with pytest.raises(ConfigError, match="cannot read the index"):
        load_index(tmp_path / "none.index")
    with pytest.raises(ConfigError, match="cannot write the index"):
        save_index(SearchIndex.build(PAGES), tmp_path / "no" / "such.index")


def test_an_index_replaces_an_index_and_nothing_else(tmp_path: Path) -> None:
    rows, place = tmp_path / "rows.jsonl", tmp_path / "rows.index"
    rows.write_text('{"url": "u", "text": "t"}\n', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"rows.jsonl' is there and is not a search index: give another name"):
        save_index(SearchIndex.build(read_documents(rows)), rows)
    for pages in (PAGES, [OTTER]):
        save_index(SearchIndex.build(pages), place)
        assert load_index(place).documents == tuple(pages)
    for folder in (tmp_path, Path(), Path("/")):
        with pytest.raises(ConfigError, match="cannot write the index"):
            save_index(SearchIndex.build(PAGES), folder)
    assert [page.url for page in read_documents(rows)] == ["u"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.index", "rows.jsonl"]


# ---- documents


def test_a_folder_is_read_in_the_order_of_its_paths(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "my notes.md").write_text("# Otters\nThey swim.", encoding="utf-8")
    (tmp_path / "a.txt").write_text("Stones lie.", encoding="utf-8")
    (tmp_path / "c.html").write_text("<title>Heron</title><p>It <b>flies</b>.</p>", encoding="utf-8")
    (tmp_path / "d.png").write_bytes(b"\x89PNG")
    assert list(read_documents(tmp_path)) == [
        Document("a.txt", "a", "Stones lie."),
        Document("b/my%20notes.md", "Otters", "# Otters\nThey swim."),
        Document("c.html", "Heron", "It flies."),
    ]


def test_a_byte_order_mark_is_no_part_of_a_text(tmp_path: Path) -> None:
    (tmp_path / "a.md").write_text("# Otters\nThey swim.", encoding="utf-8-sig")
    assert list(read_documents(tmp_path)) == [Document("a.md", "Otters", "# Otters\nThey swim.")]
    (tmp_path / "rows.jsonl").write_text('{"url": "u", "text": "t"}', encoding="utf-8-sig")
    assert list(read_documents(tmp_path / "rows.jsonl")) == [Document("u", "", "t")]


def test_html_is_read_as_it_is_seen() -> None:
    head = "<title>A &amp; B</title><style>p{}</style><h1>One</h1>"
    page = f"{head}<p>two\n <i>three</i><script>x<y</script><br>four<pre>a\nb</pre>"
    assert html_text(page) == ("A & B", "One\ntwo three\nfour\na\nb")


def test_rows_are_read_and_what_is_wrong_is_named_by_its_line(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(
        '{"id": 7, "contents": "seven"}\n\n{"url": "u", "title": "T", "text": "t\u2028t"}\n', encoding="utf-8"
    )
    assert list(read_documents(path)) == [Document("7", "", "seven"), Document("u", "T", "t\u2028t")]
    for row, message in (
        ("{", "line 3 is not JSON"),
        ('{"url": "u"}', "line 3: a row has a text and a url"),
        ("[1]", "line 3: a row"),
        ('{"url": "a b", "text": ""}', "line 3: a document has an address without spaces"),
    ):
        path.write_text('{"id": "a", "text": ""}\n{"id": "b", "text": ""}\n' + row, encoding="utf-8")
        with pytest.raises(ConfigError, match=message):
            list(read_documents(path))
    for place, message in ((tmp_path / "x.csv", "neither"), (tmp_path / "no.jsonl", "cannot read")):
        with pytest.raises(ConfigError, match=message):
            list(read_documents(place))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"there is no \.txt"):
        list(read_documents(tmp_path / "empty"))
