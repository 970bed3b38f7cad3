"""Token texts show what is there: marks whole, pieces of characters as bytes, invisible characters as escapes."""

from __future__ import annotations

import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from agentgym.viewer import TokenText, visible
from agentgym.viewer.token_text import looks_special


@pytest.fixture(scope="module")
def byte_level() -> Tokenizer:
    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({symbol: index for index, symbol in enumerate([*symbols, "âĤ"])}, [("â", "Ĥ")]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken("<|im_end|>", special=True)])
    backend.add_tokens([AddedToken("<tool_call>", special=False)])
    return backend


def test_pieces_of_a_character_read_as_their_bytes(byte_level: Tokenizer) -> None:
    text = TokenText(byte_level)
    assert [text(i) for i in byte_level.encode("€ a").ids] == ["\\xe2\\x82", "\\xac", " ", "a"]


def test_marks_are_whole_and_known(byte_level: Tokenizer) -> None:
    text = TokenText(byte_level)
    ids = byte_level.encode("<|im_end|><tool_call>").ids
    assert [text(i) for i in ids] == ["<|im_end|>", "<tool_call>"]
    assert text.special_ids == set(ids)
    assert text(10**6) == "⟨1000000⟩"


def test_a_sentencepiece_space_and_byte_are_kept() -> None:
    backend = Tokenizer(models.BPE({"▁the": 0, "<0xE2>": 1, "<unk>": 2}, [], byte_fallback=True, unk_token="<unk>"))
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    text = TokenText(backend)
    assert [text(0), text(1)] == [" the", "\\xe2"]


def test_what_cannot_be_seen_is_escaped() -> None:
    assert visible("a\n\tb\r") == "a⏎\n⇥\tb\\x0d"
    assert visible("\u202e\u200b\U000e0041") == "\\u202e\\u200b\\U000e0041"
    assert visible("é ü 漢 👩‍🚀") == "é ü 漢 👩‍🚀"


@given(st.text())
def test_no_control_character_reaches_the_page_but_the_marked_newline_and_tab(text: str) -> None:
    text_shown = visible(text)
    hidden = [c for c in text_shown if unicodedata.category(c) in {"Cc", "Cf", "Cs"} and c not in "\n\t\u200d"]
    assert not hidden
    assert text_shown.count("\n") == text.count("\n")


@pytest.mark.parametrize(
    ("text", "special"),
    [("<|im_start|>", True), ("<tool_call>", True), ("</think>", True), ("<s>", True), ("<", False), ("a<|b", False)],
)
def test_marks_are_told_by_their_spelling(text: str, special: bool) -> None:
    assert looks_special(text) is special
