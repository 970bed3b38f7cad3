"""Saves a tree of tensors and numbers in a folder, in the sharded format of `torch.distributed.checkpoint`.

The tensors are in that format, whatever number of processes wrote or reads them; all other values are in
`structure.json`. `dcp.save` itself needs a process group in the thread that writes, so this is the documented level
below it: a planner and a storage for each process, whose plans are made one where the processes meet anyway.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from agentgym.trainers.checkpoints.dcp_metadata import MetadataReader
from agentgym.trainers.checkpoints.state_copy import CopyMemory
from agentgym.trainers.parallel.sharded_tensor import is_sharded

__all__ = [
    "StateShard",
    "StoredTensor",
    "finish_state",
    "load_state",
    "open_state",
    "plans_of_ranks",
    "save_state",
]

STRUCTURE = "structure.json"


class StateShard:
    """The part of a tree that one of several processes saves.

    Leaves are tensors, numbers, strings, booleans or None. `merge` is called with this process's plan and returns those
    of all, in the order of their ranks. With a `memory`, tensors are copied into it, and later changes of them do
    not affect what is saved.
    """

    def __init__(
        self,
        state: Mapping[str, Any],
        rank: int = 0,
        merge: Callable[[SavePlan], Sequence[SavePlan]] = lambda plan: [plan],
        memory: CopyMemory | None = None,
    ) -> None:
        tensors: dict[str, Tensor] = {}
        self.structure = _without_tensors(state, "", tensors)
        self._planner = _PartPlanner()
        self._planner.set_up_planner(tensors, is_coordinator=rank == 0)
        plans = list(merge(self._planner.create_local_plan()))
        plans, self.metadata = self._planner.create_global_plan(plans)
        self._plan = self._planner.finish_plan(FileSystemWriter("").prepare_global_plan(plans)[rank])
        self._planner.take_parts({item.index.fqn for item in self._plan.items}, memory)

    def write(self, folder: Path) -> list[WriteResult]:
        """Writes this process's files; `finish_state` has to be called with what all processes return."""
        folder.mkdir(parents=True, exist_ok=True)
        writer = FileSystemWriter(folder, sync_files=False)
        writer.set_up_storage_writer(True)
        written = writer.write_data(self._plan, self._planner)
        written.wait()
        return list(written.value())


def finish_state(folder: Path, structure: Any, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
    """Writes what a reader begins with, after all processes have written."""
    (folder / STRUCTURE).write_text(json.dumps(structure) + "\n")
    writer = FileSystemWriter(folder, sync_files=False)
    writer.set_up_storage_writer(True)
    writer.finish(metadata, [list(result) for result in results])


def save_state(state: Mapping[str, Any], folder: Path) -> None:
    """Writes a tree of mappings and lists whose leaves are tensors, numbers, strings, booleans or None."""
    shard = StateShard(state)
    finish_state(folder, shard.structure, shard.metadata, [shard.write(folder)])


def plans_of_ranks(plan: SavePlan) -> list[SavePlan]:
    """Returns the plans of all ranks of the default process group, all of which have to call it."""
    plans: list[SavePlan] = [plan] * dist.get_world_size()
    dist.all_gather_object(plans, plan)
    return plans


class StoredTensor:
    """A saved tensor that is read when it is wanted, whole or as the part of a process."""

    def __init__(self, name: str, metadata: Metadata, reader: MetadataReader) -> None:
        stored = metadata.state_dict_metadata[name]
        assert isinstance(stored, TensorStorageMetadata)
        self.shape, self.dtype = stored.size, stored.properties.dtype
        self._name, self._metadata, self._reader = name, metadata, reader

    def read(self) -> Tensor:
        """Returns the whole tensor, on the CPU."""
        return self.read_into(torch.empty(self.shape, dtype=self.dtype))

    def read_into(self, target: Tensor) -> Tensor:
        """Fills a tensor of the same shape, or the part of it that this process has, and returns it."""
        planner, reader = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False), self._reader
        planner.set_up_planner({self._name: target}, self._metadata, True)
        reader.set_up_storage_reader(self._metadata, True)
        plans = planner.create_global_plan([reader.prepare_local_plan(planner.create_local_plan())])
        (plan,) = reader.prepare_global_plan(plans)
        reader.read_data(planner.finish_plan(plan), planner).wait()
        return target


def open_state(folder: Path) -> dict[str, Any]:
    """Returns the saved tree with a `StoredTensor` for each tensor; tuples become lists. Nothing in it is executed."""
    reader = MetadataReader(folder)
    metadata = reader.read_metadata()
    tensors = {name: StoredTensor(name, metadata, reader) for name in metadata.state_dict_metadata}
    state: dict[str, Any] = _with_tensors(json.loads((folder / STRUCTURE).read_text()), tensors)
    return state


def load_state(folder: Path) -> dict[str, Any]:
    """Returns the saved tree, bit for bit, as `open_state` does, with every tensor read."""
    state: dict[str, Any] = _read_all(open_state(folder))
    return state


class _PartPlanner(DefaultSavePlanner):
    """Plans with the tensors of a process, and writes its local parts of them."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._parts: dict[str, Tensor] = {}

    def take_parts(self, names: set[str], memory: CopyMemory | None) -> None:
        """Keeps these tensors or their local parts, or copies of them, and forgets the others."""
        tensors = {name: self.state_dict[name] for name in names}
        parts = [tensor.to_local() if is_sharded(tensor) else tensor for tensor in tensors.values()]
        self._parts = dict(zip(tensors, memory.copy(parts) if memory else parts, strict=True))
        self.state_dict = {}

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        return self._parts[index.fqn]


def _read_all(state: Any) -> Any:
    if isinstance(state, StoredTensor):
        return state.read()
    if isinstance(state, Mapping):
        return {key: _read_all(value) for key, value in state.items()}
    return [_read_all(value) for value in state] if isinstance(state, list) else state


def _without_tensors(state: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """Returns the tree with each tensor replaced by `{"tensor": its name}` and moved to `tensors`.

    Mappings become pairs: JSON would convert keys that are numbers, which optimizers have, to strings.
    """
    if isinstance(state, Tensor):
        tensors[name] = state
        return {"tensor": name}
    if isinstance(state, Mapping):
        labels = {key: quote(key, safe="") if isinstance(key, str) else f"[{key}]" for key in state}
        items = [[key, _without_tensors(value, f"{name}/{labels[key]}", tensors)] for key, value in state.items()]
        return {"items": items}
    if isinstance(state, list | tuple):
        return [_without_tensors(value, f"{name}/{index}", tensors) for index, value in enumerate(state)]
    return state


def _with_tensors(structure: Any, tensors: Mapping[str, StoredTensor]) -> Any:
    """Rebuilds the tree from the result of `_without_tensors`."""
    if isinstance(structure, Mapping):
        if "tensor" in structure:
            return tensors[structure["tensor"]]
        return {key: _with_tensors(value, tensors) for key, value in structure["items"]}
    if isinstance(structure, list):
        return [_with_tensors(value, tensors) for value in structure]
    return structure
