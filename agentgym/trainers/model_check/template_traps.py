"""Checks of errors that are known to go unnoticed: the second half of those of a chat template."""

from __future__ import annotations

import random
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice

from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.errors import RenderError
from agentgym.trainers.model_check.findings import TemplateFindings
from agentgym.trainers.model_check.template_cases import Case, marks_of
from agentgym.trainers.model_check.template_checks import HISTORY_HINT, TemplateUnderTest, call_texts, letters
from agentgym.types import Message, ToolCall, ToolSpec

__all__ = [
    "check_ids",
    "check_malformed",
    "check_marks",
    "check_repeatable",
    "check_resampled",
    "check_round_trip",
    "check_shown",
    "check_spelled",
]

TEXTS: Mapping[str, str] = {
    "words": "The door is locked, isn't it? I'm sure they've gone .",
    "spaces at the beginning": "  two spaces",
    "spaces and line breaks": "a  b\t\tc\n\n\n d \r\n e \n",
    "letters of many scripts": "Zwölf Boxkämpfer 日本語 한국어 עברית हिन्दी ไทย",
    "text in NFD": unicodedata.normalize("NFD", "Zwölf Boxkämpfer, é"),
    "compatibility characters": "ﬁ Ω ① ½ ｆｕｌｌ",
    "emoji": "🙂 👩‍👩‍👧 🇩🇪",
    "code": 'def f(x):\n\treturn {"a": [x, None]}  # \\n \\" <b> &amp;',
    "numbers": "1234567890 3.14159 1e-9 0x1F",
    "control characters": "a\u0000b\u0007c\u200bd\ufeffe",
    "private and unassigned characters": "\ue000 \U000f0000 \U0003ffff",
}
PROBE_TOOL = ToolSpec(
    "qv7tool", "Qv7described.", {"type": "object", "properties": {"qv7argument": {"type": "string"}}, "required": []}
)
PROBE_CALL = ToolCall("000000000", "qv7tool", {"qv7argument": "Qv7value"})
PROBE_USER = Message("user", "Qv7asked.")
MAX_REPLIES = 40
"""The number of replies that are resampled; a fourth of it is the number of replies with calls that are cut."""


def check_ids(findings: TemplateFindings, subject: TemplateUnderTest) -> None:
    """Checks that plain texts and spelled marks have the same ids with transformers."""
    if isinstance(subject.reference, str):
        findings.skip("ids", subject.reference)
        return
    texts = {**TEXTS, "marks": " ".join(marks_of(subject.renderer))}
    for name, text in texts.items():
        try:
            ours, theirs = subject.renderer.tokenizer.encode(text), subject.reference.encode(text)
        except RenderError as error:
            findings.add_failure("ids", name, str(error))
            continue
        findings.check("ids", name, "" if ours == theirs else f"here {ours[:8]}, transformers {theirs[:8]}")


def check_shown(findings: TemplateFindings, subject: TemplateUnderTest) -> None:
    """Checks that tools, calls, results and the other messages are in the template's text."""
    renderer = subject.renderer
    reply = Message("assistant", "Qv7said.")
    talks = {
        "a system message": ([Message("system", "Qv7system."), PROBE_USER], "Qv7system."),
        "a user message": ([PROBE_USER], PROBE_USER.content),
        "a reply": ([PROBE_USER, reply, PROBE_USER], reply.content),
    }
    for where, (messages, text) in talks.items():
        prompt = _text(renderer, messages)
        if prompt is None:
            findings.add_note("shown", where, "the template refuses it")
        else:
            findings.check("shown", where, "" if text in prompt else "the template drops it")
    _check_tools_shown(findings, renderer)


def _check_tools_shown(findings: TemplateFindings, renderer: TemplateRenderer) -> None:
    calling = Message("assistant", "Qv7said.", tool_calls=(PROBE_CALL,))
    result = Message("tool", "Qv7found.", tool_call_id=PROBE_CALL.id, name=PROBE_CALL.name)
    menu = _text(renderer, [PROBE_USER], [PROBE_TOOL]) or ""
    play = _text(renderer, [PROBE_USER, calling, result], [PROBE_TOOL]) or ""
    shows_tools, writes_calls = PROBE_TOOL.name in menu, "Qv7value" in play
    if not shows_tools and not writes_calls:
        findings.add_note("shown", "tools", "the template knows none: no calls can be trained with it")
        return
    if shows_tools:
        findings.add_pass("shown")
    else:
        findings.add_note(
            "shown", "tools", renderer.drops.get("tools", "the template shows none: the system prompt has to")
        )
    if not play:
        findings.add_failure("shown", "a call", renderer.unread or "the template refuses a reply with text and a call")
        return
    dropped = next((renderer.drops[kind] for kind in ("calls", "calls with text") if kind in renderer.drops), "")
    dropped = f"{dropped or 'the template drops the calls of a reply'}; {HISTORY_HINT}"
    findings.check("shown", "a call", "" if writes_calls else dropped)
    findings.check("shown", "a tool's result", "" if "Qv7found." in play else "the template drops it")
    for kind in ("further calls", "text with calls"):
        if kind in renderer.drops:
            findings.add_note("shown", kind, f"{renderer.drops[kind]}; history=append keeps them as sampled")


def _text(renderer: TemplateRenderer, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> str | None:
    """Returns the template's text, or None if it refuses."""
    try:
        return renderer.text(messages, tools)
    except RenderError:
        return None


def check_malformed(findings: TemplateFindings, subject: TemplateUnderTest) -> None:
    """Checks replies with calls, cut after every id and with an id lost or changed."""
    renderer = subject.renderer
    rng = random.Random(0)
    calling = ((case, reply) for case, reply in subject.answered_cases if case.exchange.reply.tool_calls)
    for case, reply in islice(calling, MAX_REPLIES // 4):
        whole = call_texts(renderer.parse(reply, case.exchange.tools, case.prompt).tool_calls)
        for length in range(len(reply)):
            findings.check("malformed", case.name, _find_loss(renderer, reply[:length], case, whole))
        for _ in range(20):
            cut = rng.randrange(len(reply))
            changed = [*reply[:cut], *rng.choice(([], [rng.randrange(renderer.vocab_size)])), *reply[cut + 1 :]]
            findings.check("malformed", case.name, _find_loss(renderer, changed, case, None))


def _find_loss(renderer: TemplateRenderer, ids: Sequence[int], case: Case, expected: Sequence[str] | None) -> str:
    """Returns what of a broken reply is lost or invented; `expected` are the calls of the whole that it begins."""
    exchange = case.exchange
    message = renderer.parse(ids, exchange.tools, case.prompt)
    reply_text = f"{exchange.reply.content} {exchange.reply.reasoning or ''}"
    calls = [call for call in message.tool_calls if isinstance(call, ToolCall)]
    text = renderer.decode(ids)
    if any(call.name not in text for call in calls):
        return f"a call is read that is not in {text[-80:]!r}"
    if expected is not None and call_texts(calls)[:-1] != list(expected[: max(0, len(calls) - 1)]):
        return f"the calls of {text[-80:]!r} are not the first of the whole"
    if message.tool_calls:
        return ""
    if any(index in renderer.stop_ids for index in ids):
        return ""  # what follows a reply's end does not belong to it
    text_kept = message.content + (message.reasoning or "")
    missing = [word for word in reply_text.split() if word in text.split() and word not in text_kept]
    return f"{missing[0]!r} of {text[-80:]!r} is neither content, reasoning nor a call" if missing else ""


def check_marks(findings: TemplateFindings, subject: TemplateUnderTest) -> None:
    """Checks that marks that messages and tools spell, whole and cut in two, are not among the ids."""
    renderer = subject.renderer
    marks = marks_of(renderer)
    spelled = f"a {' '.join(marks)} b"
    endings = [mark[: len(mark) // 2 + 1] for mark in marks]
    for where, messages, tools in _places(renderer, spelled):
        plain = next((m, t) for place, m, t in _places(renderer, "x") if place == where)
        problem = _smuggled_mark(renderer, (messages, tools), plain, marks)
        changed = "" if problem else _find_change(renderer, (messages, tools), spelled)
        if changed and letters(spelled) not in letters(renderer.text(messages, tools)):
            findings.add_note("marks", where, f"{changed} by the template itself")
        else:
            findings.check("marks", where, problem or changed)
    for ending in dict.fromkeys(endings):
        messages = [Message("user", ending), Message("assistant", ending), Message("user", ending)]
        plain_messages = [Message(message.role, "x") for message in messages]
        problem = _smuggled_mark(renderer, (messages, ()), (plain_messages, ()), marks)
        problem = problem or _find_change(renderer, (messages, ()), ending)
        findings.check("marks", f"texts that end with {ending!r}", problem)


def _places(renderer: TemplateRenderer, text: str) -> Iterator[tuple[str, list[Message], tuple[ToolSpec, ...]]]:
    """Yields conversations with `text` in one place each, as far as the renderer takes them."""
    call = ToolCall("000000000", "qv7tool", {"qv7argument": text})
    plain_call = ToolCall("000000000", "qv7tool", {"qv7argument": "x"})
    described = ToolSpec("qv7tool", text, PROBE_TOOL.parameters)
    user, reply = Message("user", "x"), Message("assistant", "x")
    result = Message("tool", text, tool_call_id=call.id, name=call.name)
    plain_result = Message("tool", "x", tool_call_id=call.id, name=call.name)
    calling, plain_calling = (Message("assistant", "", tool_calls=(tool_call,)) for tool_call in (call, plain_call))
    candidates: list[tuple[str, list[Message], tuple[ToolSpec, ...]]] = [
        ("a user message", [Message("user", text), reply, user], ()),
        ("a system message", [Message("system", text), user], ()),
        ("a reply", [user, Message("assistant", text), user], ()),
        ("reasoning", [user, Message("assistant", "x", text)], ()),
        ("a tool's description", [user], (described,)),
        ("an argument", [user, calling, plain_result], (PROBE_TOOL,)),
        ("a tool's result", [user, plain_calling, result], (PROBE_TOOL,)),
    ]
    for where, messages, tools in candidates:
        try:
            renderer.render(messages, tools)
        except RenderError:
            continue
        yield where, messages, tools


def _smuggled_mark(
    renderer: TemplateRenderer,
    hostile: tuple[Sequence[Message], Sequence[ToolSpec]],
    plain: tuple[Sequence[Message], Sequence[ToolSpec]],
    marks: Mapping[str, int],
) -> str:
    """Returns the mark that a hostile conversation has more often than a plain one."""
    try:
        ids, expected = renderer.render(*hostile), renderer.render(*plain)
    except RenderError:
        return ""  # refused, not rendered otherwise
    for text, index in marks.items():
        if ids.count(index) > expected.count(index):
            return f"{text!r} becomes the id {index}"
    return ""


def _find_change(
    renderer: TemplateRenderer, hostile: tuple[Sequence[Message], Sequence[ToolSpec]], spelled: str
) -> str:
    """Returns a problem if text that a hostile conversation spells is not what its ids spell."""
    try:
        text, expected = letters(renderer.decode(renderer.render(*hostile))), letters(spelled)
    except RenderError:
        return ""
    return "" if expected in text or letters(spelled[:20]) not in text else f"the text {spelled[:60]!r} is changed"


def check_spelled(findings: TemplateFindings, subject: TemplateUnderTest) -> None:
    """Checks that each mark of the format, spelled with ordinary ids, is read as text."""
    renderer = subject.renderer
    added = {token.content: index for index, token in renderer.tokenizer.backend.get_added_tokens_decoder().items()}
    for mark in renderer.reply_format.marks:
        index = added.get(mark)
        if index is None:
            findings.add_note("spelled", mark, "the tokenizer has no id of its own for it, so that its spelling counts")
            continue
        ids = renderer.tokenizer.encode_plain(mark)
        reading = renderer.parse(ids)
        got = reading.content + (reading.reasoning or "")  # a prompt may have opened the reasoning
        sound = mark in got and not reading.tool_calls and index not in ids
        findings.check("spelled", mark, "" if sound else f"{ids}, which spell it, are read as {reading}")


def check_round_trip(findings: TemplateFindings, subject: TemplateUnderTest) -> None:
    """Checks texts of many kinds, encoded and decoded."""
    tokenizer = subject.renderer.tokenizer
    for name, text in TEXTS.items():
        try:
            got = tokenizer.decode(tokenizer.encode_plain(text))
        except RenderError as error:
            findings.add_failure("round_trip", name, str(error))
            continue
        if got == text:
            findings.add_pass("round_trip")
        elif got == unicodedata.normalize("NFC", text) or got == unicodedata.normalize("NFKC", text):
            form = "NFC" if got == unicodedata.normalize("NFC", text) else "NFKC"
            findings.add_note("round_trip", name, f"the tokenizer reads it in {form}, and the model sees no difference")
        elif got.strip() == text.strip():
            findings.add_note("round_trip", name, "white space around it is lost")
        else:
            findings.add_failure("round_trip", name, f"{text!r} comes back as {got!r}")


def check_resampled(findings: TemplateFindings, subject: TemplateUnderTest) -> None:
    """Checks that replies in ids that no tokenizer gives, with the same text, are read and continued alike."""
    renderer = subject.renderer
    for case, reply in islice(subject.answered_cases, MAX_REPLIES):
        other = _resample(renderer, reply)
        if other is None or case.appended is None:
            continue
        reading, expected = (renderer.parse(ids, case.exchange.tools, case.prompt) for ids in (other, reply))
        after = [renderer.extend([*case.prompt, *ids], case.exchange.new) for ids in (reply, other)]
        problem = "" if reading == expected else f"{renderer.decode(other)[:60]!r} in other ids is read otherwise"
        findings.check("resampled", case.name, problem or ("" if after[0] == after[1] else "it is continued otherwise"))


def _resample(renderer: TemplateRenderer, ids: Sequence[int]) -> list[int] | None:
    """Returns the same text in other ids, which encoding it would not give; None if no id can be split."""
    for at, index in enumerate(ids):
        text = renderer.decode([index])
        if len(text) < 2 or not text.isascii() or index in renderer.tokenizer.backend.get_added_tokens_decoder():
            continue
        pieces = [*renderer.tokenizer.encode_plain(text[:1]), *renderer.tokenizer.encode_plain(text[1:])]
        other = [*ids[:at], *pieces, *ids[at + 1 :]]
        if other != list(ids) and renderer.decode(other) == renderer.decode(ids):
            return other
    return None


def check_repeatable(findings: TemplateFindings, subject: TemplateUnderTest) -> None:
    """Checks that conversations rendered again are equal; notes a template that writes the date."""
    for conversation in subject.conversations[:MAX_REPLIES]:
        try:
            pair = [subject.renderer.render(conversation.messages, conversation.tools) for _ in range(2)]
        except RenderError:
            continue
        findings.check("repeatable", conversation.name, "" if pair[0] == pair[1] else "the second render differs")
    if subject.renderer.tokenizer.writes_date:
        reason = "it writes the date, which a run fixes when it begins, and records as `date` in config.yaml"
        findings.add_note("repeatable", "the template", reason)
