"""The architectures that were checked, with what each check found: read by `agentgym models list`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

__all__ = ["FAMILIES", "KnownModel", "known_models", "write_known"]

_FILE = Path(__file__).with_name("known.json")

FAMILIES: Mapping[str, str] = {
    "llama": "llama3_json",
    "mistral": "mistral",
    "ministral": "mistral",
    "ministral3": "mistral",
    "mixtral": "mistral",
    "qwen2": "hermes",
    "qwen2_moe": "hermes",
    "qwen3": "hermes",
    "qwen3_moe": "hermes",
    "qwen3_next": "hermes",
    "qwen3_5_text": "qwen3_coder",
    "qwen3_5_moe_text": "qwen3_coder",
    "gemma2": "gemma2_generic",
    "gemma3_text": "function_gemma",
    "gemma4_text": "gemma4",
    "phi3": "phi4_mini",
    "olmo3": "olmo3_pythonic",
    "granite": "granite",
    "granitemoe": "granite",
    "granitemoehybrid": "granite4",
    "cohere2": "command_r7b",
    "glm4_moe": "glm45",
    "glm4_moe_lite": "glm45",
    "gpt_oss": "gpt_oss",
    "seed_oss": "seed_oss",
    "apertus": "apertus",
    "ernie4_5": "ernie45",
    "ernie4_5_moe": "ernie45",
    "hunyuan_v1_dense": "hunyuan_a13_b",
    "hunyuan_v1_moe": "hunyuan_a13_b",
    "deepseek_v2": "deepseek_v3",
    "deepseek_v3": "deepseek_v3",
    "longcat_flash": "longcat_flash",
    "dots1": "dots",
    "minimax": "minimax_m1",
    "minimax_m2": "minimax_m2",
    "lfm2": "lfm2",
    "nemotron_h": "qwen3_coder",
    "llama4_text": "pythonic",
    "llama4": "pythonic",
    "gemma3": "function_gemma",
    "gemma4": "gemma4",
    "glm4v": "glm45",
    "internvl": "hermes",
    "mistral3": "mistral",
    "qwen2_5_vl": "hermes",
    "qwen3_vl": "hermes",
    "qwen3_5": "qwen3_coder",
}
"""The format of tool calls that chat models of an architecture usually have, of those of `agentgym tools families`."""


@dataclass(frozen=True)
class KnownModel:
    """The findings of the checks of one small random model."""

    architecture: str
    """The `model_type` of its config.json, with a variant after a colon."""
    results: Mapping[str, tuple[bool, str]]
    """The verdict of each check, and what it found, by its name."""

    @property
    def family(self) -> str:
        """The usual format of tool calls, or a dash."""
        return FAMILIES.get(self.architecture.partition(":")[0], "-")


def known_models() -> tuple[str, list[KnownModel]]:
    """Returns the version of transformers that was used, and every architecture."""
    stored = json.loads(_FILE.read_text())
    models = [
        KnownModel(name, {check: (bool(result[0]), str(result[1])) for check, result in results.items()})
        for name, results in stored["models"].items()
    ]
    return cast(str, stored["transformers"]), models


def write_known(transformers: str, models: list[KnownModel]) -> None:
    """Stores what `known_models` returns."""
    entries = {model.architecture: {name: list(result) for name, result in model.results.items()} for model in models}
    _FILE.write_text(json.dumps({"transformers": transformers, "models": entries}, indent=1) + "\n")
