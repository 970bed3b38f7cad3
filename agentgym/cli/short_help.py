"""The help of a command with many settings: those that matter, in the width of the terminal."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, Literal, get_args, get_origin, get_type_hints

import docstring_parser

__all__ = ["option_docs", "short_help"]

INDENT = 6


def short_help(options: type[object], names: Sequence[str], prog: str) -> str:
    """Returns the help of the settings `names` (`steps`, `optimizer.learning_rate`) of a command's dataclass.

    A setting that `options` itself does not have is one of its field `run`.
    """
    width = min(shutil.get_terminal_size().columns, 120)
    summary = textwrap.fill(" ".join((options.__doc__ or "").split()), width)
    lines = [f"usage: {prog} [OPTIONS]", "", summary, "", "The settings that matter most:"]
    for name in names:
        kind, setting, default = _find_setting(options, name.split("."))
        option = f"--{name.replace('_', '-')} {_metavar(get_type_hints(kind)[setting.name])}".rstrip()
        text = option_docs(kind).get(setting.name, "")
        lines.append(f"  {option}")
        lines.append(textwrap.fill(f"{text} {_default_text(default)}".strip(), width, **_indents()))
    lines += ["", f"All settings: {prog} --help-all"]
    if "print_config" in names:
        lines.append(f"As YAML:      {prog} --env ID --print-config")
    return "\n".join(lines)


def option_docs(settings: type[object]) -> Mapping[str, str]:
    """Returns the docstrings of a dataclass's fields, each in one line."""
    key: Any = settings  # mypy takes no type[object] for hashable
    return _read_docs(key)


@cache  # reading the source takes 20 ms, and help asks for each setting of a class
def _read_docs(settings: type[object]) -> Mapping[str, str]:
    bases = [base for base in reversed(settings.__mro__) if is_dataclass(base)]
    params = [param for base in bases for param in docstring_parser.parse_from_object(base).params]
    return {param.arg_name: " ".join(param.description.split()) for param in params if param.description}


def _indents() -> dict[str, Any]:
    return {"initial_indent": " " * INDENT, "subsequent_indent": " " * INDENT}


def _find_setting(
    kind: type[object], path: Sequence[str], block: object = None
) -> tuple[type[object], Field[Any], object]:
    """Returns the dataclass that has the setting of a path, its field, and its default; `block` is the class's value.

    A class may have other defaults for a block of settings than the block's own class.
    """
    assert is_dataclass(kind)
    settings = {setting.name: setting for setting in fields(kind)}
    hints = get_type_hints(kind)
    if path[0] not in settings:
        return _find_setting(hints["run"], path)
    setting = settings[path[0]]
    if len(path) == 1:
        return kind, setting, setting.default if block is None else getattr(block, setting.name)
    return _find_setting(
        hints[path[0]], path[1:], setting.default_factory() if callable(setting.default_factory) else None
    )


def _metavar(hint: object) -> str:
    """Returns the form of an option's value; nothing for a flag."""
    if get_origin(hint) is Literal:
        return "{" + ",".join(map(str, get_args(hint))) + "}"
    if get_args(hint)[1:] == (Ellipsis,):
        return f"{_metavar(get_args(hint)[0])} ..."
    if args := [arg for arg in get_args(hint) if arg is not NoneType]:
        return "[NAME=VALUE ...]" if len(args) == 2 else _metavar(args[0])
    return "" if hint is bool else str(getattr(hint, "__name__", hint)).upper()


def _default_text(default: object) -> str:
    is_silent = default is MISSING or default is None or isinstance(default, bool) or default == ""
    return "" if is_silent else f"(default: {default})"
