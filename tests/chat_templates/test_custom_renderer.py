"""A renderer of a user's own, named by file: what it is given, what is recorded, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from agentgym.chat_templates import ChatTokenizer, TemplateRenderer, open_renderer, renderer_for
from agentgym.chat_templates.families import format_to_record
from agentgym.errors import ConfigError, RenderError, UnknownName, UserCodeFault
from agentgym.evaluation import evaluate
from agentgym.evaluation.run_check.verify import verify_run
from agentgym.testing import check_renderer
from agentgym.types import Message

OWN = '''
from agentgym.chat_templates import TemplateRenderer
from agentgym.types import Message


class Plain:
    """A line for each message, over a tokenizer without a template."""

    thinking = ("", "")

    def __init__(self, tokenizer, *, variables=None):
        self.tokenizer, self.variables = tokenizer, variables
        self.vocab_size = tokenizer.vocab_size
        self.stop_ids = (tokenizer.backend.token_to_id("<|im_end|>"),)

    def line(self, message):
        if message.role == "assistant":
            return [*self.tokenizer.encode_plain("assistant:" + message.content), *self.stop_ids]
        return self.tokenizer.encode_plain(f"{message.role}: {message.content} ")

    def render(self, messages, tools=()):
        said = [index for message in messages for index in self.line(message)]
        return said + self.line(Message("assistant", ""))[:-1]

    rerender = render

    def extend(self, ids, new_messages):
        end = [] if ids and ids[-1] in self.stop_ids else [*self.stop_ids]
        return end + self.render(new_messages)

    def parse(self, ids, tools=(), prompt=(), stop=""):
        ids = list(ids)
        end = ids.index(self.stop_ids[0]) if self.stop_ids[0] in ids else len(ids)
        return Message("assistant", self.decode(ids[:end]))

    def decode(self, ids):
        return self.tokenizer.decode(ids)


class Loud(TemplateRenderer):
    """The folder's template, whose replies are read in capitals."""

    def parse(self, ids, tools=(), prompt=(), stop=""):
        message = super().parse(ids, tools, prompt, stop)
        return Message("assistant", message.content.upper(), message.reasoning, message.tool_calls)


def nothing(tokenizer):
    return tokenizer


def other(folder):
    return folder


def broken(tokenizer):
    raise KeyError("no such template")


NUMBER = 1
'''


@pytest.fixture
def own(tmp_path: Path) -> str:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return str(path)


@pytest.fixture
def bare_folder(tmp_path: Path, tiny: ChatTokenizer) -> Path:
    """The folder of a model without a chat template."""
    folder = tmp_path / "bare"
    folder.mkdir()
    tiny.backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|im_end|>"}))
    return folder


def test_a_model_without_a_template_talks_by_a_renderer_of_ones_own(own: str, bare_folder: Path) -> None:
    with pytest.raises(RenderError, match="has no chat template"):
        open_renderer(bare_folder)
    renderer = open_renderer(bare_folder, f"{own}:Plain", date="2026-03-01")
    assert [check for check in check_renderer(renderer, tools=False) if not check.ok] == []
    assert renderer.decode(renderer.render([Message("user", "Hello")])) == "user: Hello assistant:"
    assert vars(renderer)["variables"] == {"strftime_now": "2026-03-01"}
    assert format_to_record(renderer, f"{own}:Plain", date="2026-03-01", given_date=None) == (
        f"{own}:Plain",
        "2026-03-01",
    )


@pytest.mark.parametrize("name", ["Plain", "Loud"])
def test_an_evaluation_with_it_names_it_and_is_sound(
    name: str, own: str, tokenizer_folder: Path, tmp_path: Path
) -> None:
    family = f"{own}:{name}"
    settings = {"num_tasks": 2, "tokenizer": str(tokenizer_folder), "family": family}
    result = evaluate("TextGame-v0", "oracle", output=tmp_path / "run", **settings)
    assert result.config.family == family
    renderer = open_renderer(tokenizer_folder, family, date=result.config.date)
    report = verify_run(result.output, renderer)
    assert report.ok, "\n".join(report.lines())
    says_nothing = name == "Loud"  # whose replies are all calls, which it reads as the template does
    assert verify_run(result.output, renderer_for(tokenizer_folder)).ok is says_nothing


def test_what_reads_recorded_conversations_needs_a_template(own: str, tokenizer_folder: Path) -> None:
    assert isinstance(renderer_for(tokenizer_folder, f"{own}:Loud"), TemplateRenderer)
    with pytest.raises(ConfigError, match="returns a Plain: recorded conversations are learned"):
        renderer_for(tokenizer_folder, f"{own}:Plain")


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("Plane", UnknownName, "did you mean 'Plain'"),
        ("NUMBER", ConfigError, "is not a function that makes a renderer"),
        ("nothing", ConfigError, "returns a ChatTokenizer, no renderer: it lacks stop_ids, thinking, render, rerender"),
        ("other", ConfigError, r"'folder' is not an input.*Wanted: \(tokenizer, "),
        ("broken", UserCodeFault, "broken failed: KeyError: 'no such template'"),
    ],
)
def test_mistakes_are_one_line(
    name: str, error: type[Exception], message: str, own: str, tokenizer_folder: Path
) -> None:
    with pytest.raises(error, match=message) as caught:
        open_renderer(tokenizer_folder, f"{own}:{name}")
    assert "\n" not in str(caught.value)
