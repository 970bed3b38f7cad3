"""Words in many pieces, unknown characters, and characters in bytes are named where replies hold many."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.embedded import embedded_folder
from agentgym.trainers.lessons.tokenizer_fit import describe_characters, describe_words
from agentgym.types import Message, ToolCall


def reply(name: str, **arguments: str) -> Message:
    return Message("assistant", "", tool_calls=(ToolCall("a", name, arguments),))


@pytest.fixture(scope="module")
def embedded() -> ChatTokenizer:
    return ChatTokenizer.load(embedded_folder())


def test_words_of_other_environments_are_cut_into_many_tokens(embedded: ChatTokenizer) -> None:
    assert describe_words(embedded, [reply("go", direction="north"), reply("take", thing="lamp")]) == []
    (line,) = describe_words(embedded, [reply("lookup", order="72"), reply("refund", amount="45")])
    assert line.startswith("words in pieces: a token holds 1.9 bytes of the replies' words, and 3 to 6 are usual")
    assert "amount 4" in line and "lookup 3" in line
    assert describe_words(embedded, []) == [] == describe_words(embedded, [reply("", value="72 + 45")])


def test_characters_that_a_tokenizer_does_not_have_are_named() -> None:
    letters = Tokenizer(models.BPE(vocab={"a": 0, "b": 1}, merges=[]))
    tokenizer = ChatTokenizer(letters, template="")
    replies, answers = [Message("assistant", "ab é")], [Message("user", "a☃")]
    assert describe_characters(tokenizer, replies[:0], [Message("user", "a b")]) == []
    (line,) = describe_characters(tokenizer, replies, answers)
    assert line == "unknown characters: the tokenizer has no é ☃, which the replies hold; they are lost"
    (line,) = describe_characters(tokenizer, [], answers)
    assert line == "unknown characters: the tokenizer has no ☃, which the observations hold; they are lost"


def test_characters_that_are_written_in_bytes_are_named_where_replies_hold_many(
    embedded: ChatTokenizer, tokenizer_folder: Path
) -> None:
    for tokenizer in (embedded, ChatTokenizer.load(tokenizer_folder)):
        assert describe_characters(tokenizer, [Message("assistant", "a" * 200 + "☃")], []) == []
        (line,) = describe_characters(tokenizer, [Message("assistant", "a" * 9 + "☃")], [Message("user", "☃☃")])
        assert line == "characters in bytes: replies write ☃ byte by byte, 10% of their text"
