"""Templates of the kinds that rewrite, rename or renumber, over a small tokenizer: each has a renderer of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tokenizers import AddedToken, Tokenizer

from agentgym.chat_templates import ChatTokenizer, TemplateRenderer, renderer_for
from agentgym.chat_templates.families import family_of
from agentgym.chat_templates.formats.registry import FORMATS
from agentgym.errors import RenderError
from agentgym.types import MalformedCall, Message, ToolCall, ToolSpec

ASK = Message("user", "Where?")
GO = ToolSpec("go", "Walks.", {"type": "object", "properties": {}})
SIGNS = {
    "gpt_oss": "<|start|>assistant<|channel|>final<|message|><|call|>",
    "deepseek_v32": "<｜DSML｜function_calls><｜tool▁calls▁begin｜>",
    "deepseek_v3": "<｜tool▁calls▁begin｜>function<｜tool▁sep｜>go\n```json",
    "deepseek_v31": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>go<｜tool▁sep｜>{}",
    "kimi_k2": "<|im_user|>user<|im_middle|><|im_end|>",
    "hy3": "{% set suffix = ':opensource' %}{% set end = '<｜hy_eos{}｜>'.format(suffix) %}",
    "glm45": "[gMASK]<sop><|user|><|observation|><tool_call><arg_key>",
    "minimax_m1": "<beginning_of_sentence>ai name=assistant\n<tool_calls>",
    "kimi_k3": "<|open|>message<|sep|><|close|>message<|sep|><|end_of_msg|>",
    "minimax_m2": "]~b]ai\n<minimax:tool_call>",
    "command_r7b": "<|START_OF_TURN_TOKEN|><|START_ACTION|>",
    "gemma4": "<|turn>model\n<|tool_call>call:<tool_call|>",
    "function_gemma": "<start_of_turn>model<start_function_call>",
    "gemma2_generic": "<start_of_turn>model",
    "mistral": "[INST][/INST][TOOL_CALLS]",
    "nemotron": "<SPECIAL_11>Assistant /no_think <TOOLCALL>[",
    "seed_oss": "<seed:tool_call>\n<function=go>",
    "functionary": "<|start_header_id|>assistant<|end_header_id|><function=go>",
    "qwen3_coder": "<|im_start|>assistant\n<tool_call>\n<function=go>",
    "pythonic": "<|header_start|>assistant<|header_end|>",
    "llama3_json": "<|start_header_id|>assistant<|end_header_id|>",
    "granite": "<|start_of_role|>assistant<|end_of_role|><|tool_call|>",
    "granite4": "<|start_of_role|>assistant<|end_of_role|><tool_call>",
    "lfm2": "<|im_start|>system\nList of tools: <|tool_list_start|>",
    "phi4_mini": "<|assistant|><|end|>",
    "hermes": "<|im_start|>assistant\n<tool_call>",
}


@pytest.mark.parametrize("name", sorted(SIGNS))
def test_a_family_is_recognized_by_what_its_templates_spell(name: str, tiny: ChatTokenizer) -> None:
    family = family_of(replace(tiny, template=SIGNS[name]))
    assert family is not None
    assert FORMATS[family.name] is FORMATS[name]


def test_what_no_family_spells_is_unknown(tiny: ChatTokenizer) -> None:
    assert family_of(replace(tiny, template="{{ messages }}")) is None


def made(bare: Tokenizer, template: str, marks: str, stops: tuple[str, ...] = ()) -> TemplateRenderer:
    """The renderer that a template gets over the small tokenizer with the marks."""
    backend = Tokenizer.from_str(bare.to_str())
    backend.add_special_tokens([AddedToken(mark, normalized=False, special=True) for mark in marks.split()])
    return renderer_for(ChatTokenizer(backend, template, stop_tokens=stops))


def said(renderer: TemplateRenderer, sampled: str, *new: Message) -> str:
    """What is appended to a reply of that text."""
    return renderer.decode(renderer.extend(renderer.tokenizer.encode(sampled), new))


GLM = (
    "{% for m in messages %}{% if m.role == 'tool' %}<|observation|>{{ m.content }}{% else %}<|{{ m.role }}|>"
    "{{ m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{% for k, v in c.function"
    ".arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v if v is string else v | tojson }}</arg_value>"
    "{% endfor %}</tool_call>{% endfor %}{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_where_the_next_message_s_mark_ends_a_reply_it_stands_once(bare_backend: Tokenizer) -> None:
    marks = "<|user|> <|assistant|> <|observation|> <|system|> <tool_call> </tool_call>"
    renderer = made(bare_backend, GLM, marks, ("<|user|>", "<|observation|>"))
    result = Message("tool", "A wall.", tool_call_id="0", name="go")
    assert said(renderer, "Hi.<|user|>", ASK) == "Where?<|assistant|>"
    assert said(renderer, "Hi.", ASK) == "<|user|>Where?<|assistant|>"
    assert said(renderer, "Hi.<|observation|>", result) == "A wall.<|assistant|>"
    assert said(renderer, "Hi.<|user|>", result) == "<|observation|>A wall.<|assistant|>"
    assert said(renderer, "Hi.<|user|>", Message("system", "x"), ASK) == "<|system|>x<|user|>Where?<|assistant|>"
    assert not renderer.rewrites


MISTRAL = (
    "{% for m in messages %}{% if m.role == 'user' %}{% if tools and loop.last %}[AVAILABLE_TOOLS]{{ tools | tojson }}"
    "[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]{% elif m.role == 'tool' %}{% if m.tool_call_id | length"
    " != 9 %}{{ raise_exception('nine!') }}{% endif %}[TOOL_RESULTS]{{ m.tool_call_id }} {{ m.content }}"
    "[/TOOL_RESULTS]{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}{{ c.function | tojson }}"
    "{{ ', ' if not loop.last }}{% endfor %}]</s>{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)


def test_tools_that_move_stay_where_they_were_shown_and_ids_get_nine_characters(bare_backend: Tokenizer) -> None:
    marks = "[INST] [/INST] [AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS] </s>"
    renderer = made(bare_backend, MISTRAL, marks)
    assert said(renderer, "Hi.</s>", ASK) == "[INST]Where?[/INST]"
    appended = said(renderer, "Hi.</s>", Message("tool", "A wall.", tool_call_id="call_0", name="go"))
    assert appended.startswith("[TOOL_RESULTS]")
    call_id, _, content = appended.removeprefix("[TOOL_RESULTS]").partition(" ")
    assert (len(call_id), content) == (9, "A wall.[/TOOL_RESULTS]")
    result = Message("tool", "A wall.", tool_call_id="aB3456789", name="go")
    assert "aB3456789" in said(renderer, "Hi.</s>", result)
    calls = Message("assistant", "", tool_calls=(ToolCall("call_0", "go", {}),))
    assert call_id in renderer.decode(renderer.render([ASK, calls, Message("tool", "x", tool_call_id="call_0")]))
    assert renderer.rewrites
    assert any("AVAILABLE_TOOLS" in sentence and "line" in sentence for sentence in renderer.rewrites)


def test_a_template_that_names_the_tool_of_a_result_gets_the_message_s_name(bare_backend: Tokenizer) -> None:
    template = (
        "{% set ns = namespace(name='') %}{% for m in messages %}<|im_start|>{% for c in m.tool_calls or [] %}"
        "{% set ns.name = c.function.name %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
        "{{ m.role }} {{ ns.name if m.role == 'tool' }} {{ m.content }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    renderer = made(bare_backend, template, "<|im_start|> <|im_end|> <tool_call> </tool_call>")
    result = Message("tool", "A wall.", tool_call_id="0", name="stare")
    assert said(renderer, "Hi.<|im_end|>", result) == "<|im_start|>tool stare A wall.<|im_end|><|im_start|>assistant "
    with pytest.raises(RenderError, match="the tool's name before a result"):
        said(renderer, "Hi.<|im_end|>", replace(result, name=None))


def test_a_template_that_changes_a_list_is_refused_as_the_sandbox_refuses_it(tiny: ChatTokenizer) -> None:
    template = "{% set seen = [] %}\n{% for m in messages %}{{ seen.append(m) }}{{ m.content }}<|im_end|>{% endfor %}"
    with pytest.raises(RenderError, match=r"access to attribute 'append' of 'list' object is unsafe.*line 2"):
        renderer_for(replace(tiny, template=template))


APERTUS = (
    "{% set ns = namespace(inside=false) %}{% for m in messages %}{% if m.role == 'user' %}{% if ns.inside %}"
    "<|assistant_end|>{% endif %}{% set ns.inside = false %}<|user_start|>{{ m.content }}<|user_end|>"
    "{% elif m.role == 'tool' %}[{{ m.content }}]{% else %}{% if not ns.inside %}<|assistant_start|>"
    '{% endif %}{% set ns.inside = true %}{{ m.content }}{% for c in m.tool_calls or [] %}<|tools_prefix|>[{"'
    '{{ c.function.name }}": {{ c.function.arguments | tojson }}}]<|tools_suffix|>{% endfor %}{% endif %}'
    "{% endfor %}{% if add_generation_prompt %}<|assistant_start|>{% endif %}"
)


def test_calls_with_results_in_the_same_message_end_a_reply(
    bare_backend: Tokenizer,
) -> None:
    marks = "<|user_start|> <|user_end|> <|assistant_start|> <|assistant_end|> <|tools_prefix|> <|tools_suffix|>"
    renderer = made(bare_backend, APERTUS, marks, ("<|assistant_end|>", "<|tools_suffix|>"))
    result = Message("tool", "A wall.", tool_call_id="0", name="go")
    calls = '<|tools_prefix|>[{"go": {}}]<|tools_suffix|>'
    assert renderer.parse(renderer.tokenizer.encode(calls)).tool_calls == (ToolCall("call_0", "go", {}),)
    (broken,) = renderer.parse(renderer.tokenizer.encode(calls.replace("{}", "{"))).tool_calls
    assert isinstance(broken, MalformedCall) and not broken.truncated
    assert said(renderer, calls, result) == "[A wall.]<|assistant_start|>"
    question = "<|user_start|>Where?<|user_end|><|assistant_start|>"
    assert said(renderer, calls, ASK) == "<|assistant_end|>" + question
    assert said(renderer, "Hi.<|assistant_end|>", ASK) == question


NAMING = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'tool' %}"
    "{% set ns = namespace(name=m.name or m.tool_call_id) %}{{ ns.name }}: {% endif %}{{ m.content }}"
    '{% for c in m.tool_calls or [] %}<tool_call>{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}</tool_call>{% endfor %}<|foot|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_a_result_without_a_name_gets_its_id_where_the_template_does_so(bare_backend: Tokenizer) -> None:
    marks = "<|user|> <|assistant|> <|tool|> <|foot|> <tool_call> </tool_call>"
    renderer = made(bare_backend, NAMING, marks, ("<|foot|>",))
    assert renderer.result_needs == {"name"}
    unread = Message("tool", "No.", tool_call_id="call_3")
    assert said(renderer, "Hi.<|foot|>", unread) == "<|tool|>call_3: No.<|foot|><|assistant|>"
    with pytest.raises(RenderError, match="give the tool message its own"):
        said(renderer, "Hi.<|foot|>", Message("tool", "No."))


BIELIK = (
    "{% set start = 1 if messages[0].role == 'system' else 0 %}{% if start %}<|im_start|>system\n"
    "{{ messages[0].content }}<|im_end|>\n{% endif %}{% for m in messages[start:] %}{% if m.role == 'tool' %}"
    "{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user\n{% endif %}"
    "<|function_output|>{{ m.content }}{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}"
    "<|im_end|>\n{% endif %}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    '{% for c in m.tool_calls or [] %}\n<tool_call>\n{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def test_results_keep_their_turn_where_a_system_prompt_makes_the_template_miscount(bare_backend: Tokenizer) -> None:
    marks = "<|im_start|> <|im_end|> <|function_output|> <tool_call> </tool_call>"
    renderer = made(bare_backend, BIELIK, marks, ("<|im_end|>",))
    assert type(renderer).__name__ == "BielikRenderer"
    results = [Message("tool", text, tool_call_id=text, name="go") for text in "ab"]
    framed = "\n<|im_start|>user\n<|function_output|>a<|function_output|>b<|im_end|>\n<|im_start|>user\nWhere?"
    assert said(renderer, "Hi.<|im_end|>", *results, ASK) == framed + "<|im_end|>\n<|im_start|>assistant\n"


APRIEL = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% if m.tool_calls %}\n<tool_calls>["
    '{% for c in m.tool_calls %}{"name": "{{ c.function.name }}", "arguments": '
    "{{ c.function.arguments | tojson }}}{% if not loop.last %}, {% endif %}{% endfor %}]</tool_calls>"
    "{% endif %}\n<|end|>\n<|foot|>{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"
)


def test_of_the_formats_that_read_calls_one_is_taken_that_knows_the_end_of_replies(bare_backend: Tokenizer) -> None:
    marks = "<|user|> <|assistant|> <|tool|> <|end|> <|foot|> <tool_calls> </tool_calls>"
    renderer = made(bare_backend, APRIEL, marks, ("<|foot|>",))
    assert renderer.reply_format.name == "apriel_1_6_15b_thinker_fixed"
    assert renderer.reads_calls


CALL = Message("assistant", "", tool_calls=(ToolCall("call_0", "go", {"to": "é"}),))
CHAT = (
    "{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{{{{ m.content }}}}{{% for c in m.tool_calls or [] %}}"
    "{call}{{% endfor %}}<|im_end|>\n{{% endfor %}}{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)
CHAT_MARKS = "<|im_start|> <|im_end|> <tool_call> </tool_call>"


def test_a_template_that_takes_arguments_as_text_alone_gets_json_text(bare_backend: Tokenizer) -> None:
    call = (
        """<tool_call>{{ '{"name": "' + c.function.name + '", "arguments": ' + c.function.arguments }}}</tool_call>"""
    )
    renderer = made(bare_backend, CHAT.format(call=call), CHAT_MARKS)
    assert renderer.text_arguments
    assert renderer.reads_calls
    assert '"arguments": {"to": "é"}}</tool_call>' in renderer.decode(renderer.render([ASK, CALL], [GO]))


def test_a_template_that_refuses_calls_refuses_tools_with_the_place(bare_backend: Tokenizer) -> None:
    renderer = made(bare_backend, "{% set ids = [] %}\n" + CHAT.format(call="{{ ids.append(c.id) }}"), CHAT_MARKS)
    with pytest.raises(RenderError, match=r"cannot be given tools: .*'append' of 'list' object is unsafe.*line 3"):
        renderer.render([ASK], [GO])
    assert "Where?" in renderer.decode(renderer.render([ASK]))


def test_text_arguments_without_quotes_are_read_by_the_format_of_the_calls(
    bare_backend: Tokenizer,
) -> None:
    arguments = "{% for k, v in c.function.arguments.items() %}{{ k }}={{ v }}{{ ', ' if not loop.last }}{% endfor %}"
    renderer = made(bare_backend, CHAT.format(call=f"[{{{{ c.function.name }}}}({arguments})]"), CHAT_MARKS)
    assert renderer.reply_format is FORMATS["pythonic"]
    assert "line 2" in renderer.drops["arguments"]
    sampled = renderer.parse(renderer.tokenizer.encode('[go(to="é")]<|im_end|>'), [GO])
    assert [(call.name, call.arguments) for call in sampled.tool_calls if isinstance(call, ToolCall)] == [
        ("go", {"to": "é"})
    ]
    renderer.render([ASK], [GO])


def test_calls_behind_a_prompt_that_is_rewritten_later_are_read(bare_backend: Tokenizer) -> None:
    call = "<tool_call>{{ c.function | tojson }}</tool_call>"
    template = CHAT.format(call=call).replace(
        "\n{{ m.content", "\n{{ 'Be brief.' if m.role == 'user' and loop.last }}{{ m.content"
    )
    assert made(bare_backend, template, CHAT_MARKS).reads_calls


def test_a_result_needs_no_name_where_the_template_has_a_word_for_none(bare_backend: Tokenizer) -> None:
    call = "<tool_call>{{ c.function | tojson }}</tool_call>"
    name = "{{ m.role }}{{ ' ' ~ (m.name | default('some tool')) if m.role == 'tool' }}"
    template = CHAT.format(call=call).replace("{{ m.role }}", name)
    renderer = made(bare_backend, template, CHAT_MARKS)
    result = Message("tool", "A wall.", tool_call_id="0")
    assert "tool some tool\nA wall." in said(renderer, "Hi.<|im_end|>", result)
    assert "tool go\nA wall." in said(renderer, "Hi.<|im_end|>", replace(result, name="go"))


def test_what_closes_a_reply_may_spell_what_it_closes(bare_backend: Tokenizer) -> None:
    template = (
        "{% for m in messages %}<|open|>message {{ m.role }}<|sep|>{% if m.role == 'assistant' %}<|open|>response"
        "<|sep|>{{ m.content }}<|close|>response<|sep|>{% else %}{{ m.content }}{% endif %}<|close|>message<|sep|>"
        "<|end_of_msg|>{% endfor %}{% if add_generation_prompt %}<|open|>message assistant<|sep|><|open|>response"
        "<|sep|>{% endif %}"
    )
    renderer = made(bare_backend, template, "<|open|> <|close|> <|sep|> <|end_of_msg|>")
    end = "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"
    question = "<|open|>message user<|sep|>Where?<|close|>message<|sep|><|end_of_msg|>"
    prompt = "<|open|>message assistant<|sep|><|open|>response<|sep|>"
    assert said(renderer, f"Hi.{end}", ASK) == question + prompt
    assert said(renderer, "Hi.", ASK) == end + question + prompt
