"""A tokenizer against the texts of a lesson: words in many pieces, and characters that it does not have."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from agentgym.chat_templates.formats.protocol import argument_strings
from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.types import Message, ToolCall

__all__ = ["describe_characters", "describe_words"]

WORD = re.compile(r"[^\W\d_]+")
MIN_WORD_BYTES = 2.5
"""The bytes of a word that one token holds on average, below which words are in many pieces. The tokenizers of Qwen,
Mistral Nemo and gpt-oss hold 2.8 to 7.5 in seven languages, names and code; the embedded one 5 in the words of its own
environments, and 1 to 2.3 in those of others."""
MAX_BYTE_SHARE = 0.01
"""The share of the replies' characters above which those that are written byte by byte are named."""
NUM_NAMED = 6


def describe_words(tokenizer: ChatTokenizer, replies: Iterable[Message]) -> list[str]:
    """Returns a line if the words of replies are cut into many tokens, as a list."""
    words = Counter(word for reply in replies for text in _texts(reply) for word in WORD.findall(text))
    sizes = {word: min(len(tokenizer.encode(word)), len(tokenizer.encode(f" {word}"))) for word in words}
    num_tokens = sum(number * sizes[word] for word, number in words.items())
    num_bytes = sum(number * len(word.encode()) for word, number in words.items())
    if num_bytes >= MIN_WORD_BYTES * num_tokens:
        return []
    hardest = sorted(words, key=lambda word: -sizes[word] * words[word])[:NUM_NAMED]
    examples = ", ".join(f"{word} {sizes[word]}" for word in hardest)
    return [
        f"words in pieces: a token holds {num_bytes / num_tokens:.1f} bytes of the replies' words, and 3 to 6 are usual"
        f" ({examples} tokens); the model learns them piece by piece"
    ]


def describe_characters(tokenizer: ChatTokenizer, replies: Sequence[Message], answers: Sequence[Message]) -> list[str]:
    """Returns a line on characters that the tokenizer loses, and one on those that replies write byte by byte."""
    in_replies = Counter(_characters(replies))
    lost, in_bytes = [], []
    for character in dict.fromkeys([*in_replies, *_characters(answers)]):
        ids = tokenizer.encode(character)
        if unicodedata.normalize("NFKC", character) not in unicodedata.normalize("NFKC", tokenizer.decode(ids)):
            lost.append(character)
        elif character in in_replies and any("\ufffd" in tokenizer.decode([token]) for token in ids):
            in_bytes.append(character)
    lines = []
    if lost:
        where = "replies" if any(character in in_replies for character in lost) else "observations"
        lines.append(
            f"unknown characters: the tokenizer has no {_join_characters(lost)}, which the {where} hold; they are lost"
        )
    share = sum(in_replies[character] for character in in_bytes) / max(1, in_replies.total())
    if share > MAX_BYTE_SHARE:
        lines.append(
            f"characters in bytes: replies write {_join_characters(in_bytes)} byte by byte, {share:.0%} of their text"
        )
    return lines


def _join_characters(characters: Sequence[str]) -> str:
    more = len(characters) - NUM_NAMED
    return " ".join(characters[:NUM_NAMED]) + (f" and {more} more" if more > 0 else "")


def _characters(messages: Iterable[Message]) -> Iterator[str]:
    return (character for message in messages for character in "".join(_texts(message)) if not character.isspace())


def _texts(message: Message) -> Iterator[str]:
    """Yields the text of a message, and the names and the strings of its calls."""
    yield message.content
    yield message.reasoning or ""
    yield from (call.name for call in message.tool_calls if isinstance(call, ToolCall))
    yield from argument_strings(message)
