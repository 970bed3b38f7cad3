"""Checks that render, extend and parse are exact on a model's replies."""

from __future__ import annotations

import json
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

from agentgym.chat_templates.renderers.template_renderer import TemplateRenderer
from agentgym.errors import RenderError
from agentgym.rollout.record.ledger import first_difference
from agentgym.testing.contracts.conversations import SampleConversation
from agentgym.trainers.model_check.findings import TemplateFindings
from agentgym.trainers.model_check.template_cases import Case, marks_of, spells
from agentgym.types import AnyCall, MalformedCall, Message, ToolSpec

__all__ = [
    "Reference",
    "TemplateUnderTest",
    "call_texts",
    "check_cut",
    "check_extend",
    "check_parse",
    "check_render",
    "check_stop",
    "letters",
]

SHOWN_CHARACTERS = 60
HISTORY_HINT = "history=append keeps those that are sampled, while prompts with calls, rerender and sft lose them"


class Reference(Protocol):
    """Another implementation of the model's template, to compare with."""

    def render(self, messages: Sequence[Message], tools: Sequence[ToolSpec] = ()) -> list[int]:
        """Returns the conversation's ids with its generation prompt; raises RenderError if the template refuses it."""

    def encode(self, text: str) -> list[int]:
        """Returns the ids of a text."""


@dataclass(frozen=True)
class TemplateUnderTest:
    """A renderer that is checked, and the conversations on which it is checked."""

    renderer: TemplateRenderer
    conversations: Sequence[SampleConversation]
    cases: Sequence[Case]
    reference: Reference | str
    """The reference, or the reason why there is none."""

    @property
    def answered_cases(self) -> Iterator[tuple[Case, list[int]]]:
        """Yields the cases whose reply the template writes as a model would, with the reply's ids."""
        return ((case, case.said) for case in self.cases if case.said is not None)


def check_render(findings: TemplateFindings, subject: TemplateUnderTest) -> None:
    """Compares our and the reference's ids of each conversation, except those that spell a mark: ours keeps text."""
    if isinstance(subject.reference, str):
        findings.skip("render", subject.reference)
        return
    marks = marks_of(subject.renderer)
    for conversation in subject.conversations:
        if spells(conversation, marks):
            continue
        prepared = replace(conversation, messages=tuple(subject.renderer.prepare(conversation.messages)))
        ours = _render_or_error(subject.renderer, conversation)
        theirs = _render_or_error(subject.reference, prepared)
        where = conversation.name
        if isinstance(ours, list) and isinstance(theirs, list):
            problem = "" if ours == theirs else _difference(subject.renderer, ours, theirs, "apply_chat_template")
            findings.check("render", where, problem)
        elif isinstance(theirs, list):
            findings.add_note("render", where, f"refused here, though the template takes it: {ours}")
        elif isinstance(ours, str):
            findings.add_note("render", where, f"refused, here and by transformers: {theirs}")
        else:
            findings.add_note("render", where, f"rendered here, refused by transformers: {theirs}")
    tally = findings.tallies["render"]
    if tally.noted and len(tally.noted) == tally.num_checked:
        with_tools = {conversation.name for conversation in subject.conversations if conversation.tools}
        reasons = {(finding.where in with_tools): finding.problem for finding in reversed(tally.noted)}
        problem = "; with tools: ".join(reasons[has_tools] for has_tools in sorted(reasons))
        findings.add_failure("render", "every conversation", problem)


def check_extend(findings: TemplateFindings, subject: TemplateUnderTest) -> None:
    """Checks that what is appended to a reply equals the template's own render of the whole at that place."""
    for case in subject.cases:
        if case.whole is None:
            continue  # the template has no such conversation
        if case.appended is None:
            report = findings.add_failure if _is_needed(subject.renderer, case) else findings.add_note
            report("extend", case.name, case.refusal)
            continue
        if case.keeps_prefix:
            findings.add_pass("prefix")
        else:
            findings.add_note("prefix", case.name, _rewriting(subject, case))
        tail = case.whole[-len(case.appended) :]
        if tail == case.appended or _differs_in_cuts(subject.renderer, case.appended, case.whole):
            findings.check("extend", case.name, _gap(subject, case))
            continue
        if _is_whole(subject, case):
            findings.add_pass("extend")  # only the end of a cut reply differs
            continue
        problem = _difference(subject.renderer, case.appended, tail, "the template")
        reason = _reason_to_differ(subject.renderer, case)
        if reason:
            findings.add_note("extend", case.name, f"{reason}: {problem}")
        else:
            findings.add_failure("extend", case.name, problem)


def _is_needed(renderer: TemplateRenderer, case: Case) -> bool:
    """Returns True if episodes need what `extend` refuses: a user's answer, or results if calls are written."""
    roles = {message.role for message in case.exchange.new}
    refused = roles & set(renderer.refusals)
    needed = {"user", "tool"} if "calls" not in renderer.drops else {"user"}
    return bool(refused & needed) or not refused


def _differs_in_cuts(renderer: TemplateRenderer, appended: Sequence[int], whole: Sequence[int]) -> bool:
    """Returns True if the end of a cut reply is the template's text, merged in an encoding of the whole.

    There it is merged with the reply's text (`.` and a line break). The sampled ids stay as they are, and so does their
    boundary.
    """
    end = next((at for at, index in enumerate(appended) if index in renderer.stop_ids), 0)
    start = len(whole) - len(appended) + end
    same = list(whole[start:]) == list(appended[end:])
    return end > 0 and same and renderer.decode(whole[:start]).endswith(renderer.decode(appended[:end]))


def _reason_to_differ(renderer: TemplateRenderer, case: Case) -> str:
    """Returns why the template's text after a reply may differ from what is appended; empty if it must not."""
    reply, results = case.exchange.reply, [message for message in case.exchange.new if message.role == "tool"]
    if renderer.keeps_what_was_shown or not case.keeps_prefix:
        return "kept as first shown"
    if "further calls" in renderer.drops and len(reply.tool_calls) > 1:
        return "the template leaves out the calls that are answered"
    if not (reply.content.strip() or reply.tool_calls) and _lacks_end(renderer, case):
        return "the template writes no end after an empty reply"
    if len(results) != len(reply.tool_calls) or (reply.tool_calls and reply.content):
        return "the template writes another end of such a reply than of a call or a text alone"
    return ""


def _lacks_end(renderer: TemplateRenderer, case: Case) -> bool:
    """Returns True if the template's text is what is appended, except for the end token that begins it."""
    whole, appended = case.whole or [], case.appended or [-1]
    text = renderer.decode(whole)
    ended, endless = renderer.decode(appended), renderer.decode(appended[1:])
    return appended[0] in renderer.stop_ids and text.endswith(endless) and not text.endswith(ended)


def check_cut(findings: TemplateFindings, subject: TemplateUnderTest) -> None:
    """Checks that a reply without its stop id gets one, and then what follows the whole reply."""
    renderer = subject.renderer
    marks = {*marks_of(renderer).values(), *renderer.stop_ids}
    for case, reply in subject.answered_cases:
        if case.appended is None:
            continue
        ended = renderer.extend([*case.prompt, *reply], case.exchange.new)
        for length in sorted({0, len(reply) // 2, len(reply) - 1}):
            cut = renderer.extend([*case.prompt, *reply[:length]], case.exchange.new)
            end = cut[: len(cut) - len(ended)] or cut[:1]
            is_sound = cut[-len(ended) :] == ended and any(index in marks for index in end)
            text = renderer.decode(cut)[:SHOWN_CHARACTERS]
            findings.check("cut", case.name, "" if is_sound else f"after {length} ids of the reply comes {text!r}")


def check_stop(findings: TemplateFindings, subject: TemplateUnderTest) -> None:
    """Checks that a stop id sampled twice changes nothing, and that no reply holds one before its end."""
    renderer = subject.renderer
    for case, reply in subject.answered_cases:
        once = renderer.parse(reply, case.exchange.tools, case.prompt)
        twice = renderer.parse([*reply, reply[-1]], case.exchange.tools, case.prompt)
        inner = [index for index in reply[:-1] if index in renderer.stop_ids]
        problem = f"it holds {renderer.decode(inner)!r} before its end" if inner else ""
        problem = problem or ("" if once == twice else "a second stop id changes what is read")
        findings.check("stop", case.name, problem)
    eos = renderer.tokenizer.special_tokens.get("eos_token")
    index = renderer.tokenizer.backend.token_to_id(eos) if eos else None
    if index is not None and index not in renderer.stop_ids:
        findings.add_note("stop", "tokenizer_config.json", f"its eos_token {eos!r} ends no reply of this template")


def check_parse(findings: TemplateFindings, subject: TemplateUnderTest) -> None:
    """Checks that each reply's ids are read as its content, calls and reasoning."""
    if not subject.renderer.reads_calls:
        findings.add_failure("parse", "a call", subject.renderer.unread)
    elif "arguments" in subject.renderer.drops:
        why = "sampled calls are read and kept by history=append; prompts with calls, rerender and sft have that form"
        findings.add_failure("parse", "a call", f"{subject.renderer.drops['arguments']}; {why}")
    for case, reply in subject.answered_cases:
        reading = subject.renderer.parse(reply, case.exchange.tools, case.prompt)
        text = subject.renderer.decode(reply)
        _check_content(findings, subject, case, reading, text)
        if case.exchange.reply.tool_calls or reading.tool_calls:
            _check_calls(findings, subject, case, reading, text)
        if letters(case.exchange.reply.reasoning or ""):
            _check_reasoning(findings, subject, case, reading, text)


def call_texts(calls: Sequence[AnyCall]) -> list[str]:
    """Returns each call as JSON of its name and arguments, composed as tokenizers do; a malformed one as raw text."""
    return [
        call.raw
        if isinstance(call, MalformedCall)
        else _compose(json.dumps([call.name, call.arguments], default=dict, ensure_ascii=False, sort_keys=True))
        for call in calls
    ]


def letters(text: str) -> str:
    """Returns the letters and digits of a text, composed: what survives any wrapping by a template."""
    return "".join(filter(str.isalnum, unicodedata.normalize("NFC", text)))


def _check_content(
    findings: TemplateFindings, subject: TemplateUnderTest, case: Case, reading: Message, text: str
) -> None:
    content, got = case.exchange.reply.content.strip(), reading.content.strip()
    raws = "".join(call.raw for call in reading.tool_calls if isinstance(call, MalformedCall))
    if _compose(content) == _compose(got) or (raws and letters(got + raws) == letters(content)):
        findings.add_pass("parse")
    elif _leaves_out(subject, case, "text with calls" if case.exchange.reply.tool_calls else "", text):
        findings.add_note(
            "parse", case.name, f"the template leaves out {content[:SHOWN_CHARACTERS]!r}, which a reply says"
        )
    elif content in (reading.reasoning or ""):
        findings.add_note(
            "parse", case.name, f"the template writes {content[:SHOWN_CHARACTERS]!r}, a reply's text, as reasoning"
        )
    else:
        findings.add_failure("parse", case.name, f"the content of {text[:160]!r} is read as {got[:SHOWN_CHARACTERS]!r}")


def _check_calls(
    findings: TemplateFindings, subject: TemplateUnderTest, case: Case, reading: Message, text: str
) -> None:
    calls, got = call_texts(case.exchange.reply.tool_calls), call_texts(reading.tool_calls)
    name = "several_calls" if len(calls) > 1 else "parse"
    if calls == got or (not calls and all(call in case.exchange.reply.content for call in got)):
        findings.add_pass(name)
    elif calls and _leaves_out(subject, case, "further calls" if len(calls) > 1 else "calls", text):
        findings.add_note(name, case.name, "the template leaves out the reply's calls")
    elif calls and "arguments" in subject.renderer.drops:
        findings.add_note(name, case.name, subject.renderer.drops["arguments"])
    elif (other := _with_calls(case.exchange.reply, reading.tool_calls)) and _writes_alike(subject, case, other):
        findings.add_note(
            name, case.name, f"the template writes other arguments in the same way, and {got} is read"[:300]
        )
    else:
        findings.add_failure(name, case.name, f"the calls of {text[:200]!r} are read as {got}")


def _writes_alike(subject: TemplateUnderTest, case: Case, other: Message) -> bool:
    """Returns True if the template writes another reply in this place as it writes this one."""
    exchange = case.exchange
    talks = [
        SampleConversation("", (*exchange.history, reply, *exchange.new), exchange.tools)
        for reply in (exchange.reply, other)
    ]
    first, second = (_render_or_error(subject.renderer, talk) for talk in talks)
    return first == second


def _with_calls(reply: Message, calls: Sequence[AnyCall]) -> Message | None:
    """Returns the reply with other calls, under the ids of its own; None if they are more, fewer or malformed."""
    if len(calls) != len(reply.tool_calls) or any(isinstance(call, MalformedCall) for call in calls):
        return None
    own = [replace(call, id=call_before.id) for call, call_before in zip(calls, reply.tool_calls, strict=True)]
    return replace(reply, tool_calls=tuple(own))


def _check_reasoning(
    findings: TemplateFindings, subject: TemplateUnderTest, case: Case, reading: Message, text: str
) -> None:
    reasoning, got = (case.exchange.reply.reasoning or "").strip(), (reading.reasoning or "").strip()
    silent = replace(case.exchange.reply, reasoning=None)
    if _compose(reasoning) == _compose(got):
        findings.add_pass("reasoning")
    elif not got and (_leaves_out(subject, case, "reasoning", text) or _writes_alike(subject, case, silent)):
        findings.add_note("reasoning", case.name, "the template leaves out the reply's reasoning")
    else:
        problem = f"the reasoning of {text[:160]!r} is read as {got[:SHOWN_CHARACTERS]!r}"
        findings.add_failure("reasoning", case.name, problem)


def _leaves_out(subject: TemplateUnderTest, case: Case, kind: str, text: str) -> bool:
    """Returns True if a template is known to drop that kind of part, or its text lacks characters of the reply."""
    if kind in subject.renderer.drops:
        return True
    reply = case.exchange.reply
    for mark in (*subject.renderer.reply_format.marks, *marks_of(subject.renderer)):
        text = text.replace(mark, "")
    values = "".join(letters(call) for call in call_texts(reply.tool_calls))
    missing = Counter(_compose(reply.content + (reply.reasoning or "")) + values) - Counter(_compose(text))
    return any(not character.isspace() for character in missing)


def _render_or_error(renderer: TemplateRenderer | Reference, conversation: SampleConversation) -> list[int] | str:
    try:
        return renderer.render(conversation.messages, conversation.tools)
    except RenderError as error:
        return str(error)


def _rewriting(subject: TemplateUnderTest, case: Case) -> str:
    """Returns how the template writes what precedes a reply once that is answered."""
    assert case.whole is not None
    difference = _difference(subject.renderer, case.prompt, case.whole, "later")
    return f"rewritten later, kept as sampled by history=append: {difference}"


def _is_whole(subject: TemplateUnderTest, case: Case) -> bool:
    """Returns True if prompt, reply and what is appended equal the template's render of the whole."""
    return case.said is not None and _row(subject, case) == case.whole


def _gap(subject: TemplateUnderTest, case: Case) -> str:
    """Returns how prompt, reply and appended ids differ from the whole, if the whole begins with prompt and reply."""
    start = [*case.prompt, *(case.said or [])]
    if case.said is None or case.whole is None or case.whole[: len(start)] != start:
        return ""
    row = _row(subject, case)
    return "" if row == case.whole else _difference(subject.renderer, row, case.whole, "the template")


def _row(subject: TemplateUnderTest, case: Case) -> list[int]:
    """Returns the ids of prompt, reply, and what is appended to them."""
    start = [*case.prompt, *(case.said or [])]
    return start + subject.renderer.extend(start, case.exchange.new)


def _difference(renderer: TemplateRenderer, ours: list[int], theirs: list[int], whose: str) -> str:
    """Returns the index where two lists of ids begin to differ, with a few ids of each from there on."""
    index = first_difference(ours, theirs)
    parts = [repr(renderer.decode(ids[index : index + 12])[:SHOWN_CHARACTERS]) for ids in (ours, theirs)]
    return f"at token {index} here {parts[0]}, {whose} {parts[1]}"


def _compose(text: str) -> str:
    return unicodedata.normalize("NFC", text)
