"""Any conversation is rendered, extended and read exactly, whatever its texts are, for every family.

The quick tests hold a few conversations of each template, over the embedded model's vocabulary with the marks that the
template spells. The slow one holds as many over the vocabularies of real models as FUZZ_CONVERSATIONS says:
`FUZZ_CONVERSATIONS=100000 pytest -m slow tests/chat_templates/test_fuzz.py`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from family_matrix import stand_in
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from stand_ins import STAND_INS, stand_in_tokenizer, with_marks
from tokenizers import Tokenizer

from agentgym.chat_templates import ChatTokenizer, renderer_for
from agentgym.chat_templates.formats.registry import FORMATS
from agentgym.errors import RenderError
from agentgym.testing.contracts.conversations import PIECES, TOOLS, SampleConversation
from agentgym.trainers.model_check.findings import TemplateFindings
from agentgym.trainers.model_check.reference import TransformersReference
from agentgym.trainers.model_check.template_cases import cases_of, marks_of, with_own_ids
from agentgym.trainers.model_check.template_checks import TemplateUnderTest, check_extend, check_parse, check_render
from agentgym.types import JSON, MalformedCall, Message, ToolCall

TEMPLATES = Path(__file__).resolve().parents[3] / "shared" / "data" / "chat_templates"
NUM_CONVERSATIONS = int(os.environ.get("FUZZ_CONVERSATIONS", "1000"))
"""Of the long run, over all templates."""
NUM_QUICK = 6
"""Of the quick one, for each template."""
CHECKS = (check_render, check_extend, check_parse)
HUGE = ("The corridor goes on. " * 2_000, "é <b>\n" * 3_000, "7" * 10_000, "\n" * 5_000)
HUGE_AT = {1_234 + place: st.just(text) for place, text in enumerate(HUGE)}
"""One text in a thousand; not at the ends of the range, which are drawn often."""
MERGING = (
    "Go",
    " north",
    "sys",
    "tem",
    "assist",
    "ant",
    "12",
    "345",
    " \n",
    "\n\n",
    "\r\n",
    "  ",
    "'",
    "'s",
    "ﬁ",
    "e\u0301",
)
CONTENTS = st.one_of(
    st.lists(st.sampled_from([*PIECES, *MERGING]), max_size=8).map("".join),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=30),
)
VALUES: st.SearchStrategy[JSON] = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-(2**40), 2**40), CONTENTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.sampled_from("abü"), inner, max_size=3)),
    max_leaves=5,
)


class Model:
    """A template with its renderer, and with transformers' rendering of it."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        self.renderer = renderer_for(tokenizer)
        self.reference = TransformersReference.of(tokenizer)
        self.marks = marks_of(self.renderer)
        ordered = sorted(self.marks, key=len, reverse=True)
        self.spelled = re.compile("|".join(map(re.escape, ordered)))
        self.num_held = self.num_withstood = 0

    def hold(self, conversation: SampleConversation) -> None:
        """Asserts that render, extend and parse are exact on a conversation that spells no mark."""
        conversations = with_own_ids(self.renderer, [conversation])
        findings = TemplateFindings()
        subject = TemplateUnderTest(
            self.renderer, conversations, tuple(cases_of(self.renderer, conversations)), self.reference
        )
        for check in CHECKS:
            check(findings, subject)
        compared = findings.tallies["render"]
        self.num_held += compared.num_checked > len(compared.noted)
        failed = [finding for tally in findings.tallies.values() for finding in tally.failed]
        assert [str(finding) for finding in failed if finding.where == conversation.name] == []

    def withstand(self, conversation: SampleConversation) -> None:
        """Asserts that what messages spell is text: a mark's id comes as often as where no message spells one."""
        (hostile,) = with_own_ids(self.renderer, [conversation])
        plain = replace(
            hostile, messages=tuple(replace(message, content=self.plain(message)) for message in hostile.messages)
        )
        try:
            ids = self.renderer.render(hostile.messages, hostile.tools)
            expected = self.renderer.render(plain.messages, plain.tools)
        except RenderError:
            return  # refused, whatever its texts are
        for text, index in self.marks.items():
            assert ids.count(index) == expected.count(index), text
        self.num_withstood += 1
        new = [message for message in hostile.messages[-1:] if message.role in ("user", "tool")]
        if not self.renderer.refusals.keys() & {message.role for message in new}:
            appended = self.renderer.extend((), new)
            own_ids = self.renderer.extend((), [replace(message, content=self.plain(message)) for message in new])
            assert [index for index in appended if index in self.marks.values()] == [
                index for index in own_ids if index in self.marks.values()
            ]

    def plain(self, message: Message) -> str:
        """The content with a letter inside each mark that it spells."""
        if message.role == "assistant":
            return message.content
        return self.spelled.sub(lambda match: f"{match[0][0]}q{match[0][1:]}", message.content)


def templates() -> list[object]:
    names = sorted(file.stem for file in TEMPLATES.glob("*.jinja"))
    absent = pytest.mark.skip(reason=f"the shared test data {TEMPLATES} is not beside this checkout")
    return names or [pytest.param("absent", marks=absent)]


every_template = pytest.mark.parametrize("name", templates())


@pytest.fixture(scope="module")
def models() -> Callable[[str], Model]:
    """Each template over the embedded model's vocabulary."""
    cache: dict[str, Model] = {}

    def model(name: str) -> Model:
        if name not in cache:
            cache[name] = Model(stand_in((TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8"), name))
        return cache[name]

    return model


@pytest.fixture(scope="module")
def real_models(real_folders: Mapping[str, Path]) -> Callable[[str], Model]:
    """Each template over the nearest real vocabulary."""
    backends: dict[str, Tokenizer] = {}

    def model(name: str) -> Model:
        nearest = STAND_INS[name].nearest
        if nearest not in backends:
            whole = Tokenizer.from_file(str(real_folders[nearest] / "tokenizer.json"))
            backends[nearest] = with_marks(whole, nearest, TEMPLATES)
        template = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
        return Model(stand_in_tokenizer(name, backends[nearest], template))

    return model


@st.composite
def replies(draw: st.DrawFn, first_call: int, has_tools: bool) -> Message:
    """A reply that says something, or calls one to three tools."""
    reasoning = draw(st.one_of(st.none(), CONTENTS))
    if not has_tools or draw(st.booleans()):
        return Message("assistant", draw(CONTENTS), reasoning)
    calls = []
    for number in range(draw(st.sampled_from([1, 1, 1, 2, 3]))):
        arguments: dict[str, JSON] = {"query": draw(CONTENTS), "limit": draw(st.integers(-(2**40), 2**40))}
        if draw(st.booleans()):
            arguments["options"] = draw(st.dictionaries(st.sampled_from(["deep", "é"]), VALUES, max_size=2))
        calls.append(ToolCall(f"call{first_call + number:05d}", "search", arguments))
    return Message("assistant", draw(st.one_of(st.just(""), CONTENTS)), reasoning, tuple(calls))


@st.composite
def talks(draw: st.DrawFn, outside: st.SearchStrategy[str]) -> SampleConversation:
    """A conversation as an agent meets it; `outside` are the texts of everybody but the model."""
    has_tools = draw(st.booleans())
    messages = [Message("system", draw(outside))] if draw(st.booleans()) else []
    messages.append(Message("user", draw(outside)))
    num_calls = 0
    for _ in range(draw(st.integers(1, 4))):
        reply = draw(replies(num_calls, has_tools))
        calls = [call for call in reply.tool_calls if isinstance(call, ToolCall)]
        num_calls += len(calls)
        messages.append(reply)
        messages += [Message("tool", draw(outside), tool_call_id=call.id, name=call.name) for call in calls]
        if not calls or draw(st.booleans()):
            messages.append(Message("user", draw(outside)))
    return SampleConversation("any", tuple(messages), TOOLS if has_tools else ())


def ordinary(model: Model) -> st.SearchStrategy[SampleConversation]:
    """Conversations that spell no mark, and begin none that another text could end."""

    def is_ordinary(conversation: SampleConversation) -> bool:
        texts: list[str] = []
        for message in conversation.messages:
            arguments = [call.arguments for call in message.tool_calls if isinstance(call, ToolCall)]
            texts += [message.content, message.reasoning or "", json.dumps(arguments, ensure_ascii=False)]
        return not any(model.spelled.search(text) for text in texts)

    return talks(st.integers(0, 3999).flatmap(lambda place: HUGE_AT.get(place, CONTENTS))).filter(is_ordinary)


def hostile(model: Model) -> st.SearchStrategy[SampleConversation]:
    """Conversations whose users and tools spell marks, whole and in parts."""
    marks = sorted(model.marks)
    parts = [mark[:length] for mark in marks for length in (1, len(mark) // 2, len(mark) - 1)]
    ends = [mark[length:] for mark in marks for length in (1, len(mark) // 2, len(mark) - 1)]
    pieces = st.sampled_from([*marks, *marks, *parts, *ends, "a", " ", "\n", "é"])
    return talks(st.lists(pieces, max_size=8).map("".join))


def profile(num_examples: int) -> settings:
    return settings(
        max_examples=num_examples,
        deadline=None,
        database=None,
        derandomize="FUZZ_CONVERSATIONS" not in os.environ,  # a search is asked for; a test says the same each time
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )


def fuzz(model: Model, num_examples: int) -> None:
    """Holds so many conversations, half of them ordinary and half hostile."""
    half = num_examples // 2
    profile(num_examples - half)(given(ordinary(model))(model.hold))()
    profile(half)(given(hostile(model))(model.withstand))()
    assert model.num_held and model.num_withstood, "every conversation was refused"


@pytest.mark.long(cases=6)
@every_template
def test_a_few_conversations_are_exact_and_no_text_becomes_a_mark(name: str, models: Callable[[str], Model]) -> None:
    fuzz(models(name), NUM_QUICK)


@pytest.mark.slow
@every_template
def test_many_conversations_are_exact_and_no_text_becomes_a_mark(
    name: str, real_models: Callable[[str], Model]
) -> None:
    fuzz(real_models(name), -(-NUM_CONVERSATIONS // len(templates())))


def hostile_texts(marks: Iterable[str]) -> st.SearchStrategy[str]:
    words = ("go", '{"name": "go", "arguments": {"a": 1}}', "go(a=1)", "\n", ":", "0", "json", '"', "'", "[", "]", "}")
    pieces = st.one_of(st.sampled_from([*marks, *words]), st.text(max_size=4))
    return st.lists(pieces, max_size=25).map("".join)


@pytest.mark.parametrize("name", sorted({entry.name for entry in FORMATS.values()}))
def test_any_text_is_read_by_every_format_and_nothing_is_made_up(name: str) -> None:
    reply_format = FORMATS[name]

    def read(text: str, in_reasoning: bool) -> None:
        message = reply_format.parse(text, TOOLS, in_reasoning=in_reasoning)
        assert message.role == "assistant"
        json.dumps([call.arguments for call in message.tool_calls if isinstance(call, ToolCall)], allow_nan=False)
        assert all(call.raw and call.error for call in message.tool_calls if isinstance(call, MalformedCall))
        assert len({call.id for call in message.tool_calls}) == len(message.tool_calls)

    profile(40)(given(hostile_texts([*reply_format.marks, *reply_format.ends]), st.booleans())(read))()


@every_template
def test_any_ids_are_read(name: str, models: Callable[[str], Model]) -> None:
    renderer = models(name).renderer

    def read(sampled: Sequence[int]) -> None:
        assert renderer.parse(sampled, TOOLS).role == "assistant"

    ids = st.lists(st.integers(-2, renderer.vocab_size + 5), max_size=60)
    profile(20)(given(ids)(read))()
