"""The output folder of learning from rows or pairs: a model folder, with the settings and metrics of the run."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import yaml
from safetensors import SafetensorError

from agentgym.errors import RunFolderError
from agentgym.model.language_model import LanguageModel
from agentgym.model.model_folder import save_model_folder
from agentgym.trainers.checkpoints.checkpoint import copy_tokenizer
from agentgym.types import JSON

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

__all__ = ["SftFolder"]


class SftFolder:
    """A folder with `config.yaml` and `metrics.jsonl` from the start, and the model and tokenizer once saved."""

    def __init__(self, path: Path, settings: Mapping[str, JSON]) -> None:
        """Makes a new folder; raises RunFolderError if `path` exists and is not an empty folder."""
        self.path = path
        with self._convert_errors():
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise RunFolderError(f"{str(path)!r} is taken already: give another --output, or remove it")
            path.mkdir(parents=True, exist_ok=True)
            (path / "config.yaml").write_text(yaml.safe_dump(dict(settings), sort_keys=False))

    def write_metrics(self, step: DataclassInstance) -> None:
        """Appends one step's line: the fields of its report."""
        rounded = {name: round(value, 6) if isinstance(value, float) else value for name, value in asdict(step).items()}
        with self._convert_errors(), open(self.path / "metrics.jsonl", "a") as file:
            file.write(json.dumps(rounded) + "\n")

    def save_model(self, model: LanguageModel, source: Path) -> None:
        """Writes the model, with the tokenizer's files of the folder `source`."""
        with self._convert_errors():
            copy_tokenizer(source, self.path)
            save_model_folder(model, self.path)

    @contextmanager
    def _convert_errors(self) -> Iterator[None]:
        """Converts errors of the file system to RunFolderErrors that name the folder."""
        try:
            yield
        except RunFolderError:
            raise
        except (OSError, SafetensorError) as error:
            raise RunFolderError(f"cannot write to {str(self.path)!r}: {error}") from error
