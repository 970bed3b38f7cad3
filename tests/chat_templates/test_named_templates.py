"""A chat template by its name, or of a file, is used with a tokenizer whose tokens have its marks."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from agentgym.chat_templates.families import family_of, open_renderer, renderer_for
from agentgym.chat_templates.named_templates import NAMED_TEMPLATES, fitting_templates, read_template
from agentgym.chat_templates.template_folder import chat_folder
from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.cli.main import main
from agentgym.embedded import embedded_folder
from agentgym.errors import ConfigError, RenderError
from agentgym.trainers.model_check.findings import CheckOutcome
from agentgym.trainers.model_check.reference import TransformersReference
from agentgym.trainers.model_check.template import check_chat_template
from agentgym.types import JSON, Message, ToolCall, ToolSpec

SHARED = Path(__file__).resolve().parents[3] / "shared" / "data" / "chat_templates"
GO = ToolSpec("go", "Walks.", {"type": "object", "properties": {"direction": {"type": "string"}}})
NORTH, SOUTH = (ToolCall(f"call_{place}", "go", {"direction": place}) for place in ("north", "south"))
TALK = [
    Message("system", "You play."),
    Message("user", "Begin."),
    Message("assistant", "I go.", tool_calls=(NORTH, SOUTH)),
    Message("tool", "A wall.", tool_call_id=NORTH.id),
    Message("tool", "A cave.", tool_call_id=SOUTH.id),
    Message("assistant", "I am in a cave."),
    Message("user", "Go on."),
]
FAMILIES = {
    "qwen3": "hermes",
    "chatml": "hermes",
    "llama3": "llama3_json",
    "gemma3": "gemma2_generic",
    "granite4": "granite4",
}
GEMMA = """\
<bos><start_of_turn>user
You play.

# Tools

You may call one or more functions to assist with the user query.

You are provided with function signatures within <tools></tools> XML tags:
<tools>
{"type": "function", "function": {"name": "go", "description": "Walks.", "parameters": {"type": "object", \
"properties": {"direction": {"type": "string"}}}}}
</tools>

For each function call, return a json object with function name and arguments:
{"name": <function-name>, "arguments": <args-json-object>}

Begin.<end_of_turn>
<start_of_turn>model
I go.
{"name": "go", "arguments": {"direction": "north"}}
{"name": "go", "arguments": {"direction": "south"}}<end_of_turn>
<start_of_turn>user
<tool_response>
A wall.
</tool_response>
<tool_response>
A cave.
</tool_response><end_of_turn>
<start_of_turn>model
I am in a cave.<end_of_turn>
<start_of_turn>user
Go on.<end_of_turn>
<start_of_turn>model
"""


def tokenizer_with(*marks: str, template: str = "") -> ChatTokenizer:
    """The tokenizer of the embedded model with further marks, and another template."""
    backend = Tokenizer.from_file(str(embedded_folder() / "tokenizer.json"))
    backend.add_special_tokens([mark for mark in ("<bos>", *marks) if backend.token_to_id(mark) is None])
    special = {"bos_token": "<bos>", "eos_token": "<|endoftext|>"}
    return ChatTokenizer(backend, template, special_tokens=special, stop_tokens=("<|endoftext|>",))


def named(name: str) -> ChatTokenizer:
    return tokenizer_with(*NAMED_TEMPLATES[name].marks, template=read_template(name))


def folder_without_template(folder: Path, *marks: str) -> Path:
    """A folder with a tokenizer alone, which has no `<|im_start|>`."""
    text = (embedded_folder() / "tokenizer.json").read_text(encoding="utf-8").replace("<|im_start|>", "<|other|>")
    backend = Tokenizer.from_str(text)
    backend.add_special_tokens(list(marks))
    folder.mkdir()
    backend.save(str(folder / "tokenizer.json"))
    return folder


def texts_of(tokenizer: ChatTokenizer, messages: list[Message], tools: list[ToolSpec], **variables: JSON) -> str:
    renderer = renderer_for(tokenizer, variables=variables)
    return renderer.decode(renderer.render(messages, tools))


@pytest.mark.parametrize("name", NAMED_TEMPLATES)
def test_a_template_by_name_keeps_each_property_of_training(name: str) -> None:
    tokenizer = named(name)
    family = family_of(tokenizer)
    assert family is not None and family.name == FAMILIES[name]
    report = check_chat_template(tokenizer, reference=TransformersReference.of(tokenizer))
    assert report.family == FAMILIES[name]
    assert {result.name for result in report.results if result.outcome is not CheckOutcome.OK} <= {"prefix", "spelled"}
    assert report.ok


def test_a_conversation_of_gemma_with_tools_reads_like_this() -> None:
    assert texts_of(named("gemma3"), TALK, [GO]) == GEMMA


@pytest.mark.parametrize(
    ("name", "published", "tools"),
    [
        ("qwen3", "Qwen-Qwen3-0.6B", [GO]),
        ("chatml", "Qwen-Qwen2.5-7B-Instruct", [GO]),
        ("gemma3", "google-gemma-3", []),
    ],
)
def test_a_template_by_name_writes_what_the_family_s_own_writes(
    name: str, published: str, tools: list[ToolSpec]
) -> None:
    if not SHARED.is_dir():
        pytest.skip(f"the shared test data {SHARED} is not beside this checkout")
    tokenizer = named(name)
    source = (SHARED / f"{published}.jinja").read_text(encoding="utf-8")
    theirs = tokenizer_with(*NAMED_TEMPLATES[name].marks, template=source)
    for talk in (TALK, TALK[:2]) if tools else (TALK[:2], [*TALK[:2], *TALK[5:]]):
        assert texts_of(tokenizer, talk, tools) == texts_of(theirs, talk, tools)


def test_reasoning_is_turned_off_in_each_reply_alike() -> None:
    talk = [TALK[1], TALK[5], TALK[6]]
    text = texts_of(named("qwen3"), talk, [], enable_thinking=False)
    assert text.count("<|im_start|>assistant\n<think>\n\n</think>\n\n") == 2
    assert "<think>" not in texts_of(named("qwen3"), talk, [])


def test_a_model_without_a_template_is_refused_with_the_names_of_those_that_fit(tmp_path: Path) -> None:
    bare = folder_without_template(tmp_path / "bare", "<start_of_turn>", "<end_of_turn>")
    with pytest.raises(RenderError, match=r"has no chat template, .*: its tokens fit --chat-template gemma3; or give"):
        open_renderer(bare)
    assert fitting_templates(ChatTokenizer.load(embedded_folder()).backend) == ["qwen3", "chatml"]
    nothing = folder_without_template(tmp_path / "nothing")
    with pytest.raises(RenderError, match=r"it is not known how to talk to it: give one with --chat-template FILE"):
        open_renderer(nothing)


def test_a_template_whose_marks_the_tokenizer_lacks_is_refused_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    message = "whose tokenizer has no token <start_of_turn>, <end_of_turn>; of the templates by name, qwen3 and chatml"
    with pytest.raises(ConfigError, match=message):
        chat_folder("embedded", "gemma3")
    assert not list((tmp_path / "cache").rglob("*.*"))
    assert main(["models", "check", "embedded", "--only", "template", "--chat-template", "gemma3"]) == 2
    run = ["--env", "TextGame-v0", "--chat-template", "gemma3", "--output", str(tmp_path / "run")]
    assert main(["train", *run]) == 2
    assert " ".join(capsys.readouterr().err.split()).count(message) == 2
    assert not (tmp_path / "run").exists()


def test_a_name_is_preferred_to_a_file_and_an_unknown_one_gets_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("chatml").write_text("{{ messages }}")
    folder = chat_folder("embedded", "chatml")
    assert (folder / "chat_template.jinja").read_text(encoding="utf-8") == read_template("chatml")
    assert read_template("./chatml") == "{{ messages }}"
    with pytest.raises(ConfigError, match=r"'gema3' cannot be read: .*did you mean 'gemma3'"):
        read_template("gema3")
    with pytest.raises(ConfigError, match=r"those by name are qwen3, chatml, llama3, gemma3, granite4"):
        read_template("zzz.jinja")


def test_a_template_file_replaces_that_of_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    own = json.loads((embedded_folder() / "tokenizer_config.json").read_text())["chat_template"]
    (tmp_path / "t.jinja").write_text("{# mine #}" + own)
    folder = chat_folder("embedded", str(tmp_path / "t.jinja"))
    assert (folder / "chat_template.jinja").read_text() == "{# mine #}" + own
    files = {file.name for file in embedded_folder().iterdir() if file.is_file()}
    assert {file.name for file in folder.iterdir()} == files | {"chat_template.jinja"}
    assert (folder / "config.json").read_bytes() == (embedded_folder() / "config.json").read_bytes()
    assert chat_folder("embedded", str(tmp_path / "t.jinja")) == folder
    (tmp_path / "t.jinja").write_text(own)
    assert chat_folder("embedded", str(tmp_path / "t.jinja")) != folder
    assert not (embedded_folder() / "chat_template.jinja").exists()


def test_a_template_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the chat template '.*none\.jinja' cannot be read: .*No such file"):
        chat_folder("embedded", str(tmp_path / "none.jinja"))
    shutil.copytree(embedded_folder(), tmp_path / "run/checkpoints/step-000002")
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    with pytest.raises(ConfigError, match="step-000002 has the chat template of its run"):
        chat_folder(str(tmp_path / "run/checkpoints/step-000002"), str(tmp_path / "t.jinja"))
