"""How exactly a model copies arguments into calls of tools that it never saw: `python benchmarks/copying.py [MODEL]`.

The conversations are those of `make_embedded_large`, from seeds that its training never reaches. A reply counts as
exact if each of its tokens is the likeliest after the true ones before: then greedy sampling gives this reply.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import torch

from agentgym.chat_templates import renderer_for
from agentgym.chat_templates.protocol import Renderer
from agentgym.model.decoder import Decoder
from agentgym.model.model_folder import load_decoder
from agentgym.model.model_name import model_folder
from agentgym.model.packed_layout import PackedLayout
from agentgym.rollout.scores.intervals import share_interval
from agentgym.trainers.lessons.made_up.conversations import encode_dialogue, made_up_conversation
from agentgym.trainers.lessons.made_up.writing import is_written
from agentgym.trainers.lessons.make_embedded_large import word_pieces
from agentgym.types import JSON, Message, ToolCall

FIRST_SEED = 1 << 50
LENGTHS = (4, 8, 16, 32)
"""The characters of an argument's JSON up to which lengths are counted together."""


def kind_of(value: JSON) -> str:
    """The kind of an argument in the table."""
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, int):
        return f"integer of {min(8, len(str(abs(value))))} digits"
    if isinstance(value, float):
        return "number with decimals"
    if isinstance(value, list):
        return "array"
    text = str(value)
    if text.isdigit():
        return "digits as text"
    if re.fullmatch(r"[A-Za-z]+", text):
        return "word or name"
    return "several words" if " " in text else "code, date, address"


def length_of(value: JSON) -> str:
    """The length of an argument in the table."""
    length = len(json.dumps(value, ensure_ascii=False))
    return next((f"up to {most}" for most in LENGTHS if length <= most), f"over {LENGTHS[-1]}")


class Share:
    """How many of all were exact."""

    def __init__(self) -> None:
        self.exact = self.total = 0

    def add(self, is_exact: bool) -> None:
        """Counts one."""
        self.exact += is_exact
        self.total += 1

    def __str__(self) -> str:
        interval = share_interval([1.0] * self.exact + [0.0] * (self.total - self.exact))
        low, high = (interval.low, interval.high) if interval else (0.0, 1.0)
        return f"{self.exact / max(1, self.total):.3f} [{low:.3f}, {high:.3f}] of {self.total}"


def arguments_in(reply: Message, text: str) -> Iterator[tuple[JSON, int, int]]:
    """Yields each argument of a reply's calls with its first character in the reply's text and the one after it."""
    start = 0
    for call in reply.tool_calls:
        assert isinstance(call, ToolCall)
        start = text.index('"arguments": ', start)
        for name, value in call.arguments.items():
            body, label = json.dumps(value, ensure_ascii=False), f"{json.dumps(name, ensure_ascii=False)}: "
            start = text.index(label + body, start) + len(label)
            yield value, start, start + len(body)


@torch.no_grad()
def likeliest(model: Decoder, ids: Sequence[int]) -> list[int]:
    """The likeliest token at each place after the first, given the true ones before."""
    hidden_TE = model.hidden_states(torch.tensor(ids), PackedLayout([len(ids)]))
    return [-1, *model.logits(hidden_TE).argmax(-1).tolist()[:-1]]


def replies_of(ids: Sequence[int], mask: Sequence[bool], stop_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the first place of each learned reply and the one after its end token."""
    start = None
    for place, is_learned in enumerate(mask):
        if is_learned and start is None:
            start = place
        if start is not None and ids[place] in stop_ids:
            yield start, place + 1
            start = None


def measure(model: Decoder, renderer: Renderer, pieces: Sequence[str], size: int) -> dict[str, dict[str, Share]]:
    """The shares of exact replies and arguments, by kind and by length."""
    tables: dict[str, dict[str, Share]] = defaultdict(lambda: defaultdict(Share))
    for seed in range(FIRST_SEED, FIRST_SEED + size):
        dialogue = made_up_conversation(seed, pieces)
        row = encode_dialogue(renderer, dialogue)
        if len(row.ids) > model.config.context_window:
            continue
        guesses = likeliest(model, row.ids)
        replies = [m for n, m in enumerate(dialogue.messages) if m.role == "assistant" and n not in dialogue.mistakes]
        for (start, end), reply in zip(replies_of(row.ids, row.mask, renderer.stop_ids), replies, strict=True):
            right = [guess == token for guess, token in zip(guesses[start:end], row.ids[start:end], strict=True)]
            tables["replies"]["calls" if reply.tool_calls else "text"].add(all(right))
            words = [renderer.decode([token]) for token in row.ids[start:end]]
            ends, before = list(accumulate(map(len, words))), renderer.decode(row.ids[:start])
            for value, first, after in arguments_in(reply, "".join(words)):
                places = [n for n, stop in enumerate(ends) if stop > first and stop - len(words[n]) < after]
                last = places.pop()  # after the value it holds whatever follows
                in_value = words[last][: len(words[last]) - max(0, ends[last] - after)]
                guess = renderer.decode([guesses[start + last]])
                is_exact = all(right[n] for n in places) and guess.startswith(in_value)
                is_copied = is_written(value, before)
                tables["arguments"]["copied" if is_copied else "computed"].add(is_exact)
                if is_copied:
                    tables["copied arguments by conversation"][dialogue.kind].add(is_exact)
                tables["arguments by kind"][kind_of(value)].add(is_exact)
                tables["arguments by length"][length_of(value)].add(is_exact)
    return tables


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default="embedded-large")
    parser.add_argument("--conversations", type=int, default=1000)
    options = parser.parse_args()
    folder: Path = model_folder(options.model)
    tables = measure(load_decoder(folder), renderer_for(folder), word_pieces(folder), options.conversations)
    for title, shares in tables.items():
        print(title)
        for name, share in sorted(shares.items()):
            print(f"  {name:<24}{share}")


if __name__ == "__main__":
    main()
