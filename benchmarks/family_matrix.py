"""Measures the properties of each model family on a folder of chat templates, and prints `docs/families.md`.

A template is held to the checks of `agentgym models check`, with a stand-in for its tokenizer.

    python benchmarks/family_matrix.py FOLDER_OF_TEMPLATES > docs/families.md
"""

from __future__ import annotations

import argparse
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from stand_ins import STAND_INS, StandIn
from tokenizers import Tokenizer

from agentgym.chat_templates.families import family_of, renderer_for
from agentgym.chat_templates.formats.protocol import ReplyFormat
from agentgym.chat_templates.formats.registry import FORMATS
from agentgym.chat_templates.jinja_template import ChatTemplate, message_dict, tool_dict
from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.embedded import embedded_folder
from agentgym.errors import RenderError
from agentgym.trainers.model_check.findings import CheckOutcome, CheckResult, TemplateReport
from agentgym.trainers.model_check.reference import TransformersReference
from agentgym.trainers.model_check.template import check_chat_template
from agentgym.types import JSON, Message, ToolCall, ToolSpec

COLUMNS = {
    "render": "render = template",
    "shown": "all is shown",
    "extend": "extend exact",
    "parse": "parse inverts",
    "several_calls": "several calls",
    "reasoning": "reasoning",
    "malformed": "malformed kept",
    "prefix": "prefix-preserving",
}
"""The heading of each column, by the property of `check_chat_template`."""
CELLS = {CheckOutcome.OK: "yes", CheckOutcome.FAILED: "**no**", CheckOutcome.SKIPPED: "–"}
MARK = re.compile(
    r"<[|｜][^'\"{}\s<>]+?[|｜]>|<\|?[a-z_:]+\|?>|</[a-z_:]+>|<SPECIAL_\d+>|\[/?[A-Z_]{3,}\]|\[e~\[|\]~!?b[\[\]]|<\|\"\|>"
)
"""Matches texts of templates that are one token of their model's vocabulary."""
NOT_MARKS = re.compile(r"<(?:function|parameter|name|description|type|required|tools|b|i|br|invoke)>|</.*(?:s|ion|er)>")
UNKNOWN = StandIn("", "<|stand_in_bos|>", "<|stand_in_eos|>", (), "")
CALL_STOPS = ("<|tools_suffix|>",)
"""The marks that close calls and, by the models' generation_config.json, also end the reply (Apertus)."""
SHORT, LONG = 4, 64
"""The number of turns of the conversations whose cost is compared."""


@dataclass(frozen=True, slots=True)
class TurnCost:
    """The cost of rendering and extending: `TurnCost(0.0004, 1.02)`."""

    seconds: float
    """The seconds of a turn, in a conversation of 64."""
    growth: float
    """The ratio of these to the seconds of a turn in a conversation of 4."""


@dataclass(frozen=True, slots=True)
class MatrixRow:
    """One template: its family, the verdicts on it, and the cost of a turn; None if replies cannot be extended."""

    template: str
    family: str
    report: TemplateReport
    cost: TurnCost | None


def stand_in(template: str, name: str) -> ChatTokenizer:
    """Returns a tokenizer for a template whose own is unavailable: the embedded model's, with the template's marks.

    The first and last tokens of the shared templates are known by their names; others get invented ones.
    """
    stand_in_marks = STAND_INS.get(name, UNKNOWN)
    backend = Tokenizer.from_str(ChatTokenizer.load(embedded_folder()).backend.to_str())
    family = family_of(ChatTokenizer(backend, template, name=name))
    special = {"bos_token": stand_in_marks.bos, "eos_token": stand_in_marks.eos}
    spells = template + _written_text(template, special)
    own: tuple[str, ...] = ()
    if family is not None:
        own = tuple(text for text in (*FORMATS[family.name].marks, *FORMATS[family.name].ends) if text in spells)
        if stand_in_marks is UNKNOWN and "eos_token" in template:
            ends = (end for end in FORMATS[family.name].ends if end in spells)
            stand_in_marks = replace(stand_in_marks, eos=next(ends, stand_in_marks.eos))
    special["eos_token"] = stand_in_marks.eos
    stops = [mark for mark in CALL_STOPS if mark in spells]
    spelled = {mark for mark in MARK.findall(spells) if not NOT_MARKS.fullmatch(mark)}
    marks = sorted({*spelled, *own, stand_in_marks.bos, stand_in_marks.eos, *stand_in_marks.stops} - {""})
    backend.add_special_tokens([mark for mark in marks if backend.token_to_id(mark) is None])
    return ChatTokenizer(backend, template, "", special, (stand_in_marks.eos, *stand_in_marks.stops, *stops), name)


def _written_text(template: str, special: Mapping[str, JSON]) -> str:
    """Returns the template's text of a talk and of a play, which spells the marks that its source composes."""
    call = ToolCall("000000000", "qv7tool", {"qv7argument": "x"})
    user, reply = Message("user", "x"), Message("assistant", "x", "x")
    calling, result = Message("assistant", "", "x", (call,)), Message("tool", "x", tool_call_id=call.id, name=call.name)
    tool = ToolSpec(call.name, "x", {"type": "object", "properties": {"qv7argument": {"type": "string"}}})
    texts = []
    for messages, tools in (([user, reply, user], []), ([user, calling, result], [tool])):
        try:
            dicts = [message_dict(message, str) for message in messages]
            texts.append(ChatTemplate(template, special).render(dicts, [tool_dict(each, str) for each in tools]))
        except RenderError:
            continue  # what it refuses, it writes nowhere
    return "\n".join(texts)


def family_matrix(folder: Path, clock: Callable[[], float] = time.process_time) -> Iterator[MatrixRow]:
    """Yields a row for each `*.jinja` of a folder, by family. Raises ValueError if there is none."""
    files = sorted(folder.glob("*.jinja"))
    if not files:
        raise ValueError(f"{str(folder)!r} holds no *.jinja: give a folder of chat templates")
    for file in files:
        tokenizer = stand_in(file.read_text(encoding="utf-8"), file.stem)
        report = check_chat_template(tokenizer, reference=TransformersReference.of(tokenizer))
        yield MatrixRow(file.stem, report.family, report, _cost(tokenizer, clock))


def _cost(tokenizer: ChatTokenizer, clock: Callable[[], float]) -> TurnCost | None:
    try:
        renderer = renderer_for(tokenizer)
        short, long = (min(_turn(renderer, turns, clock) for _ in range(5)) for turns in (SHORT, LONG))
    except RenderError:
        return None
    return TurnCost(long, long / short)


def _turn(renderer: TemplateRenderer, turns: int, clock: Callable[[], float]) -> float:
    """Returns the seconds of a turn in a conversation of `turns` turns."""
    reply = [*renderer.tokenizer.encode("In a cave."), renderer.stop_ids[0]]
    start = clock()
    ids = renderer.render([Message("user", "Where are you?")], renderer.probe_tools)
    for number in range(turns):
        ids += reply
        ids += renderer.extend(ids, [Message("user", f"And now, at turn {number}?")])
    return (clock() - start) / turns


def matrix_markdown(rows: Iterable[MatrixRow]) -> str:
    """Returns the page: how to read it, the table, the notes, the families without a template."""
    ordered = sorted(rows, key=lambda row: (row.family, row.template))
    notes: list[str] = []
    head = ["family", "template", "renderer", *COLUMNS.values(), "a turn costs"]
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    for row in ordered:
        results = {result.name: result for result in row.report.results}
        cells = [_cell(results[name], notes) for name in COLUMNS]
        columns = [row.family, row.template, row.report.renderer, *cells, _cost_cell(row.cost)]
        lines.append("| " + " | ".join(columns) + " |")
    families = {row.family for row in ordered}
    numbered = [f"{number}. {note}" for number, note in enumerate(notes, 1)]
    rest = _unshown([entry for entry in dict.fromkeys(FORMATS.values()) if entry.name not in families])
    return "\n".join([TEXT, *lines, "", "## Notes", "", *numbered, "", REST, *rest, ""])


def _cell(result: CheckResult, notes: list[str]) -> str:
    """Returns a verdict in a word; noted and failed ones get a note, equal ones the same."""
    word = CELLS.get(result.outcome, "yes" if result.name in HANDLED else "no")
    if result.first is None:
        return word
    problem = result.first.problem.replace("|", "\\|").replace("<", "&lt;").replace("[", "\\[").replace("\n", " ")
    note = f"{result.name}: {problem[:300]} (first seen in: {result.first.where})"
    if note not in notes:
        notes.append(note)
    return f"{word} [{notes.index(note) + 1}]"


def _cost_cell(cost: TurnCost | None) -> str:
    return "–" if cost is None else f"{cost.seconds * 1e6:.0f} µs, x{cost.growth:.2f}"


def _unshown(formats: Sequence[ReplyFormat]) -> list[str]:
    lines = ["| family | also called | models |", "|---|---|---|"]
    return lines + [f"| {entry.name} | {', '.join(entry.aliases)} | {entry.models} |" for entry in formats]


HANDLED = ("render", "extend", "parse", "malformed")
"""The properties whose notes are refusals, or differences that the renderer accounts for."""
TEXT = """# Model families

A family is a chat format: how a conversation becomes tokens and how a reply is read. Which models can be *trained* is
another question, which [models.md](models.md) answers. A model of any family can be evaluated behind a server
(`agentgym eval --policy URL`).

What holds for each family, measured: every template below is held to the hundred conversations of
`agentgym.testing.contracts.conversations` by the checks of `agentgym models check FOLDER`, with a stand-in vocabulary
that has the marks which the template spells. Made by:

    python benchmarks/family_matrix.py FOLDER_OF_TEMPLATES > docs/families.md

For your own model, `agentgym models check FOLDER` says the same with its own tokenizer, before any training.

## How to read it

- *render = template*: `render` gives the ids of `apply_chat_template`. A note names conversations that the
  template itself refuses, such as two user messages in a row.
- *all is shown*: messages, tools, calls and results are in the template's text. A template that shows tools and leaves
  the calls of a reply out fails: sampled calls stay in the row, and those of a prompt or a demonstration are lost.
- *extend exact*: what `extend` appends to a sampled reply is what the template puts there. A note names what is
  kept as it was first shown where the template would move or rewrite it, or a role that `extend` refuses, with the
  line of the template.
- *parse inverts*: the ids with which the template writes a reply are read as that reply; *several calls* and
  *reasoning* count apart. "no" says that the template leaves them out of what it writes, so that nothing could be
  read: what a model samples is read, and stays in the row.
- *malformed kept*: replies with calls, cut behind every id and corrupted: nothing raises, nothing is lost, no call
  is made up.
- *prefix-preserving*: the render of a longer conversation begins with that of the shorter. Where it does not (old
  reasoning is dropped, the menu of tools moves), `history="append"` keeps what was sampled, and
  `history="rerender"` begins a row at each rewrite; either way each sampled token is trained exactly once.
- *a turn costs*: CPU time of `render` and `extend` for each turn of 64, and that over the time for each of 4: above
  1.5 it would grow with the history.
- **no** in bold is a failure: training would be wrong. "–" says that no conversation could tell.

## The matrix
"""
REST = """## Families without a template above

Their replies are read (`agentgym tools parse --family NAME`), as tests on replies of these models show; a model's
own template renders them.
"""


def main() -> None:
    """Prints the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a folder of chat templates, NAME.jinja")
    try:
        print(matrix_markdown(family_matrix(parser.parse_args().folder)).rstrip())
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
