"""Reads verl's settings: a YAML file with its Hydra defaults, a shell script that starts verl, and overrides."""

from __future__ import annotations

import ast
import math
import operator
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from agentgym.errors import ConfigError
from agentgym.yaml_text import parse_yaml

__all__ = ["compute_constant", "read_overrides", "read_scalar", "read_source", "read_verl", "read_yaml"]

MAX_BYTES = 2**17
MAX_TEXT = 100_000
"""The most characters by which the variables and pointers of a file make it longer."""
MAX_VALUES = 5_000
MAX_EXPONENT = 1_100
MAX_DIGITS = 300
"""The length of a number: a greater one is none of a computer's, and takes long to read."""

NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?")
OVERRIDE = re.compile(r"[+~]{0,2}[A-Za-z_][\w.@/]*=")
START = re.compile(r"(^|[./])main_\w+(\.py)?$")
"""A module or file that starts a training: `verl.trainer.main_ppo`, `recipe.dapo.main_dapo`."""
ASSIGNMENT = re.compile(r"^(?:export\s+|local\s+|readonly\s+)*([A-Za-z_]\w*)(\+?)=(.*)$", re.S)
EXPANSION = re.compile(r"\$\(\(([^()]*(?:\([^()]*\)[^()]*)*)\)\)|\$\{(\w+)(?::?-([^{}]*))?\}|\$(\w+)")
NAME = re.compile(r"\$?\{?([A-Za-z_]\w*)\}?")
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


class _Text:
    """Fills variables into the texts of a file, all together up to MAX_TEXT characters."""

    def __init__(self, path: Path) -> None:
        self._path, self._num_left = path, MAX_TEXT

    def spend(self, number: int) -> None:
        """Counts characters or values; raises ConfigError after MAX_TEXT of them."""
        self._num_left -= number
        if self._num_left < 0:
            what = f"make it longer by more than {MAX_TEXT:,} characters"
            raise ConfigError(f"the variables of {str(self._path)!r} {what}")

    def fill(self, pattern: re.Pattern[str], value: Callable[[re.Match[str]], str], text: str) -> str:
        """Replaces what fits the pattern."""

        def replace(match: re.Match[str]) -> str:
            filled = value(match)
            self.spend(max(0, len(filled) - len(match[0])))
            return filled

        return pattern.sub(replace, text)


def read_verl(path: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Returns the settings of a configuration (.yaml) or script (.sh) with overrides, by their dotted names.

    A script is read, and not run. Raises ConfigError for a file that is neither.
    """
    settings: dict[str, Any] = {}
    if path.suffix in (".sh", ".bash"):
        words = _command_words(path, _Text(path))
        settings |= _named_config(words, path.parent)
        settings |= read_overrides([word for word in words if OVERRIDE.match(word)])
    else:
        settings |= _with_hydra_defaults(path, set())
    settings |= read_overrides(overrides)
    text = _Text(path)
    return {
        MOVED.sub(r"\1", name): _resolve(_absolute(value, name), settings, text)
        for name, value in settings.items()
        if not name.endswith("_target_")  # the classes of verl's own dataclasses
    }


def read_source(path: Path) -> str:
    """Returns the text of a file of settings; raises ConfigError for one that is not text, or longer than any is."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ConfigError(f"{str(path)!r} is not a file of settings: it has more than {MAX_BYTES // 1024} kB")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{str(path)!r} cannot be read: {error}") from error


def read_yaml(path: Path) -> dict[str, Any]:
    """Returns the mapping of a YAML or JSON file; raises ConfigError if it holds none."""
    text = read_source(path)
    try:
        content = parse_yaml(text, max_values=MAX_VALUES) or {}
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} cannot be read as YAML: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{str(path)!r} holds no settings: it must be a mapping of names to values")
    return content


def read_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Reads `data.train_batch_size=256 +a.b=[1,2]`, written as for Hydra; `~a.b` removes nothing and is null."""
    settings: dict[str, Any] = {}
    for word in words:
        if not OVERRIDE.match(word) and not word.startswith("~"):
            raise ConfigError(f"an override is written key=value, such as data.train_batch_size=256, got {word!r}")
        name, _, value = word.lstrip("+~").partition("=")
        settings[name] = None if word.startswith("~") else read_scalar(value)
    return {name: value for key, leaves in settings.items() for name, value in _flat(leaves, key).items()}


def read_scalar(text: Any) -> Any:
    """Reads a value as YAML, with numbers such as `1e-6`, which YAML takes for text."""
    if isinstance(text, list):
        return [read_scalar(item) for item in text]
    if isinstance(text, int) and abs(text) >= 10**MAX_DIGITS:
        raise ConfigError(f"a number has more than {MAX_DIGITS} digits, which no setting has")
    if not isinstance(text, str):
        return text
    if NUMBER.fullmatch(text):
        if len(text) > MAX_DIGITS:
            raise ConfigError(f"the number {text[:20]}... has {len(text):,} digits, which no setting has")
        return int(text) if text.lstrip("+-").isdigit() else float(text)
    try:
        value = parse_yaml(text, max_values=MAX_VALUES)
    except ValueError:
        return text
    return read_scalar(value) if isinstance(value, list) or (isinstance(value, str) and value != text) else value


def _flat(value: Any, name: str) -> dict[str, Any]:
    if isinstance(value, Mapping) and value:
        return {key: leaf for part, item in value.items() for key, leaf in _flat(item, f"{name}.{part}").items()}
    return {name: read_scalar(value)}


def _with_hydra_defaults(path: Path, paths_read: set[Path]) -> dict[str, Any]:
    """Reads a file; of the files of its `defaults`, those in its folder come first. `paths_read` are those so far."""
    if path.resolve() in paths_read:
        raise ConfigError(f"the `defaults` lead to {str(path)!r} twice: leave one out")
    paths_read.add(path.resolve())
    content = read_yaml(path)
    defaults = content.pop("defaults", [])
    content.pop("hydra", None)
    settings: dict[str, Any] = {}
    for entry in defaults if isinstance(defaults, list) else []:
        if isinstance(entry, str) and entry != "_self_" and (near := path.parent / f"{entry}.yaml").is_file():
            settings |= _with_hydra_defaults(near, paths_read)
    return settings | {name: leaf for part, item in content.items() for name, leaf in _flat(item, str(part)).items()}


def _named_config(words: Sequence[str], folder: Path) -> dict[str, Any]:
    """Reads the file that `--config-path` and `--config-name` of a script name, if it is there."""
    options = dict(zip(words, [*words[1:], ""], strict=True)) | dict(
        word.split("=", 1) for word in words if word.startswith("--config-") and "=" in word
    )
    name = options.get("--config-name", "")
    for parent in (Path(options.get("--config-path", "")), folder / options.get("--config-path", "")):
        if name and (path := parent / f"{name.removesuffix('.yaml')}.yaml").is_file():
            return _with_hydra_defaults(path, set())
    return {}


def _command_words(path: Path, budget: _Text) -> list[str]:
    """Returns the words after the module that starts verl, with the script's own variables filled in.

    Variables of this process are not: a stranger's script would write their values into a file that is shared.
    """
    variables: dict[str, Any] = {"HOME": "~", "PWD": str(Path.cwd())}
    for statement in _statements(read_source(path).replace("\\\n", " ")):
        if match := ASSIGNMENT.match(statement):
            name, plus, value = match.groups()
            if value.startswith("("):
                own = _words(value[1 : value.rfind(")")], variables, budget)
                before = variables.get(name) if plus else None
                variables[name] = before if isinstance(before, list) else []
                variables[name] += own
                continue
            if len(words := _words(value, variables, budget)) <= 1:
                variables[name] = "".join(words)
                continue
        words = _words(statement, variables, budget)
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


def _words(text: str, variables: Mapping[str, Any], budget: _Text) -> list[str]:
    """Splits text as a shell would, after filling variables in; an unknown variable stays as it is written."""
    text = budget.fill(LIST, lambda match: shlex.join(variables.get(match[1], [])), text)
    text = re.sub(r"\$\(pwd\)|`pwd`", str(Path.cwd()), text)
    for _ in range(5):  # a variable may hold another one
        text = budget.fill(EXPANSION, lambda match: _expand(match, variables, budget), text)
    try:
        return shlex.split(text, comments=True)
    except ValueError as error:
        if "main_" not in text:
            return []  # a part of a text over several lines, which sets nothing that is read
        raise ConfigError(f"a line of the script cannot be read ({error}): {text[:80]!r}") from error


def _expand(match: re.Match[str], variables: Mapping[str, Any], budget: _Text) -> str:
    sum_, braced, default, plain = match.groups()
    if sum_ is not None:
        filled = budget.fill(NAME, lambda name: str(variables.get(name[1], name[0])), sum_)
        try:
            return str(int(compute_constant(ast.parse(filled.strip(), mode="eval").body)))
        except (SyntaxError, ValueError, MemoryError, RecursionError):  # the last two for long sums
            return match[0]
    value = variables.get(braced or plain)
    if value is None or isinstance(value, list) or (value == "" and default):
        return match[0] if default is None else default.strip("\"'")
    return str(value)


def compute_constant(node: ast.expr) -> float:
    """Computes arithmetic of numbers; raises ValueError for anything else, and for what is greater than any float."""
    try:
        if isinstance(node, ast.Constant) and isinstance(node.value, int | float):
            value: float = node.value
        elif isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            left, right = compute_constant(node.left), compute_constant(node.right)
            if isinstance(node.op, ast.Pow) and abs(right) > MAX_EXPONENT:
                raise ValueError("too great an exponent")
            value = OPERATORS[type(node.op)](left, right)
        else:
            raise ValueError("no arithmetic of numbers")
        math.frexp(value)  # raises for a number that is greater than any float, and for a complex one
    except (ArithmeticError, TypeError) as error:
        raise ValueError(str(error)) from error
    return value


def _absolute(value: Any, name: str) -> Any:
    """Returns a value whose pointers to keys beside its own, `${.key}`, have their whole names."""
    near = f"{name.rpartition('.')[0]}."
    return re.sub(r"\$\{(oc\.\w+:)?\.", rf"${{\g<1>{near}", value) if isinstance(value, str) else value


def _resolve(value: Any, settings: Mapping[str, Any], text: _Text, depth: int = 0) -> Any:
    """Follows OmegaConf's `${a.b}` and `${oc.select:a.b,default}`, and takes the default of `${oc.env:NAME,default}`.

    Others stay as they are.
    """
    text.spend(1)
    if isinstance(value, list):
        return [_resolve(item, settings, text, depth) for item in value]
    if not isinstance(value, str) or depth > 5:
        return value
    whole = POINTER.fullmatch(value)
    if whole is None:
        return text.fill(POINTER, lambda match: str(_follow(match, settings)), value)
    target = _follow(whole, settings)
    return target if target == value else _resolve(target, settings, text, depth + 1)


def _follow(match: re.Match[str], settings: Mapping[str, Any]) -> Any:
    kind, name, default = match.groups()
    if kind == "env" and name.strip() == "HOME":
        return "~"
    if kind != "env" and default is None and name.strip() in settings:
        return settings[name.strip()]
    target = None if kind == "env" else settings.get(name.strip())  # this process's own variables stay in it
    if target is None:
        return match[0] if default is None and kind != "select" else read_scalar((default or "null").strip(" \"'"))
    return target
