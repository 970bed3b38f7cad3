"""Writes an adapter as a folder that `peft` loads."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

__all__ = ["write_adapter"]


def write_adapter(state: Mapping[str, Any], folder: Path, base: str | None, dtype: torch.dtype) -> None:
    """Writes a state of `Adapters.state_dict` as `adapter_config.json` and `adapter_model.safetensors`.

    `base` is the folder or name of the model that the adapter belongs to, if it is known.
    """
    settings = state["settings"]
    alpha = float(settings["alpha"])
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": settings["rank"],
        "lora_alpha": int(alpha) if alpha.is_integer() else alpha,
        "lora_dropout": 0.0,
        "target_modules": sorted(settings["target_modules"]),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "modules_to_save": None,
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in state["tensors"].items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
