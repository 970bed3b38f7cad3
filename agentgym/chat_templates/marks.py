"""Encodes text so that only the template's own marks become mark ids; the text of messages stays plain text."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TypeAlias

from agentgym.chat_templates.tokenizer import ChatTokenizer

__all__ = ["Marks", "pick_guard"]

_NONCHARACTERS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))
_ANGULAR = re.compile(r"<\|.*\|>\Z", re.DOTALL)


class Marks:
    """The tokens that structure a family's chat (`<|im_end|>`, `<tool_call>`), and an encoder for text with them.

    A mark is an added token of the tokenizer that is special, looks like `<|...|>`, is spelled with brackets in the
    template, or is one of `known`, the marks of the family's replies. Message text that spells one is *guarded*
    (`guard` puts an invisible character inside the spelling), goes through the template, and `encode` turns the
    guarded stretch, up to the marks around it, into plain text ids. Text without such a spelling is encoded in one
    call, exactly as `apply_chat_template` does.
    """

    def __init__(self, tokenizer: ChatTokenizer, extra_marks: Collection[str] = ()) -> None:
        self._tokenizer = tokenizer
        backend, template = tokenizer.backend, tokenizer.template + tokenizer.tool_template
        added = backend.get_added_tokens_decoder()
        self.ids: Mapping[str, int] = {
            token.content: index
            for index, token in added.items()
            if token.content in extra_marks or _is_mark(token.content, token.special, template)
        }
        self.texts: Mapping[int, str] = {index: text for text, index in self.ids.items()}
        self._pattern = _alternation(self.ids)
        self._spelled_or_begun = _alternation(self.ids, begun=True)
        self._starts = re.compile(f"(?=(?:{self._spelled_or_begun.pattern})).", re.DOTALL)
        """Matches the first character of each spelling, also of one within another."""
        normalizer = backend.normalizer
        flagged = any(added[index].normalized for index in self.texts)
        self._normalize: Callable[[str], str] | None = normalizer.normalize_str if normalizer and flagged else None

    def guard(self, text: str, guard: str) -> str:
        """Returns `text` with `guard` inside every spelling of a mark, and after the beginning of a mark at its end."""
        text = text if text.isascii() else _without_surrogates(text)
        if not self._is_plain(text):
            return self._starts.sub(lambda match: match[0] + guard, text)
        return text

    def is_plain(self, text: str) -> bool:
        """Returns True if `text` spells no mark, begins none at its end, and is valid Unicode."""
        return (text.isascii() or _without_surrogates(text) == text) and self._is_plain(text)

    def encode(self, text: str, guard: str = "") -> list[int]:
        """Returns the ids of rendered `text`: marks become their ids, except where `guard` is between two marks."""
        if not guard or guard not in text:
            return self._tokenizer.encode(text)
        ids: list[int] = []
        start = position = 0
        for begin, end in [*(match.span() for match in self._pattern.finditer(text)), (len(text), len(text))]:
            if guard in text[position:begin]:
                ids += self._tokenizer.encode(text[start:position])
                ids += self._tokenizer.encode_plain(text[position:begin].replace(guard, ""))
                start = begin
            position = end
        return ids + self._tokenizer.encode(text[start:])

    def split(self, text: str) -> list[tuple[str, int | None]]:
        """Splits `text` at its marks: `(text, None)` for text, `(mark, id)` for a mark."""
        parts: list[tuple[str, int | None]] = []
        position = 0
        for match in self._pattern.finditer(text):
            parts += [(text[position : match.start()], None)] if match.start() > position else []
            parts.append((match[0], self.ids[match[0]]))
            position = match.end()
        return parts + ([(text[position:], None)] if position < len(text) else [])

    def _is_plain(self, text: str) -> bool:
        if self._spelled_or_begun.search(text) is not None:
            return False
        return self._normalize is None or self._pattern.search(self._normalize(text)) is None


def pick_guard(texts: Iterable[str]) -> str:
    """Returns a character that none of `texts` holds: a Unicode noncharacter, or the first free private-use one."""
    joined = "".join(texts)
    for guard in _NONCHARACTERS:
        if guard not in joined:
            return guard
    characters = set(joined)
    return next(chr(code) for code in range(0xF0000, 0x10FFFE) if chr(code) not in characters)


def _is_mark(text: str, special: bool, template: str) -> bool:
    if special or _ANGULAR.match(text):
        return True
    return len(text) > 1 and text[0] in "<[" and text[-1] in ">]" and text in template


def _alternation(marks: Iterable[str], *, begun: bool = False) -> re.Pattern[str]:
    """Returns the pattern of any mark, the longest first; with `begun` also of a mark's beginning at the text's end.

    The marks are one tree of shared prefixes: a list of a thousand alternatives takes half a minute for a megabyte
    of `<`.
    """
    tree: _Tree = {}
    for mark in marks:
        node = tree
        for character in mark:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile("|".join(_branches(tree, begun)) or r"(?!)")


_Tree: TypeAlias = "dict[str, _Tree]"


def _branches(node: _Tree, begun: bool) -> list[str]:
    """Returns what may follow at a node of the tree, one pattern for each next character."""
    return [re.escape(character) + _rest(child, begun) for character, child in node.items() if character]


def _rest(node: _Tree, begun: bool) -> str:
    """Returns a pattern for what follows a character that leads to `node`."""
    is_mark = "" in node
    branches = _branches(node, begun and not is_mark)  # a whole mark goes before the beginning of a longer one
    if is_mark:
        return f"(?:{'|'.join(branches)})?" if branches else ""
    if begun:
        branches.append(r"\Z")
    return branches[0] if len(branches) == 1 else f"(?:{'|'.join(branches)})"


def _without_surrogates(text: str) -> str:
    """Returns `text` with surrogate pairs joined and lone surrogates replaced: tokenizers take only valid Unicode."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text
