"""The text of one token id as a reader sees it: special tokens whole, byte fragments and controls as escapes."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

__all__ = ["TokenText", "TokenTexts", "TokenizerLike", "looks_special", "visible"]

_SPECIAL = re.compile(r"<[|｜].+[|｜]>|</?(s|think|tool_call|tool_response|unk|pad|bos|eos)>")
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenizerLike(Protocol):
    """The part of a `tokenizers.Tokenizer` (transformers' `backend_tokenizer`) that `TokenText` needs."""

    def id_to_token(self, id: int) -> str | None:
        """The vocabulary entry of one id, in the tokenizer's own alphabet."""

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of the ids."""

    def get_added_tokens_decoder(self) -> Mapping[int, object]:
        """The tokens outside the vocabulary proper, by id: the marks of the chat format."""


def visible(text: str) -> str:
    """Returns `text` with invisible characters made visible: newlines marked, controls and invisible marks escaped.

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
    """True if a token of this text is one of the chat format's marks, judging by its spelling."""
    return _SPECIAL.fullmatch(text) is not None


@cache
def _byte_of_character() -> dict[str, int]:
    """Returns GPT-2's alphabet for byte-level BPE: the byte of each character."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {chr(byte): byte for byte in printable}
    rest = (byte for byte in range(0x100) if byte not in set(printable))
    table.update({chr(0x100 + position): byte for position, byte in enumerate(rest)})
    return table


class TokenText:
    """`decode_token` of a tokenizer: `TokenText(backend)(id)`; a piece of a UTF-8 character reads as `\\xe2\\x82`."""

    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._tokenizer = tokenizer

    @property
    def special_ids(self) -> frozenset[int]:
        """The ids of the marks, whatever they spell."""
        return frozenset(self._tokenizer.get_added_tokens_decoder())

    def __call__(self, token_id: int) -> str:
        """The text of one id; `⟨id⟩` when the tokenizer has none."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return f"⟨{token_id}⟩"
        text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        if token.startswith("▁") and not text.startswith(" "):
            return f" {text}"  # the decoder takes the first space of a text away
        if "\N{REPLACEMENT CHARACTER}" not in text:
            return text
        if match := _BYTE_TOKEN.fullmatch(token):
            return f"\\x{match[1].lower()}"
        table = _byte_of_character()
        if any(character not in table for character in token):
            return text
        return bytes(table[character] for character in token).decode("utf-8", errors="backslashreplace")


@dataclass(frozen=True, slots=True)
class TokenTexts:
    """The texts of a run's token ids; `reason` says why ids are shown in their place."""

    decode: Callable[[int], str] | None = None
    special_ids: Collection[int] = ()
    reason: str = ""
