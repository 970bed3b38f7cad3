"""A folder or tokenizer gets the renderer of its family, or an error that says what to do."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from transformers import PreTrainedTokenizerFast

from agentgym.chat_templates import FAMILIES, ChatMLRenderer, ChatTokenizer, Renderer, TemplateRenderer, renderer_for
from agentgym.chat_templates.formats.hermes import HERMES
from agentgym.chat_templates.formats.registry import FORMATS
from agentgym.chat_templates.jinja_template import ChatTemplate
from agentgym.errors import ConfigError, RenderError, RunFolderError, UnknownName
from agentgym.types import Message, ToolCall

USER = Message("user", "Begin.")


@pytest.fixture
def folder(tiny: ChatTokenizer, tmp_path: Path) -> Path:
    tiny.backend.save(str(tmp_path / "tokenizer.json"))
    config = {"eos_token": {"content": "<|im_end|>"}, "chat_template": tiny.template}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_folder_with_chatml_gets_the_chatml_renderer(folder: Path, chatml: ChatMLRenderer) -> None:
    renderer = renderer_for(folder)
    assert isinstance(renderer, ChatMLRenderer)
    assert isinstance(renderer, Renderer)
    assert renderer.render([USER]) == chatml.render([USER])
    assert renderer.stop_ids == chatml.stop_ids[:1]


def test_a_template_file_goes_before_the_config(folder: Path) -> None:
    (folder / "chat_template.jinja").write_text("{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}")
    assert renderer_for(folder).decode(renderer_for(folder).render([USER])) == "Begin.<|im_end|>"


def test_a_template_for_tools_is_used_with_tools_alone(folder: Path, tiny: ChatTokenizer) -> None:
    plain = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>"
    templates = [{"name": "default", "template": plain}, {"name": "tool_use", "template": tiny.template}]
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    tokenizer = ChatTokenizer.load(folder)
    assert (tokenizer.template, tokenizer.tool_template) == (plain, tiny.template)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("of the file")
    assert ChatTokenizer.load(folder).tool_template == "of the file"


def test_the_ids_of_generation_config_end_a_reply_too(folder: Path, tiny: ChatTokenizer) -> None:
    end = tiny.backend.token_to_id("<|endoftext|>")
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [-1, end, 1 << 40]}))
    assert end in renderer_for(folder).stop_ids


@pytest.mark.parametrize("form", ["list", "number", "of the language part"])
def test_the_ids_of_config_end_a_reply_where_generation_config_names_none(
    form: str, folder: Path, tiny: ChatTokenizer
) -> None:
    end = tiny.backend.token_to_id("<|endoftext|>")
    config = {"list": {"eos_token_id": [end]}, "number": {"eos_token_id": end}}
    own = config.get(form, {"text_config": {"eos_token_id": [end]}})
    (folder / "config.json").write_text(json.dumps(own))
    assert end in renderer_for(folder).stop_ids
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": renderer_for(folder).stop_ids[0]}))
    assert end not in renderer_for(folder).stop_ids


def test_a_template_for_tools_in_a_folder_of_its_own_is_used_with_tools_alone(
    folder: Path, tiny: ChatTokenizer
) -> None:
    plain = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>\n{% endfor %}<|im_start|>"
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tiny.backend)
    tokenizer.chat_template = {"default": plain, "tool_use": tiny.template}
    tokenizer.save_pretrained(folder)
    assert (folder / "additional_chat_templates" / "tool_use.jinja").is_file()
    loaded_tokenizer = ChatTokenizer.load(folder)
    assert (loaded_tokenizer.template, loaded_tokenizer.tool_template) == (plain, tiny.template)
    assert ChatTokenizer.load(folder, tiny.template).tool_template == ""  # a template that is given replaces both


def test_a_template_that_leaves_out_how_the_model_calls_is_known_by_its_tokenizer(folder: Path) -> None:
    """LFM2.5's: sampled calls stand between marks that only the tokenizer names."""
    plain = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    template = plain + "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    tokenizer = replace(ChatTokenizer.load(folder), template=template)
    assert renderer_for(tokenizer).reply_format.name == "hermes"
    tokenizer.backend.add_special_tokens(["<|tool_call_start|>", "<|tool_call_end|>"])
    renderer = renderer_for(tokenizer)
    ids = tokenizer.encode('<|tool_call_start|>[go(direction="north")]<|tool_call_end|><|im_end|>')
    (call,) = renderer.parse(ids).tool_calls
    assert isinstance(call, ToolCall) and (call.name, call.arguments) == ("go", {"direction": "north"})


def test_a_transformers_tokenizer_is_taken_as_it_is(tiny: ChatTokenizer, chatml: ChatMLRenderer) -> None:
    theirs = PreTrainedTokenizerFast(tokenizer_object=tiny.backend, eos_token="<|im_end|>", chat_template=tiny.template)
    assert renderer_for(theirs).render([USER]) == chatml.render([USER])


def test_a_family_may_be_asked_for(tiny: ChatTokenizer) -> None:
    assert renderer_for(tiny, "chatml").reply_format is HERMES
    assert {family.name for family in FAMILIES} <= set(FORMATS)
    with pytest.raises(UnknownName, match="did you mean 'chatml'"):
        renderer_for(tiny, "chatlm")


@pytest.mark.parametrize("place", ["run/checkpoints/step-000001", "taught"])
def test_a_model_has_the_family_that_it_was_trained_with(folder: Path, place: str) -> None:
    model = folder / place
    model.mkdir(parents=True)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, model / name)
    settings = (folder / "run" if place.startswith("run") else model) / "config.yaml"
    settings.write_text("agentgym: 0.1.0\nfamily: qwen3_coder\n")
    assert renderer_for(model).reply_format.name == "qwen3_coder"
    assert renderer_for(model, "hermes").reply_format.name == "hermes"
    settings.write_text("agentgym: 0.1.0\nfamily: my_renderer.py:make\n")
    with pytest.raises(ConfigError, match=r"a renderer of its own: name it with --family my_renderer\.py:make"):
        renderer_for(model)
    settings.write_text("family: [")
    with pytest.raises(RunFolderError, match="name the chat format with --family"):
        renderer_for(model)


def test_what_a_renderer_sets_itself_is_no_variable(folder: Path) -> None:
    with pytest.raises(ConfigError, match="'tools' is set for each conversation: they are those of the environment"):
        renderer_for(folder, variables={"tools": []})


def test_settings_of_another_program_name_no_family(folder: Path) -> None:
    (folder / "config.yaml").write_text("family: resnet\n")
    assert renderer_for(folder).reply_format.name == "hermes"


def test_a_chatml_template_with_other_rules_is_rendered_by_jinja_with_a_note(
    tiny: ChatTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    trimmed = replace(tiny, template=tiny.template.replace("message.content", "message.content | trim"))
    assert type(renderer_for(trimmed)) is TemplateRenderer
    assert "changes contents" in caplog.text


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match=r"no model folder .*nowhere.*: give a folder that holds tokenizer\.json"):
        renderer_for(tmp_path / "nowhere")


def test_a_folder_without_a_tokenizer_is_refused_with_what_to_save(tmp_path: Path) -> None:
    with pytest.raises(RunFolderError, match="save_pretrained"):
        renderer_for(tmp_path)


def test_a_tokenizer_without_a_template_is_refused_with_what_to_add(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(RenderError, match=r"no chat template.*--chat-template FILE.*chat_template\.jinja"):
        renderer_for(folder)


def test_a_broken_config_is_named(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text("{")
    with pytest.raises(RunFolderError, match=r"tokenizer_config\.json.* is not JSON"):
        renderer_for(folder)


def test_a_broken_template_is_refused(tiny: ChatTokenizer) -> None:
    with pytest.raises(RenderError, match="does not compile"):
        renderer_for(replace(tiny, template="{% for %}"))


@pytest.mark.parametrize(
    "source", ["{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", "{% if 1 %}" * 400 + "{% endif %}" * 400]
)
def test_a_template_that_is_nested_too_deeply_is_refused_in_one_line(source: str) -> None:
    with pytest.raises(RenderError, match="does not compile: RecursionError"):
        ChatTemplate(source, {})


def test_a_template_whose_text_does_not_fit_into_memory_is_refused() -> None:
    template = ChatTemplate("{{ messages[0].role * 10**18 }}", {})
    with pytest.raises(RenderError, match=r"refuses a conversation of roles \(user\): MemoryError"):
        template.render([{"role": "user", "content": "Hi"}])


def test_importing_loads_neither_torch_nor_transformers() -> None:
    code = "import sys, agentgym.chat_templates; print('torch' in sys.modules, 'transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]
