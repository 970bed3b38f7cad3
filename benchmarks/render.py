"""The cost of a turn: `python benchmarks/render.py [--model FOLDER ...] [--templates FOLDER --tokenizers FOLDER]`.

An episode of T turns, each a call of 60 tokens and a result of 40 words, through `render` once and `extend` every turn;
also the whole conversation rendered again at every turn. Milliseconds a turn at T = 4 and T = 64, and their ratio:
about 1 is linear in the new text. CPU time, the least of the repeats, each of 64 turns (16 short episodes or a long
one), so that a busy machine disturbs both alike. Without arguments the shipped model; with `--templates` (files
NAME.jinja) and `--tokenizers` (the unpacked folders that `stand_ins.py` names) every
template over the nearest tokenizer.
"""

from __future__ import annotations

import argparse
import logging
import time
from collections.abc import Iterator
from pathlib import Path

from stand_ins import STAND_INS, stand_in_tokenizer, with_marks
from tokenizers import Tokenizer

import agentgym.embedded
from agentgym.chat_templates import TemplateRenderer, renderer_for
from agentgym.errors import RenderError
from agentgym.types import Message, ToolCall, ToolSpec

SHORT, LONG = 4, 64
GO = ToolSpec("go", "Walks.", {"type": "object", "properties": {"to": {"type": "string", "description": "Where."}}})
ASK = Message("user", "Find the way out.")
RESULT = "You are in a small room. A lamp stands on a table. Exits: north, south. The door to the north is locked. " * 2


def renderers(options: argparse.Namespace) -> Iterator[tuple[str, TemplateRenderer]]:
    """Yields the renderers to measure, by name."""
    if options.templates is None:
        for folder in options.model or [Path(agentgym.embedded.__file__).parent]:
            yield Path(folder).name, renderer_for(folder)
        return
    backends = {
        nearest: with_marks(
            Tokenizer.from_file(str(options.tokenizers / nearest / "tokenizer.json")), nearest, options.templates
        )
        for nearest in sorted({stand_in.nearest for stand_in in STAND_INS.values()})
    }
    for name, stand_in in STAND_INS.items():
        template = (options.templates / f"{name}.jinja").read_text(encoding="utf-8")
        yield name, renderer_for(stand_in_tokenizer(name, backends[stand_in.nearest], template))


def turn(number: int, takes_results: bool) -> tuple[Message, Message]:
    """Returns a reply and its answer."""
    if not takes_results:
        return Message("assistant", "I walk north and look around. " * 4), Message("user", RESULT)
    call = ToolCall(f"{number:09d}", "go", {"to": "north, then to the lamp and back. " * 4})
    return Message("assistant", "", tool_calls=(call,)), Message("tool", RESULT, tool_call_id=call.id, name="go")


def extended_ms(renderer: TemplateRenderer, turns: int, takes_results: bool) -> float:
    """Returns milliseconds a turn, without the first prompt."""
    ids = renderer.render([ASK], [GO])
    sampled = [*renderer.tokenizer.encode("north, then to the lamp and back. " * 8), renderer.stop_ids[-1]]
    started = time.process_time()
    for number in range(turns):
        ids += sampled
        ids += renderer.extend(ids, [turn(number, takes_results)[1]])
    return (time.process_time() - started) * 1000 / turns


def rerendered_ms(renderer: TemplateRenderer, turns: int, takes_results: bool) -> float:
    """Returns milliseconds a turn if every prompt is rendered from the start."""
    messages = [ASK]
    started = time.process_time()
    for number in range(turns):
        messages += turn(number, takes_results)
        renderer.render(messages, [GO])
    return (time.process_time() - started) * 1000 / turns


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, nargs="+")
    parser.add_argument("--templates", type=Path)
    parser.add_argument("--tokenizers", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    if (options.templates is None) is not (options.tokenizers is None):
        parser.error("--templates and --tokenizers go together: the templates need tokenizers")
    logging.disable(logging.WARNING)
    print(f"{'':48}{'extend, ms a turn':^28}{'rendered anew, ms a turn':^28}")
    print(f"{'template':48}" + f"{f'T={SHORT}':>9}{f'T={LONG}':>9}{'ratio':>9} " * 2)
    for name, renderer in renderers(options):
        takes_results = "tool" not in renderer.refusals
        row = f"{name[:47]:48}"
        for measure in (extended_ms, rerendered_ms):
            try:
                short, long = (
                    min(
                        sum(measure(renderer, turns, takes_results) for _ in range(LONG // turns)) * turns / LONG
                        for _ in range(options.repeats)
                    )
                    for turns in (SHORT, LONG)
                )
                row += f"{short:9.3f}{long:9.3f}{long / short:9.2f} "
            except RenderError as error:
                row += f" {str(error)[:60]}"
        print(row, flush=True)


if __name__ == "__main__":
    main()
