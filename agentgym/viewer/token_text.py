"""The text of one token id as a reader sees it: special tokens whole, byte fragments and controls as escapes."""

from __future__ import annotations

import re
import unicodedata
from functools import cache
from typing import Protocol

__all__ = ["TokenText", "TokenizerLike", "looks_special", "visible"]

_SPECIAL = re.compile(r"<[|｜].+[|｜]>|</?(s|think|tool_call|tool_response|unk|pad|bos|eos)>")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenizerLike(Protocol):
    """What `TokenText` needs of a tokenizer; `transformers`' tokenizers have it."""

    def convert_ids_to_tokens(self, ids: int) -> str | None:
        """The vocabulary entry of one id, in the tokenizer's own alphabet."""

    def decode(self, token_ids: list[int]) -> str:
        """The text of the ids, special tokens included."""


def visible(text: str) -> str:
    """`text` with what a reader cannot see made visible: newlines marked, controls and invisible marks escaped.

    >>> visible("a\\n")
    'a⏎\\n'
    >>> visible("\\u202e")
    '\\\\u202e'
    """
    return "".join(_visible_character(character) for character in text)


def _visible_character(character: str) -> str:
    if character == "\n":
        return "⏎\n"
    if character == "\t":
        return "⇥\t"
    if character == " " or character == "\u200d":  # the joiner holds emoji together
        return character
    if unicodedata.category(character) not in {"Cc", "Cf", "Cs", "Co", "Zl", "Zp"}:
        return character
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def looks_special(text: str) -> bool:
    """Whether a token of this text is one of the chat format's marks, as far as its spelling tells."""
    return _SPECIAL.fullmatch(text) is not None


@cache
def _byte_of_character() -> dict[str, int]:
    """GPT-2's alphabet for byte-level BPE: the character that stands for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(0x100) if byte not in set(printable))
    table.update({chr(0x100 + position): byte for position, byte in enumerate(rest)})
    return table


class TokenText:
    """`decode_token` of a tokenizer: `TokenText(tokenizer)(id)`; a piece of a UTF-8 character reads as `\\xe2\\x82`."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer

    def __call__(self, token_id: int) -> str:
        """The text of one id."""
        text = self._tokenizer.decode([token_id])
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text
        token = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return text
        if match := _BYTE_TOKEN.fullmatch(token):
            return f"\\x{match[1].lower()}"
        table = _byte_of_character()
        if any(character not in table for character in token):
            return text
        return bytes(table[character] for character in token).decode("utf-8", errors="backslashreplace")
