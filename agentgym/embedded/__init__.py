"""The embedded model: a small Qwen3-architecture model and its tokenizer, made by `trainers.lessons.make_embedded`."""

from __future__ import annotations

from pathlib import Path

__all__ = ["embedded_folder"]


def embedded_folder() -> Path:
    """Returns the folder of the model and tokenizer that ship with the package."""
    return Path(__file__).parent
