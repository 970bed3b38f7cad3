"""Calls written as markup become calls, in every family that writes so; what cannot be read is kept and answered."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentgym.chat_templates.formats.protocol import ReplyFormat
from agentgym.chat_templates.formats.registry import FORMATS
from agentgym.types import JSON, AnyCall, MalformedCall, Message, ToolCall, ToolSpec

PROPERTIES: JSON = {
    "to": {"type": "string"},
    "steps": {"type": "integer"},
    "fast": {"type": "boolean"},
    "stops": {"type": "array", "items": {"type": "string"}},
    "load": {"type": "object"},
    "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
}
GO = ToolSpec("go", "", {"type": "object", "properties": PROPERTIES})
NORTH = {"to": "north"}
FULL: Mapping[str, JSON] = {
    "to": "Überall\nhin 🎉",
    "steps": 3,
    "fast": True,
    "stops": ["a <b>", "ü"],
    "load": {"deep": {"er": [1, None, {"x": "y"}]}},
    "note": None,
}
JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@dataclass(frozen=True)
class Written:
    """How a family writes a call: its name in `call`, an argument's name and value in `argument`."""

    call: str
    argument: str
    around: tuple[str, str] = ("", "")
    """What stands around all calls."""

    def __call__(self, arguments: Mapping[str, JSON], name: str = "go") -> str:
        texts = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
        string = {key: str(isinstance(value, str)).lower() for key, value in arguments.items()}
        inside = "".join(self.argument.format(key=key, value=texts[key], string=string[key]) for key in arguments)
        return self.around[0] + self.call.format(name=name, inside=inside) + self.around[1]


FAMILIES = {
    "qwen3_coder": Written(
        "<tool_call>\n<function={name}>\n{inside}</function>\n</tool_call>",
        "<parameter={key}>\n{value}\n</parameter>\n",
    ),
    "seed_oss": Written(
        "<seed:tool_call>\n<function={name}>\n{inside}</function>\n</seed:tool_call>",
        "<parameter={key}>{value}</parameter>\n",
    ),
    "glm45": Written(
        "<tool_call>{name}\n{inside}</tool_call>", "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"
    ),
    "glm47": Written("<tool_call>{name}{inside}</tool_call>", "<arg_key>{key}</arg_key><arg_value>{value}</arg_value>"),
    "h_y_v3": Written(
        "<tool_call>{name}<tool_sep>\n{inside}</tool_call>",
        "<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n",
        ("<tool_calls>\n", "\n</tool_calls>"),
    ),
    "hy3": Written(
        "<tool_call:opensource>{name}<tool_sep:opensource>\n{inside}</tool_call:opensource>",
        "<arg_key:opensource>{key}</arg_key:opensource>\n<arg_value:opensource>{value}</arg_value:opensource>\n",
        ("<tool_calls:opensource>\n", "\n</tool_calls:opensource>"),
    ),
    "minimax_m2": Written(
        '<invoke name="{name}">\n{inside}</invoke>',
        '<parameter name="{key}">{value}</parameter>\n',
        ("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
    ),
    "dots": Written(
        '<invoke name="{name}">{inside}</invoke>',
        '<parameter name="{key}">{value}</parameter>',
        ("<dots_function_call>", "</dots_function_call>"),
    ),
    "step3": Written(
        '<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{name}">{inside}</steptml:invoke>'
        "<｜tool_call_end｜>",
        '<steptml:parameter name="{key}">{value}</steptml:parameter>',
        ("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>"),
    ),
    "deepseek_v32": Written(
        '<｜DSML｜invoke name="{name}">\n{inside}</｜DSML｜invoke>',
        '<｜DSML｜parameter name="{key}" string="{string}">{value}</｜DSML｜parameter>\n',
        ("<｜DSML｜function_calls>\n", "\n</｜DSML｜function_calls>"),
    ),
    "mini_c_p_m5_x_m_l": Written(
        '<function name="{name}">{inside}</function>', '<param name="{key}"><![CDATA[{value}]]></param>'
    ),
    "minimax_m3": Written(
        ']<]minimax[>[<invoke name="{name}">{inside}]<]minimax[>[</invoke>\n',
        "]<]minimax[>[<{key}>{value}]<]minimax[>[</{key}>",
        ("]<]minimax[>[<tool_call>\n", "]<]minimax[>[</tool_call>"),
    ),
}
every_family = pytest.mark.parametrize("family", FAMILIES)
every_grammar = pytest.mark.parametrize(
    "family", ["qwen3_coder", "h_y_v3", "minimax_m2", "deepseek_v32", "mini_c_p_m5_x_m_l", "minimax_m3"]
)
families_that_quote = pytest.mark.parametrize("family", [name for name in FAMILIES if name != "minimax_m3"])
"""MiniMax M3's mark is structure wherever it stands."""


def parse(family: str, text: str) -> Message:
    return FORMATS[family].parse(text, [GO])


def read(family: str, text: str) -> tuple[AnyCall, ...]:
    return parse(family, text).tool_calls


def called(*all_arguments: Mapping[str, JSON]) -> tuple[ToolCall, ...]:
    return tuple(ToolCall(f"call_{number}", "go", arguments) for number, arguments in enumerate(all_arguments))


@every_family
def test_a_call_has_its_arguments_by_the_tools_schema(family: str) -> None:
    assert parse(family, FAMILIES[family](FULL)) == Message("assistant", "", tool_calls=called(FULL))


@every_family
def test_an_identifier_is_a_text_unless_the_schema_allows_no_text(family: str) -> None:
    schemas: dict[str, JSON] = {
        "any": {},
        "union": {"type": ["integer", "string"]},
        "text": {"type": "string"},
        "count": {"type": "integer"},
    }
    go = ToolSpec("go", "", {"type": "object", "properties": schemas})
    for text in ("00501", "+4930123", "TRUE", "None"):
        written = FAMILIES[family](dict.fromkeys(("any", "union", "text", "undeclared"), text))
        for tools in ([go], []):
            (call,) = FORMATS[family].parse(written, tools).tool_calls
            assert isinstance(call, ToolCall) and set(call.arguments.values()) == {text}
    written = FAMILIES[family]({"count": "007", "union": "12"}).replace(' string="true"', "")
    (call,) = FORMATS[family].parse(written, [go]).tool_calls
    assert isinstance(call, ToolCall) and call.arguments == {"count": 7, "union": 12}


@every_family
def test_a_call_without_arguments_is_a_call(family: str) -> None:
    assert read(family, FAMILIES[family]({})) == called({})


@every_family
def test_a_call_of_an_unknown_tool_is_a_call(family: str) -> None:
    assert read(family, FAMILIES[family](NORTH, "fly")) == (ToolCall("call_0", "fly", NORTH),)


@every_family
def test_several_calls_keep_their_order_and_the_text_around_them(family: str) -> None:
    write = FAMILIES[family]
    message = parse(family, f"First.\n{write(NORTH)}\nThen.\n{write({'to': 'south'})}\nDone.")
    assert message == Message("assistant", "First.\nThen.\nDone.", tool_calls=called(NORTH, {"to": "south"}))


@every_family
def test_one_frame_may_hold_several_calls(family: str) -> None:
    written = FAMILIES[family]
    calls = "\n".join(Written(written.call, written.argument)(arguments) for arguments in (NORTH, {}, FULL))
    message = parse(family, f"Text.{written.around[0]}{calls}{written.around[1]}")
    assert message == Message("assistant", "Text.", tool_calls=called(NORTH, {}, FULL))


@every_family
def test_text_without_a_call_is_content_as_it_is(family: str) -> None:
    closings = "</function> </invoke> </arg_value> a < b"
    assert parse(family, f"  Hello.\n{closings}") == Message("assistant", f"  Hello.\n{closings}")


@every_family
def test_a_call_after_reasoning_is_a_call_and_one_inside_is_not(family: str) -> None:
    (think, end_think), call = FORMATS[family].thinking, FAMILIES[family](NORTH)
    expected = Message("assistant", "", f"Maybe {call}?", called(NORTH))
    assert parse(family, f"{think}\nMaybe {call}?\n{end_think}\n\n{call}") == expected
    assert parse(family, f"Maybe {call}?\n{end_think}\n\n{call}") == expected
    (unclosed,) = read(family, f"{think}\nMaybe {call}")
    assert isinstance(unclosed, MalformedCall)
    assert end_think in unclosed.error


@families_that_quote
def test_a_value_may_quote_whole_calls(family: str) -> None:
    write = FAMILIES[family]
    arguments = {"to": f"Write\n{write(NORTH)}\nor {write(FULL)}, then go.", "steps": 2}
    assert read(family, write(arguments) + write(NORTH)) == called(arguments, NORTH)


@families_that_quote
def test_a_value_may_hold_stray_marks(family: str) -> None:
    write, form = FAMILIES[family], FORMATS[family]
    closings = [mark for mark in form.marks if mark.startswith("</") and mark not in form.thinking]
    for stray in (*closings, "<function=", "<invoke name=", "<parameter=x>", *form.thinking):
        arguments = {"to": f"before {stray} after", "steps": 2}
        assert read(family, write(arguments)) == called(arguments), stray


@every_family
def test_a_call_that_does_not_close_is_kept_and_the_next_one_is_read(family: str) -> None:
    write = FAMILIES[family]
    whole = write(NORTH)
    opened = whole[: whole.index("north")]
    broken, good = read(family, f"{opened}north {whole}")
    assert isinstance(broken, MalformedCall)
    assert (broken.id, broken.truncated) == ("call_0", False)
    assert broken.raw.startswith(opened)
    assert good == ToolCall("call_1", "go", NORTH)


@every_family
def test_text_between_arguments_makes_a_call_malformed_and_the_error_shows_a_call(family: str) -> None:
    write = FAMILIES[family]
    argument = write.argument.format(key="to", value="north", string="true")
    text = write.around[0] + write.call.format(name="go", inside=f"{argument} and {argument}") + write.around[1]
    (broken,) = read(family, text)
    assert isinstance(broken, MalformedCall)
    assert broken.raw == text.strip()
    assert not broken.truncated
    assert "TOOL" in broken.error
    assert "VALUE" in broken.error


@every_family
def test_an_argument_that_is_given_twice_makes_the_call_malformed(family: str) -> None:
    written = FAMILIES[family]
    once = written.argument.format(key="to", value="north", string="true")
    (call,) = read(family, written.around[0] + written.call.format(name="go", inside=once * 2) + written.around[1])
    assert isinstance(call, MalformedCall) and "to is given twice" in call.error


@every_family
def test_a_call_without_a_name_is_malformed(family: str) -> None:
    for name in ("", " "):
        (broken,) = read(family, FAMILIES[family](NORTH, name))
        assert isinstance(broken, MalformedCall)


@every_family
def test_a_reply_cut_anywhere_holds_whole_calls_and_a_truncated_one(family: str) -> None:
    write = FAMILIES[family]
    text = f"Text. {write(NORTH)}\n{write(FULL)}"
    for end in range(len(text)):
        message = parse(family, text[:end])
        read_calls = tuple(call for call in message.tool_calls if isinstance(call, ToolCall))
        assert read_calls == called(NORTH, FULL)[: len(read_calls)]
        rest = message.tool_calls[len(read_calls) :]
        assert len(rest) <= 1
        for call in rest:
            assert isinstance(call, MalformedCall)
            assert call.truncated
            assert end > len("Text. ")
            assert text[:end].endswith(call.raw)


@pytest.mark.long
@every_grammar
@given(arguments=st.dictionaries(st.sampled_from(["a", "b", "c"]), JSON_VALUES))
def test_any_typed_arguments_arrive_unchanged(family: str, arguments: dict[str, JSON]) -> None:
    form, text = FORMATS[family], FAMILIES[family](arguments)
    kinds = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "string", list: "array"}
    properties: JSON = {key: {"type": kinds.get(type(value), "object")} for key, value in arguments.items()}
    tool = ToolSpec("go", "", {"type": "object", "properties": properties})
    values = [value if isinstance(value, str) else json.dumps(value) for value in arguments.values()]
    if not any(mark in value for value in values for mark in (*form.marks, *form.ends, "]]")):
        assert form.parse(text, [tool]).tool_calls == called(arguments)


def parts_of(form: ReplyFormat, write: Written) -> st.SearchStrategy[list[str]]:
    pieces = [*form.marks, write(NORTH), write.call, write.argument, "go", "to", "\n", ">", '"', "<![CDATA[", "]]>"]
    return st.lists(st.one_of(st.sampled_from(pieces), st.text(max_size=5)), max_size=30)


@pytest.mark.long
@every_grammar
@given(data=st.data())
def test_any_text_gives_a_message_whose_calls_it_spells(family: str, data: st.DataObject) -> None:
    text = "".join(data.draw(parts_of(FORMATS[family], FAMILIES[family])))
    message = parse(family, text)
    assert [call.id for call in message.tool_calls] == [f"call_{n}" for n in range(len(message.tool_calls))]
    for call in message.tool_calls:
        assert (call.name if isinstance(call, ToolCall) else call.raw) in text


@pytest.mark.long(cases=4)
@every_family
def test_a_hostile_repetition_is_read_in_linear_time(family: str) -> None:
    # A quadratic reader takes hours for this; a linear one seconds.
    write = FAMILIES[family]
    before, after = write(NORTH).split("north")
    for unit in (*FORMATS[family].marks, before, before + after, after, before + "x\n"):
        assert parse(family, before + unit * 3_000).role == "assistant"
        assert parse(family, before + unit * 3_000 + after).role == "assistant"
    for unit in ("[", "{", "'", '"', "\\", "<", "]", "&", "\n"):
        text = unit * 60_000 + "."
        (call,) = read(family, write({"stops": text}))
        assert isinstance(call, ToolCall)
        assert call.arguments == {"stops": text}
