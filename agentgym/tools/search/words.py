"""The words that a text is found by."""

from __future__ import annotations

import re
import unicodedata

__all__ = ["words_of"]

SIGNS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uac00-\ud7af"
"""Kana, Han and Hangul, which are written without spaces: each character is a word."""
WORD = re.compile(rf"[{SIGNS}]|[^\W_{SIGNS}]+")


def words_of(text: str) -> list[str]:
    """Returns the words in order: letters and digits, regardless of case and width; no stemming, no stop words.

    >>> words_of("The Otter's 2nd fish")
    ['the', 'otter', 's', '2nd', 'fish']
    """
    plain = text if text.isascii() else unicodedata.normalize("NFKC", text)
    return WORD.findall(plain.casefold())
