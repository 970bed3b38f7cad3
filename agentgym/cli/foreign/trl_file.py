"""Reads TRL's settings: arguments in YAML or JSON, or the constants of a training script, which is not run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from agentgym.cli.foreign.keys import Code
from agentgym.cli.foreign.verl_file import compute_constant, read_overrides, read_scalar, read_source, read_yaml
from agentgym.errors import ConfigError
from agentgym.yaml_text import check_size

__all__ = ["TrlTrainer", "read_trl"]

POSITIONS = {
    "GRPOTrainer": ("model", "reward_funcs", "args", "train_dataset", "eval_dataset", "processing_class"),
    "SFTTrainer": ("model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class"),
    "DPOTrainer": ("model", "ref_model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class"),
    "GRPOConfig": ("output_dir",),
    "SFTConfig": ("output_dir",),
    "DPOConfig": ("output_dir",),
    "LoraConfig": ("r",),
}
"""The calls that are read, with the names of their positional arguments."""
OTHER_TRAINERS = {"GKDTrainer": "--algo distill"}
MAX_VALUES = 5_000
TrlTrainer = Literal["grpo", "sft", "dpo"]


def read_trl(
    path: Path, overrides: Sequence[str], trainer: TrlTrainer | None = None
) -> tuple[TrlTrainer, dict[str, Any]]:
    """Returns the trainer of a file, and its settings with overrides by their names; those of peft are `peft_config.r`.

    Without `trainer`, it is that of the script, or grpo for a file of arguments. Raises ConfigError for a file that has
    no settings of it.
    """
    if path.suffix == ".py":
        try:
            trainer, settings = _of_script(path, trainer)
            check_size(settings, MAX_VALUES)
        except (ValueError, RecursionError) as error:
            if isinstance(error, ConfigError):
                raise
            reason = str(error) if isinstance(error, ValueError) else "it is nested too deeply"
            raise ConfigError(f"{str(path)!r} cannot be read: {reason}") from error
    else:
        settings = {name: read_scalar(item) for name, item in read_yaml(path).items()}
    return trainer or "grpo", {**settings, **read_overrides(overrides)}


def _of_script(path: Path, trainer: TrlTrainer | None) -> tuple[TrlTrainer, dict[str, Any]]:
    try:
        tree = ast.parse(read_source(path))
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        if isinstance(error, ConfigError):
            raise
        reason = str(error) or "it is nested too deeply"
        raise ConfigError(f"{str(path)!r} cannot be read as Python: {reason}") from error
    script = _Script(path, tree)
    calls = list(script.calls())
    names = get_args(TrlTrainer)
    kinds = {kind: name for kind, _ in calls for name in names if kind.lower().startswith(name)}
    if trainer is None and len({*kinds.values()}) > 1:
        raise ConfigError(f"{str(path)!r} has {' and '.join(sorted(kinds))}: name one with --trainer")
    chosen: TrlTrainer = trainer if trainer is not None else next(iter(kinds.values()), "grpo")
    settings: dict[str, Any] = {}
    for kind, call in calls:
        if kinds.get(kind, chosen) != chosen:
            continue
        prefix = "peft_config." if kind == "LoraConfig" else ""
        for name, node in _arguments(kind, call):
            value = script.value(node)
            if name in ("args", "peft_config") and isinstance(value, Code):
                continue  # the call that made it is read itself
            settings[prefix + name] = value
    if chosen not in kinds.values():
        others = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)} & OTHER_TRAINERS.keys()
        hint = "".join(f"; for {name} there is {OTHER_TRAINERS[name]}, by docs/trl.md" for name in sorted(others))
        prefix_name = chosen.upper()
        raise ConfigError(f"{str(path)!r} has no {prefix_name}Config(...) and no {prefix_name}Trainer(...){hint}")
    return chosen, settings


def _arguments(kind: str, call: ast.Call) -> Iterator[tuple[str, ast.expr]]:
    yield from zip(POSITIONS[kind], call.args, strict=False)
    for number, keyword in enumerate(call.keywords):
        yield keyword.arg or f"**{number}", keyword.value


class _Script:
    """The constants, functions and imports of a script."""

    def __init__(self, path: Path, tree: ast.Module) -> None:
        self._path, self._tree = path, tree
        self._assignments: dict[str, list[ast.expr]] = {}
        self._code_paths: dict[str, str] = {}
        self._values: dict[str, Any] = {}
        """The values of the names so far."""
        for node in ast.walk(tree):
            if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
                self._assignments.setdefault(node.targets[0].id, []).append(node.value)
            elif isinstance(node, ast.ImportFrom) and node.module:
                self._code_paths |= {alias.asname or alias.name: self._import_path(node, alias) for alias in node.names}
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                self._code_paths[node.name] = f"{path}:{node.name}"

    def _import_path(self, node: ast.ImportFrom, alias: ast.alias) -> str:
        near = self._path.parent / f"{(node.module or '').replace('.', '/')}.py"
        return f"{near if near.is_file() else node.module}:{alias.name}"

    def calls(self) -> Iterator[tuple[str, ast.Call]]:
        """Yields the calls of TRL's and peft's classes, with the names of the classes."""
        for node in ast.walk(self._tree):
            if isinstance(node, ast.Call):
                name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
                if name in POSITIONS:
                    yield name, node

    def value(self, node: ast.expr) -> Any:
        """Returns a constant, the place of a function (`file.py:name`), the name of a data set, or the code itself."""
        if isinstance(node, ast.Name):
            if node.id in self._code_paths:
                return self._code_paths[node.id]
            assigned = self._assignments.pop(node.id, [])  # so that names which lead to each other end
            if node.id not in self._values:
                self._values[node.id] = self.value(assigned[0]) if len(assigned) == 1 else None
            value = self._values[node.id]
            return Code(node.id) if value in (None, [], {}) else value  # an empty list is filled later
        if isinstance(node, ast.List | ast.Tuple):
            items = [self.value(item) for item in node.elts]
            return Code(ast.unparse(node)) if any(isinstance(item, Code) for item in items) else items
        if isinstance(node, ast.Call):
            return self._dataset_path(node)
        try:
            return ast.literal_eval(node)
        except (ValueError, TypeError):  # a set of lists
            pass
        try:
            return compute_constant(node)
        except ValueError:
            return Code(ast.unparse(node))

    def _dataset_path(self, call: ast.Call) -> Any:
        """Returns the file of `load_dataset("json", data_files="rows.jsonl")`; of the hub `NAME:CONFIG:SPLIT`."""
        name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        words = [self.value(node) for node in call.args]
        args: Mapping[str, Any] = {keyword.arg or "": self.value(keyword.value) for keyword in call.keywords}
        if name != "load_dataset" or any(isinstance(word, Code) for word in [*words, *args.values()]) or not words:
            return Code(ast.unparse(call))
        if "data_files" in args:
            files = args["data_files"]
            return files.get(args.get("split", "train"), Code(ast.unparse(call))) if isinstance(files, dict) else files
        parts = [*words[:2], *([args["name"]] if "name" in args else []), args.get("split", "train")]
        return ":".join(str(part) for part in parts)
