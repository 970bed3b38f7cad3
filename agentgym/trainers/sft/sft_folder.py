"""The folder that supervised fine-tuning leaves behind: a model folder, with how it came about beside it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import yaml
from safetensors import SafetensorError

from agentgym.errors import RunFolderError
from agentgym.model.decoder import Decoder
from agentgym.model.model_folder import save_decoder
from agentgym.trainers.checkpoints.checkpoint import copy_tokenizer
from agentgym.trainers.sft.loop import ImitationStep
from agentgym.types import JSON

__all__ = ["SftFolder"]


class SftFolder:
    """`config.yaml` and `metrics.jsonl` from the start, the model and its tokenizer's files once they are saved."""

    def __init__(self, path: Path, settings: Mapping[str, JSON]) -> None:
        """A new folder; raises RunFolderError where there is something already."""
        self.path = path
        with self._written():
            if path.exists() and (not path.is_dir() or any(path.iterdir())):
                raise RunFolderError(f"{str(path)!r} is taken already: give another --output, or remove it")
            path.mkdir(parents=True, exist_ok=True)
            (path / "config.yaml").write_text(yaml.safe_dump(dict(settings), sort_keys=False))

    def write_metrics(self, step: ImitationStep) -> None:
        """Appends one step's line."""
        rounded = {name: round(value, 6) if isinstance(value, float) else value for name, value in asdict(step).items()}
        with self._written(), open(self.path / "metrics.jsonl", "a") as file:
            file.write(json.dumps(rounded) + "\n")

    def save_model(self, model: Decoder, source: Path) -> None:
        """Writes the model, with the tokenizer's files of the folder `source`."""
        with self._written():
            copy_tokenizer(source, self.path)
            save_decoder(model, self.path)

    @contextmanager
    def _written(self) -> Iterator[None]:
        """Names the folder in what the file system refuses."""
        try:
            yield
        except RunFolderError:
            raise
        except (OSError, SafetensorError) as error:
            raise RunFolderError(f"cannot write to {str(self.path)!r}: {error}") from error
