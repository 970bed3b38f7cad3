"""The models that ship with the package, each a folder with weights in Qwen3's architecture and a tokenizer.

`embedded` has a million parameters, in float32, and was taught two environments (`trainers.lessons.make_embedded`).
`embedded-large` has six million, in bfloat16, and was taught to copy into calls of tools that it never saw
(`trainers.lessons.make_embedded_large`).
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["EMBEDDED", "EMBEDDED_LARGE", "EMBEDDED_MODELS", "embedded_folder", "model_for"]

EMBEDDED = "embedded"
EMBEDDED_LARGE = "embedded-large"
EMBEDDED_MODELS = {EMBEDDED: Path(__file__).parent, EMBEDDED_LARGE: Path(__file__).parent / "large"}
"""The folder of each model by its name."""
_ENVIRONMENTS = ("TextGame-v0", "LongRoad-v0")
"""What the small model was taught."""


def embedded_folder(name: str = EMBEDDED) -> Path:
    """Returns the folder of a model and its tokenizer that ship with the package."""
    return EMBEDDED_MODELS[name]


def model_for(env: str) -> str:
    """Returns the name of the model that plays an environment where none is named: the small one if it was taught it.

    >>> model_for("TextGame-v0"), model_for("orders.py:Orders")
    ('embedded', 'embedded-large')
    """
    return EMBEDDED if env in _ENVIRONMENTS else EMBEDDED_LARGE
