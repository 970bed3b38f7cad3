"""The class of transformers' kind that computes a model: transformers' own, or a user's, `path/to/file.py:Class`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agentgym.errors import ConfigError, UserCodeFault
from agentgym.loading import Wanted, load_named

__all__ = [
    "FOLDER_ALONE",
    "auto_class",
    "class_of_model",
    "first_line",
    "load_fault",
    "own_class",
    "quiet_transformers",
]

FOLDER_ALONE = {"local_files_only": True, "trust_remote_code": False}
"""Options of transformers that fetch nothing, and neither run code that a folder brings nor ask whether to."""
OWN_CLASS = Wanted(
    noun="model class",
    example="Class",
    hint="It derives from transformers.PreTrainedModel, such as transformers.Qwen3ForCausalLM.",
)


def own_class(code_path: str) -> Any:
    """Returns a user's class of transformers' kind; raises ConfigError for another object."""
    model_class = load_named(code_path, OWN_CLASS)
    lacking = [name for name in ("from_pretrained", "config_class") if getattr(model_class, name, None) is None]
    if not isinstance(model_class, type) or lacking:
        what = f"has no {lacking[0]}" if isinstance(model_class, type) else "is not a class"
        raise ConfigError(f"model_backend {code_path!r} {what}. {OWN_CLASS.hint}")
    return model_class


def class_of_model(folder: Path, code_path: str | None) -> tuple[Any, Any]:
    """Returns the configuration in a folder, and the class that computes it: a user's, or that of transformers.

    Raises ConfigError if the folder names a class that transformers lacks, and which may compute something else.
    """
    if code_path is not None:
        own = own_class(code_path)
        return own.config_class.from_pretrained(folder, local_files_only=True), own
    import transformers

    config = transformers.AutoConfig.from_pretrained(folder, **FOLDER_ALONE)
    # In lower case, as old folders have LLaMAForCausalLM; `dir(transformers)` has the same classes and takes 0.3 s.
    class_names = {name.lower() for name in transformers.__all__}
    if unknown := [name for name in config.architectures or () if name.lower() not in class_names]:
        raise ConfigError(
            f"{str(folder)!r} is a model of the class {unknown[0]}, which transformers lacks: name yours by"
            f" model_backend (--model-backend path/to/file.py:{unknown[0]})"
        )
    return config, auto_class(config)


def auto_class(config: Any) -> Any:
    """Returns the class of transformers that loads a model with this configuration, vision tower included."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    sees = config.get_text_config() is not config and type(config) in AutoModelForImageTextToText._model_mapping
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def load_fault(code_path: str | None, what: str, error: Exception) -> ConfigError | UserCodeFault:
    """Returns the error to raise for one of transformers' code, or of a user's class, whose traceback is shown."""
    if code_path is None:
        return ConfigError(f"transformers {what}: {first_line(error)}")
    return UserCodeFault(f"{code_path} {what}: {type(error).__name__}: {first_line(error)}")


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, with the next one if it ends in a colon."""
    first, *others = (line.strip() for line in str(error).strip().splitlines() or [""])
    return " ".join([first, *others[: first.endswith(":")]])[:300]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Silences the progress bars and the advice of transformers."""
    from transformers.utils import logging

    verbosity, has_bar = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if has_bar:
            logging.enable_progress_bar()
