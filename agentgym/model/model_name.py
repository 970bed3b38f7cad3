"""Finds the folder of a model by its name: one that ships, a folder, a GGUF file, an address, or an id of the hub."""

from __future__ import annotations

import re
from os.path import expanduser
from pathlib import Path

from agentgym.embedded import EMBEDDED_MODELS
from agentgym.errors import ConfigError, RunFolderError
from agentgym.extras import install_extra
from agentgym.model.gguf.gguf_file import file_sha256, find_gguf, is_gguf
from agentgym.remote import cached_folder, is_remote, keep_folder

__all__ = ["is_model_id", "model_folder", "names_model", "revised_name", "with_digest"]

ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(@[\w./-]+)?")
"""The form of an id: an owner, a name and, after an `@`, a branch, tag or commit."""
FILES = ("*.json", "*.safetensors", "*.jinja", "*.model", "*.txt")
"""The files of a model and its tokenizer; weights in other formats are left out."""
DIGEST = re.compile(r"(.+)@([0-9a-f]{64})")
"""The form of a GGUF file's name in the record of a run: with its SHA-256."""
BESIDE = (
    *("config.json", "generation_config.json", "chat_template.jinja"),
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
)
"""The files in the folder of a GGUF file that count in place of what it contains."""


def is_model_id(name: str) -> bool:
    """Returns True for the name of a model of the hub, such as `Qwen/Qwen3-0.6B@main`; an existing folder is none.

    >>> is_model_id("Qwen/Qwen3-0.6B"), is_model_id("./Qwen3"), is_model_id("embedded")
    (True, False, False)
    """
    return ID.fullmatch(name) is not None and not is_gguf(_without_digest(name)[0]) and not Path(name).exists()


def names_model(name: str) -> bool:
    """Returns True for a name that can only be that of a model: one that ships, an address, an id or a GGUF file.

    >>> names_model("s3://bucket/model"), names_model("model.gguf"), names_model("model")
    (True, True, False)
    """
    return name in EMBEDDED_MODELS or is_model_id(name) or is_remote(name) or is_gguf(_without_digest(name)[0])


def _without_digest(name: str) -> tuple[str, str]:
    """Returns a name and the SHA-256 after it, which is empty if there is none."""
    match = DIGEST.fullmatch(name)
    return (match[1], match[2]) if match and is_gguf(match[1]) else (name, "")


def model_folder(name: str, *, may_fetch: bool = True) -> Path:
    """Returns the folder; raises RunFolderError if it is missing, or is that of a run or an adapter.

    A model of the hub or at an address such as s3://bucket/model is fetched, unless it is in the cache; without
    `may_fetch` no request is sent, and RunFolderError is raised for one that is not on this machine. The weights of a
    GGUF file are dequantized into a folder of the user's cache, once for each content of the file.
    """
    folder = _find(name, may_fetch)
    if (folder / "adapter_config.json").is_file():  # transformers would put it on the model that this file names
        raise RunFolderError(
            f"{name!r} has an adapter that is not merged into a model: `agentgym export RUN DIR` writes the merged one,"
            " and so does `merge_and_unload` of peft"
        )
    return folder


def _find(name: str, may_fetch: bool) -> Path:
    if is_model_id(name):
        return _fetch(name, may_fetch)
    if is_remote(name) and not may_fetch:
        raise RunFolderError(f"the model is at {name!r}, to which no request is sent")
    if is_remote(name):
        folder = cached_folder(name, FILES)
    else:
        path, digest = _without_digest(name)
        folder = EMBEDDED_MODELS.get(name) or Path(expanduser(path))
        if (file := find_gguf(folder)) is not None:
            return _gguf_folder(file, digest)
    if name in EMBEDDED_MODELS and not (folder / "tokenizer.json").is_file():
        raise RunFolderError(f"this installation lacks the model {name} in {str(folder)!r}: name a model folder")
    if not folder.is_dir():
        raise RunFolderError(f"no model folder {name!r}: give a folder with config.json and tokenizer.json")
    checkpoints = sorted((folder / "checkpoints").glob("step-*"))
    if checkpoints and not (folder / "config.json").is_file():
        raise RunFolderError(f"{name!r} is a run folder: name one of its checkpoints, such as {str(checkpoints[-1])!r}")
    return folder


def _gguf_folder(file: Path, digest: str) -> Path:
    """Returns the cached folder of a GGUF file; writes it if there is none of its content and the files beside it."""
    content = file_sha256(file)
    if digest not in ("", content):
        raise RunFolderError(f"{str(file)!r} has changed: its SHA-256 was {digest}, and is {content}")
    beside = [other for name in BESIDE if (other := file.parent / name).is_file()]

    def fill(part: Path) -> None:
        try:
            from agentgym.model.gguf.gguf_folder import write_gguf_folder  # here, because few models are in GGUF
        except ImportError as error:
            raise RunFolderError(
                f"a model in GGUF needs {error.name}, which is not installed: {install_extra('gguf,train')}"
            ) from error
        write_gguf_folder(file, beside, part / file.stem)

    state = [content, *(f"{other.name} {file_sha256(other)}" for other in beside), file.stem]
    return keep_folder("models", state, fill) / file.stem


def revised_name(name: str, folder: Path) -> str:
    """Returns the name with the commit that the folder holds, for a model of the hub; else `with_digest`."""
    return f"{name.partition('@')[0]}@{folder.name}" if is_model_id(name) else with_digest(name)


def with_digest(name: str) -> str:
    """Returns the path of a GGUF file with its SHA-256, for a model in one; any other name as it is."""
    if name in EMBEDDED_MODELS or is_model_id(name) or is_remote(name):
        return name
    file = find_gguf(Path(expanduser(_without_digest(name)[0])))
    return name if file is None else f"{file}@{file_sha256(file)}"


def _fetch(name: str, may_fetch: bool) -> Path:
    """Returns the cached folder of a model `owner/name` or `owner/name@revision`; downloads what is missing.

    The folder's name is the commit. Raises RunFolderError with the reason and a remedy if the model cannot be had.
    """
    model, _, revision = name.partition("@")
    try:
        from huggingface_hub import errors, snapshot_download  # here, because most models are folders
    except ImportError as error:
        raise ConfigError(
            f"{name!r} is not a folder, and fetching a model needs {error.name}: pip install it"
        ) from error
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
