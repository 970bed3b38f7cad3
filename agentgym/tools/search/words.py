"""The words that a text is found by."""

from __future__ import annotations

import re
import unicodedata

__all__ = ["split_words"]

SIGNS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uf900-\ufaff\uac00-\ud7af"
"""Kana, Han and Hangul, which are written without spaces: each character is a word."""
WORD = re.compile(rf"[{SIGNS}]|[^\W_{SIGNS}]+")


def split_words(text: str) -> list[str]:
    """Returns the words in order: letters and digits, regardless of case and width; no stemming, no stop words.

    >>> split_words("The Otter's 2nd fish")
    ['the', 'otter', 's', '2nd', 'fish']
    """
    plain = text if text.isascii() else unicodedata.normalize("NFKC", text)
    return WORD.findall(plain.casefold())
