"""Saves a tree of tensors and numbers in a folder, in the sharded format of `torch.distributed.checkpoint`.

The tensors are in that format, whatever number of processes wrote or reads them; all other values are in
`structure.json`. `dcp.save` itself warns, on any thread, that there is no process group, so a single process uses the
documented level below it: a planner and a storage.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from agentgym.trainers.checkpoints.dcp_metadata import MetadataReader

__all__ = ["copy_to_cpu", "load_state", "save_state"]

STRUCTURE = "structure.json"


def copy_to_cpu(state: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the same tree with a copy of every tensor, on the CPU."""
    return {key: _copy_value(value) for key, value in state.items()}


def save_state(state: Mapping[str, Any], folder: Path) -> None:
    """Writes a tree of mappings and lists whose leaves are tensors, numbers, strings, booleans or None."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    structure = _without_tensors(state, "", tensors)
    (folder / STRUCTURE).write_text(json.dumps(structure) + "\n")
    planner, writer = DefaultSavePlanner(), FileSystemWriter(folder, sync_files=False)
    planner.set_up_planner(tensors, writer.storage_meta(), True)
    writer.set_up_storage_writer(True)
    plans, metadata = planner.create_global_plan([writer.prepare_local_plan(planner.create_local_plan())])
    (plan,) = writer.prepare_global_plan(plans)
    written = writer.write_data(planner.finish_plan(plan), planner)
    written.wait()
    writer.finish(metadata, [written.value()])


def load_state(folder: Path) -> dict[str, Any]:
    """Returns the saved tree, bit for bit; tuples become lists. Nothing in the files is executed."""
    reader = MetadataReader(folder)
    metadata = reader.read_metadata()
    tensors: dict[str, Tensor] = {
        name: torch.empty(stored.size, dtype=stored.properties.dtype)
        for name, stored in metadata.state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }
    planner = DefaultLoadPlanner()
    planner.set_up_planner(tensors, metadata, True)
    reader.set_up_storage_reader(metadata, True)
    plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
    (plan,) = reader.prepare_global_plan(plans)
    reader.read_data(planner.finish_plan(plan), planner).wait()
    state: dict[str, Any] = _with_tensors(json.loads((folder / STRUCTURE).read_text()), tensors)
    return state


def _copy_value(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return copy_to_cpu(value)
    return [_copy_value(item) for item in value] if isinstance(value, list | tuple) else value


def _without_tensors(state: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Returns the tree with each tensor replaced by `{"tensor": its name}` and moved to `tensors`.

    Mappings become pairs: JSON would convert keys that are numbers, which optimizers have, to strings.
    """
    if isinstance(state, Tensor):
        tensors[name] = state
        return {"tensor": name}
    if isinstance(state, Mapping):
        named = {key: quote(key, safe="") if isinstance(key, str) else f"[{key}]" for key in state}
        items = [[key, _without_tensors(value, f"{name}/{named[key]}", tensors)] for key, value in state.items()]
        return {"items": items}
    if isinstance(state, list | tuple):
        return [_without_tensors(value, f"{name}/{index}", tensors) for index, value in enumerate(state)]
    return state


def _with_tensors(structure: Any, tensors: Mapping[str, Tensor]) -> Any:
    """Rebuilds the tree from the result of `_without_tensors`."""
    if isinstance(structure, Mapping):
        if "tensor" in structure:
            return tensors[structure["tensor"]]
        return {key: _with_tensors(value, tensors) for key, value in structure["items"]}
    if isinstance(structure, list):
        return [_with_tensors(value, tensors) for value in structure]
    return structure
