"""`agentgym verify --model FOLDER`: checks before training that a tokenizer and its chat template can be trained on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Annotated

import tyro

from agentgym.chat_templates.formats.registry import FORMATS
from agentgym.chat_templates.jinja_template import ChatTemplate
from agentgym.chat_templates.recorded_format import recorded_format
from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.cli.display.tables import show_table
from agentgym.cli.options import parse_options
from agentgym.cli.terminal import say, show_json
from agentgym.errors import ConfigError, RenderError
from agentgym.evaluation.model_check.checks import Reference
from agentgym.evaluation.model_check.verify import verify_model
from agentgym.loading import is_place
from agentgym.model.architectures import refusal
from agentgym.model.model_name import model_folder

__all__ = ["main"]


@dataclass(frozen=True, kw_only=True)
class VerifyModelOptions:
    """Checks that a tokenizer and its chat template fit training, with a hundred adversarial conversations.

    The verdict of a property is `ok`, `FAILED` (training would be wrong; exit code 1), or `noted` (the template does
    not keep it, and what is trained is exact all the same). Exit code 2: there is nothing to verify. A model that
    the fast decoder does not compute is noted with the reason, and the exit code is that of the template.
    """

    model: Annotated[str, tyro.conf.arg(metavar="FOLDER")]
    """The model folder with tokenizer.json, or `embedded`; weights are not needed."""
    chat_template: Annotated[Path | None, tyro.conf.arg(metavar="FILE")] = None
    """A Jinja file that is used instead of the folder's chat template."""
    family: Annotated[str | None, tyro.conf.arg(metavar="F")] = None
    """The format of the replies, of those that `agentgym tools families` shows, or path/to/file.py:name, a function
    `(tokenizer)` that returns a `TemplateRenderer`; by default the template's own."""
    json: bool = False
    """Print one line of JSON, and all else on standard error."""


def main(args: Sequence[str]) -> int:
    """Runs `agentgym verify --model ...`."""
    options = parse_options(VerifyModelOptions, args, prog="agentgym verify --model")
    if options.family is not None and not is_place(options.family):
        FORMATS[options.family]  # an unknown name is reported before anything is loaded
    template = _template(options.chat_template)
    folder = model_folder(options.model)
    tokenizer = _tokenizer(folder, template)
    family = options.family or recorded_format(folder).family_for(folder)
    report = verify_model(tokenizer, family, _reference(folder, template))
    show_table(["property", "verdict", "checked", "what was found"], report.rows())
    say(report.summary())
    reason = _refusal(folder)
    if reason is not None:
        say(f"transformers would compute this model, not the fast decoder: {reason}")
    if options.json:
        show_json({**report.to_json(), "refusal": reason})
    return 0 if report.ok else 1


def _refusal(folder: Path) -> str | None:
    """Returns why the fast decoder does not compute the folder's model; None if it does, or without a model."""
    path = folder / "config.json"
    if not path.is_file():
        return None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        return f"its config.json cannot be read ({error})"
    return refusal(config) if isinstance(config, dict) else "its config.json is no object"


def _template(file: Path | None) -> str | None:
    if file is None:
        return None
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template {str(file)!r} cannot be read: {error}") from error


def _tokenizer(folder: Path, template: str | None) -> ChatTokenizer:
    """Loads the folder's tokenizer; raises ConfigError if it has no template that compiles."""
    try:
        tokenizer = ChatTokenizer.load(folder, template)
        for source in (tokenizer.template, tokenizer.tool_template):
            ChatTemplate(source, {})
    except RenderError as error:
        hint = "" if "--chat-template" in str(error) else "; --chat-template FILE names another one"
        raise ConfigError(f"{error}{hint}") from error
    return tokenizer


def _reference(folder: Path, template: str | None) -> Reference | str:
    """Loads the folder with transformers; returns the reason as text if that fails."""
    try:
        module = import_module("agentgym.evaluation.model_check.reference")
        reference: Reference = module.TransformersReference.load(folder, template)
    except ImportError as error:
        return f"transformers is not installed ({error})"
    except Exception as error:  # noqa: BLE001  # the boundary: transformers guesses at a folder in many ways
        return f"transformers does not load it: {type(error).__name__}: {str(error).partition(chr(10))[0][:200]}"
    return reference
