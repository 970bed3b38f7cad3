"""Finds the folder of a model that a user names: `embedded`, a path, an address, or an id of the Hugging Face hub."""

from __future__ import annotations

import re
from os.path import expanduser
from pathlib import Path

from agentgym.embedded import embedded_folder
from agentgym.errors import ConfigError, RunFolderError
from agentgym.remote import cached_folder, is_remote, keep_folder

__all__ = ["EMBEDDED", "is_model_id", "model_folder", "revised_name"]

EMBEDDED = "embedded"
"""The name of the model that comes with the package."""
ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
"""The form of an id: an owner, a name and, after an `@`, a branch, tag or commit."""
FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""The files of a model and its tokenizer; weights in other formats are left out."""
TEMPLATE = "chat_template.jinja"
"""The file whose template is used, whatever else has one."""


def is_model_id(name: str) -> bool:
    """Returns True for the name of a model of the hub, such as `Qwen/Qwen3-0.6B@main`; an existing folder is none.

    >>> is_model_id("Qwen/Qwen3-0.6B"), is_model_id("./Qwen3"), is_model_id("embedded")
    (True, False, False)
    """
    return ID.fullmatch(name) is not None and not Path(name).exists()


def model_folder(name: str, chat_template: str = "", *, may_fetch: bool = True) -> Path:
    """Returns the folder; raises RunFolderError if it is missing, or is that of a run or an adapter.

    A model of the hub or at an address such as s3://bucket/model is fetched, unless it is in the cache; without
    `may_fetch` no request is sent, and RunFolderError is raised for one that is not on this machine. With a
    `chat_template`, a file, it is a folder of the user's cache with links to the model's files, and this template.
    Raises ConfigError for one that cannot be read, or that is given for a checkpoint.
    """
    folder = _find(name, may_fetch)
    if (folder / "adapter_config.json").is_file():  # transformers would put it on the model that this file names
        raise RunFolderError(
            f"{name!r} has an adapter that is not merged into a model: `agentgym export RUN DIR` writes the merged one,"
            " and so does `merge_and_unload` of peft"
        )
    return _with_template(folder, chat_template) if chat_template else folder


def _with_template(folder: Path, template: str) -> Path:
    if folder.resolve().parent.name == "checkpoints":
        raise ConfigError(f"the checkpoint {folder.name} has the chat template of its run: leave chat_template out")
    try:
        text = Path(expanduser(template)).read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template {template!r} cannot be read: {error}") from error
    files = [file.absolute() for file in sorted(folder.iterdir()) if file.is_file() and file.name != TEMPLATE]

    def fill(part: Path) -> None:
        (part / TEMPLATE).write_text(text, encoding="utf-8")
        for file in files:
            (part / file.name).symlink_to(file)

    return keep_folder("models", [text, *map(str, files)], fill)


def _find(name: str, may_fetch: bool) -> Path:
    if is_model_id(name):
        return _fetch(name, may_fetch)
    if is_remote(name) and not may_fetch:
        raise RunFolderError(f"the model is at {name!r}, to which no request is sent")
    if is_remote(name):
        folder = cached_folder(name, FILES)
    else:
        folder = embedded_folder() if name == EMBEDDED else Path(expanduser(name))
    if name == EMBEDDED and not (folder / "tokenizer.json").is_file():
        raise RunFolderError(f"this installation lacks the embedded model in {str(folder)!r}: name a model folder")
    if folder.suffix == ".gguf" or (next(folder.glob("*.gguf"), None) and not (folder / "config.json").is_file()):
        raise RunFolderError(
            f"{name!r} is a model in GGUF, which llama.cpp loads: give its folder with config.json and safetensors, or"
            " serve it (llama-server -m FILE) and name the address (--policy http://HOST:PORT/v1)"
        )
    if not folder.is_dir():
        raise RunFolderError(f"no model folder {name!r}: give a folder with config.json and tokenizer.json")
    checkpoints = sorted((folder / "checkpoints").glob("step-*"))
    if checkpoints and not (folder / "config.json").is_file():
        raise RunFolderError(f"{name!r} is a run folder: name one of its checkpoints, such as {str(checkpoints[-1])!r}")
    return folder


def revised_name(name: str, folder: Path) -> str:
    """Returns the name with the commit that the folder holds, for a model of the hub; any other name as it is."""
    return f"{name.partition('@')[0]}@{folder.name}" if is_model_id(name) else name


def _fetch(name: str, may_fetch: bool) -> Path:
    """Returns the cached folder of a model `owner/name` or `owner/name@revision`; downloads what is missing.

    The folder's name is the commit. Raises RunFolderError with the reason and a remedy if the model cannot be had.
    """
    model, _, revision = name.partition("@")
    try:
        from huggingface_hub import errors, snapshot_download  # here, because most models are folders
    except ImportError as error:
        raise ConfigError(f"{name!r} is no folder, and fetching a model needs {error.name}: pip install it") from error
    try:
        return Path(
            snapshot_download(
                model, revision=revision or None, allow_patterns=list(FILES), local_files_only=not may_fetch
            )
        )
    except errors.GatedRepoError as error:
        remedy = f"accept the terms on the page of {model}, then log in: hf auth login"
        raise RunFolderError(f"{name!r} is a gated model: {remedy}") from error
    except errors.RepositoryNotFoundError as error:
        raise RunFolderError(
            f"there is no folder {name!r} and no public model of that name: check the name, or log in for a private"
            " model: hf auth login"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise RunFolderError(f"{model!r} has no revision {revision!r}: name a branch, a tag or a commit") from error
    except (OSError, errors.HfHubHTTPError, errors.HFValidationError) as error:
        command = f"hf download {model}" + (f" --revision {revision}" if revision else "")
        raise RunFolderError(
            f"there is no folder {name!r}, and a model of that name is neither in the cache nor reachable"
            f" ({_reason(error)}). Where there is a network, `{command}` fetches it"
        ) from error


def _reason(error: BaseException) -> str:
    line = str(error).strip().partition("\n")[0]
    return line.removeprefix("Got: ")[:160] or type(error).__name__
