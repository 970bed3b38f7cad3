"""Reads verl's settings: a YAML file with its Hydra defaults, a shell script that starts verl, and overrides."""

from __future__ import annotations

import ast
import operator
import os
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from agentgym.errors import ConfigError

__all__ = ["compute_constant", "read_overrides", "read_scalar", "read_verl", "read_yaml"]

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?")
OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][\w.@/]*=")
START = re.compile(r"(^|[./])main_\w+(\.py)?$")
"""A module or file that starts a training: `verl.trainer.main_ppo`, `recipe.dapo.main_dapo`."""
ASSIGNMENT = re.compile(r"^(?:export\s+|local\s+|readonly\s+)*([A-Za-z_]\w*)(\+?)=(.*)$", re.S)
EXPANSION = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)|\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
LIST = re.compile(r"[\"']?\$\{(\w+)\[[@*]\]\}[\"']?")
POINTER = re.compile(r"\$\{(?:oc\.(\w+):)?([^{},]+)(?:,([^{}]*))?\}")
MOVED = re.compile(r"^reward\.(custom_reward_function|reward_manager|reward_model)\b")
"""Keys that newer versions of verl have below `reward`."""
OPERATORS: Mapping[type[ast.operator], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}


def read_verl(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Returns the settings of a configuration (.yaml) or script (.sh) with overrides, by their dotted names.

    A script is read, and not run. Raises ConfigError for a file that is neither.
    """
    given: dict[str, Any] = {}
    if path.suffix in (".sh", ".bash"):
        words = _command_words(path)
        given |= _named_config(words, path.parent)
        given |= read_overrides([word for word in words if OVERRIDE.match(word)])
    else:
        given |= _with_hydra_defaults(path)
    given |= read_overrides(overrides)
    return {
        MOVED.sub(r"\1", name): _resolve(_absolute(value, name), given)
        for name, value in given.items()
        if not name.endswith("_target_")  # the classes of verl's own dataclasses
    }


def read_yaml(path: Path) -> dict[str, Any]:
    """Returns the mapping of a YAML or JSON file; raises ConfigError if it holds none."""
    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(found, dict):
        raise ConfigError(f"{str(path)!r} holds no settings: it must be a mapping of names to values")
    return found


def read_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Reads `data.train_batch_size=256 +a.b=[1,2]`, written as for Hydra; `~a.b` removes nothing and is null."""
    given: dict[str, Any] = {}
    for word in words:
        if not OVERRIDE.match(word) and not word.startswith("~"):
            raise ConfigError(f"an override is written key=value, such as data.train_batch_size=256, got {word!r}")
        name, _, value = word.lstrip("+~").partition("=")
        given[name] = None if word.startswith("~") else read_scalar(value)
    return {name: value for key, found in given.items() for name, value in _flat(found, key).items()}


def read_scalar(text: Any) -> Any:
    """Reads a value as YAML, with numbers such as `1e-6`, which YAML takes for text."""
    if isinstance(text, list):
        return [read_scalar(item) for item in text]
    if not isinstance(text, str):
        return text
    if NUMBER.fullmatch(text):
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return read_scalar(value) if isinstance(value, list) or (isinstance(value, str) and value != text) else value


def _flat(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        return {key: leaf for part, item in value.items() for key, leaf in _flat(item, f"{name}.{part}").items()}
    return {name: read_scalar(value)}


def _with_hydra_defaults(path: Path) -> dict[str, Any]:
    """Reads a file; of the files of its `defaults`, those that lie beside it come first."""
    found = read_yaml(path)
    defaults = found.pop("defaults", [])
    found.pop("hydra", None)
    given: dict[str, Any] = {}
    for entry in defaults if isinstance(defaults, list) else []:
        near = path.with_name(f"{entry}.yaml") if isinstance(entry, str) else path
        if near != path and near.is_file():
            given |= _with_hydra_defaults(near)
    return given | {name: leaf for part, item in found.items() for name, leaf in _flat(item, part).items()}


def _named_config(words: Sequence[str], folder: Path) -> dict[str, Any]:
    """Reads the file that `--config-path` and `--config-name` of a script name, if it is there."""
    options = dict(zip(words, [*words[1:], ""], strict=True)) | dict(
        word.split("=", 1) for word in words if word.startswith("--config-") and "=" in word
    )
    name = options.get("--config-name", "")
    for place in (Path(options.get("--config-path", "")), folder / options.get("--config-path", "")):
        if name and (path := place / f"{name.removesuffix('.yaml')}.yaml").is_file():
            return _with_hydra_defaults(path)
    return {}


def _command_words(path: Path) -> list[str]:
    """Returns the words after the module that starts verl, with the script's own variables filled in."""
    try:
        text = path.read_text(encoding="utf-8").replace("\\\n", " ")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from error
    variables: dict[str, Any] = dict(os.environ)
    for statement in _statements(text):
        if match := ASSIGNMENT.match(statement):
            name, plus, value = match.groups()
            if value.startswith("("):
                own = _words(value[1 : value.rfind(")")], variables)
                variables[name] = [*variables.get(name, []), *own] if plus else own
                continue
            if len(words := _words(value, variables)) <= 1:
                variables[name] = "".join(words)
                continue
        words = _words(statement, variables)
        start = next((index for index, word in enumerate(words) if START.search(word)), None)
        if start is not None:
            return words[start + 1 :]
    raise ConfigError(f"{str(path)!r} starts no verl: a line `python3 -m verl.trainer.main_ppo key=value ...` is read")


def _statements(text: str) -> list[str]:
    """Splits a script into statements; an array spans lines up to its parenthesis."""
    statements: list[str] = []
    for line in text.splitlines():
        line = line.strip()
        if statements and re.match(r"[\w ]+\+?=\(", statements[-1]) and ")" not in statements[-1]:
            statements[-1] += f"\n{line}"
        elif line and not line.startswith("#"):
            statements += re.split(r";\s*(?=(?:export\s+)?[A-Za-z_]\w*=)", line)
    return statements


def _words(text: str, variables: Mapping[str, Any]) -> list[str]:
    """Splits text as a shell would, after filling variables in; an unknown variable stays as it is written."""
    text = LIST.sub(lambda match: shlex.join(variables.get(match[1], [])), text)
    text = re.sub(r"\$\(pwd\)|`pwd`", str(Path.cwd()), text)
    for _ in range(5):  # a variable may hold another one
        text = EXPANSION.sub(lambda match: _expand(match, variables), text)
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        if "main_" not in text:
            return []  # a part of a text over several lines, which sets nothing that is read
        raise ConfigError(f"a line of the script cannot be read ({error}): {text[:80]!r}") from error


def _expand(match: re.Match[str], variables: Mapping[str, Any]) -> str:
    sum_, braced, default, plain = match.groups()
    if sum_ is not None:
        filled = re.sub(r"\$?\{?([A-Za-z_]\w*)\}?", lambda name: str(variables.get(name[1], name[0])), sum_)
        try:
            return str(int(compute_constant(ast.parse(filled.strip(), mode="eval").body)))
        except (SyntaxError, ValueError, ZeroDivisionError):
            return match[0]
    value = variables.get(braced or plain)
    if value is None or isinstance(value, list) or (value == "" and default):
        return match[0] if default is None else default.strip("\"'")
    return str(value)


def compute_constant(node: ast.expr) -> float:
    """Computes arithmetic of numbers; raises ValueError for anything else."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return OPERATORS[type(node.op)](compute_constant(node.left), compute_constant(node.right))
    raise ValueError("no arithmetic of numbers")


def _absolute(value: Any, name: str) -> Any:
    """Returns a value whose pointers to keys beside its own, `${.key}`, have their whole names."""
    near = f"{name.rpartition('.')[0]}."
    return re.sub(r"\$\{(oc\.\w+:)?\.", rf"${{\g<1>{near}", value) if isinstance(value, str) else value


def _resolve(value: Any, given: Mapping[str, Any], depth: int = 0) -> Any:
    """Follows OmegaConf's `${a.b}`, `${oc.select:a.b,default}` and `${oc.env:NAME,default}`; others stay."""
    if isinstance(value, list):
        return [_resolve(item, given, depth) for item in value]
    if not isinstance(value, str) or depth > 5:
        return value
    whole = POINTER.fullmatch(value)
    if whole is None:
        return POINTER.sub(lambda match: str(_follow(match, given)), value)
    target = _follow(whole, given)
    return target if target == value else _resolve(target, given, depth + 1)


def _follow(match: re.Match[str], given: Mapping[str, Any]) -> Any:
    kind, name, default = match.groups()
    if kind != "env" and default is None and name.strip() in given:
        return given[name.strip()]
    found = os.environ.get(name) if kind == "env" else given.get(name.strip())
    if found is None:
        return match[0] if default is None and kind != "select" else read_scalar((default or "null").strip(" \"'"))
    return found
