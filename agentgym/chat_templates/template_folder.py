"""The folder of a model whose chat template is another one than its own: a file, or one of ours by its name."""

from __future__ import annotations

from pathlib import Path

from agentgym.chat_templates.named_templates import NAMED_TEMPLATES, fitting_templates, lacking_marks, read_template
from agentgym.chat_templates.tokenizer import ChatTokenizer
from agentgym.errors import ConfigError
from agentgym.model.model_name import model_folder
from agentgym.remote import keep_folder

__all__ = ["chat_folder", "template_for"]

TEMPLATE = "chat_template.jinja"
"""The file whose template is used, whatever else has one."""


def chat_folder(name: str, chat_template: str = "", *, may_fetch: bool = True) -> Path:
    """Returns the folder of a model as `model_folder` does, with another chat template if there is one.

    `chat_template` is a name of `NAMED_TEMPLATES` or a file. The folder then is one of the user's cache, with links to
    the model's files. Raises ConfigError for a template that cannot be read, whose marks the tokenizer lacks, or that
    is set for a checkpoint.
    """
    folder = model_folder(name, may_fetch=may_fetch)
    return _with_template(folder, chat_template) if chat_template else folder


def template_for(folder: Path, template: str) -> str:
    """Returns the source of a template for the tokenizer of a folder; raises ConfigError for one that does not fit."""
    source = read_template(template)
    if template in NAMED_TEMPLATES:
        tokenizer = ChatTokenizer.load(folder, needs_template=False).backend
        if lacking := lacking_marks(template, tokenizer):
            names = " and ".join(fitting_templates(tokenizer))
            raise ConfigError(
                f"the chat template {template} does not fit the model in {str(folder)!r}, whose tokenizer has no token"
                f" {', '.join(lacking)}; of the templates by name, {names or 'none'} would fit"
            )
    return source


def _with_template(folder: Path, template: str) -> Path:
    if folder.resolve().parent.name == "checkpoints":
        raise ConfigError(f"the checkpoint {folder.name} has the chat template of its run: leave chat_template out")
    files = [file.absolute() for file in sorted(folder.iterdir()) if file.is_file() and file.name != TEMPLATE]

    def fill(part: Path) -> None:
        (part / TEMPLATE).write_text(template_for(folder, template), encoding="utf-8")
        for file in files:
            (part / file.name).symlink_to(file)

    return keep_folder("models", [read_template(template), *map(str, files)], fill)
