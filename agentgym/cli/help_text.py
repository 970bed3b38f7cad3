"""The help of the commands, no wider than the terminal, and the table of commands and options that it is made from."""

from __future__ import annotations

import inspect
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

__all__ = ["HELP_OPTIONS", "Help", "Option", "default_of", "option_table", "type_hints"]

HELP_OPTIONS = ("-h", "--help", "--help-all")
"""The options with which every command shows its help."""
INDENT = " " * 6


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """An option of a command, or an argument, which has no names."""

    setting: str
    """The setting that it sets, such as `optimizer.learning_rate`."""
    names: tuple[str, ...]
    """Every spelling, such as `-n` and `--num-tasks`."""
    value: str
    """The form of the value, such as `INT`; empty for a flag."""
    text: str
    default: object
    """The default, or MISSING."""
    choices: tuple[str, ...]
    """The values that it takes, if they are few."""

    def lines(self, width: int) -> list[str]:
        """Returns the lines of the help on this option."""
        names = self.names if self.value or self.default is True else self.names[:1]
        title = " ".join(part for part in (", ".join(names), self.value) if part)
        if len(title) > width - 2:
            title = title.replace(",", ", ")  # many choices, which can be wrapped then
        text = f"{self.text} {_default_text(self.default)}".strip()
        lines = textwrap.wrap(title, width, initial_indent="  ", subsequent_indent="    ")
        return [*lines, *textwrap.wrap(text, width, initial_indent=INDENT, subsequent_indent=INDENT)]


@dataclass(kw_only=True, eq=False)
class Help(Exception):
    """Ends a command that is asked for its help, before it loads or reads anything else; it is what the help shows."""

    prog: str
    """The command, such as `agentgym eval`."""
    summary: str = ""
    options: Sequence[Option] = ()
    main_settings: Sequence[str] = ()
    """The settings that the short help shows; empty for a command with few options, which has no short help."""
    commands: Mapping[str, str] = field(default_factory=dict)
    """The commands of a group, each with its summary."""
    closing: str = ""
    """Text that follows the commands."""
    is_full: bool = False
    """True if every option is shown, whatever the main settings."""

    def to_text(self, width: int) -> str:
        """Returns the text of the help."""
        arguments = [option for option in self.options if not option.names]
        words = ["COMMAND"] if self.commands else [option.value for option in arguments]
        usage = f"usage: {' '.join([self.prog, *words])} [OPTIONS]"
        lines = textwrap.wrap(usage, width, subsequent_indent=INDENT)
        for paragraph in inspect.cleandoc(self.summary).split("\n\n") if self.summary else ():
            lines += ["", *textwrap.wrap(paragraph, width)]
        if self.commands:
            lines += ["", "commands:", *self._command_lines(width)]
        options = self.options
        is_short = bool(self.main_settings) and not self.is_full
        if is_short:
            by_setting = {option.setting: option for option in options}
            options = [*arguments, *(by_setting[name] for name in self.main_settings)]
        if options:
            lines += ["", "The settings that matter most:" if is_short else "options:"]
            lines += [line for option in options for line in option.lines(width)]
        closing = self.closing
        if is_short:
            closing += f"\nAll settings: {self.prog} --help-all\n"
            if "print_config" in self.main_settings:
                closing += f"As YAML:      {self.prog} --env ID --print-config\n"
        for line in closing.splitlines():
            lines += textwrap.wrap(line, width) or [""]
        return "\n".join(lines)

    def _command_lines(self, width: int) -> Iterator[str]:
        indent = max(map(len, self.commands)) + 4
        for name, summary in self.commands.items():
            yield from textwrap.wrap(
                summary, width, initial_indent=f"  {name}".ljust(indent), subsequent_indent=" " * indent
            )


def option_table(settings: type[object]) -> list[Option]:
    """Returns the options of a command's dataclass, as tyro reads them, those of its blocks of settings included."""
    return list(_options(settings, "", None))


def _options(kind: Any, prefix: str, block: object) -> Iterator[Option]:
    """Yields the options of a dataclass, whose names begin with a prefix; `block` has its values if it is no None.

    A class may have other defaults for a block of settings than the block's own class.
    """
    import tyro  # here, because a group of commands has no options

    for setting in fields(kind):
        hint, *marks = _parts(type_hints(kind)[setting.name])
        if tyro.conf.Suppress in marks:
            continue
        default = default_of(setting, block)
        path = prefix + setting.name
        if is_dataclass(hint):
            inner = prefix if any(getattr(mark, "name", None) == "" for mark in marks) else f"{path}."
            yield from _options(hint, inner, None if default is MISSING else default)
            continue
        metavar, aliases = (
            next((value for mark in marks if (value := getattr(mark, name, None))), None)
            for name in ("metavar", "aliases")
        )
        is_argument = tyro.conf.Positional in marks
        choices = _choices(hint)
        names = (
            () if is_argument else (*(aliases or ()), f"--{path}", *([f"--{prefix}no_{setting.name}"] * (hint is bool)))
        )
        yield Option(
            setting=path,
            names=tuple(name.replace("_", "-") for name in names),
            value=metavar or (setting.name.upper() if is_argument and not choices else _value_form(hint)),
            text=_option_docs(kind).get(setting.name, ""),
            default=default,
            choices=choices,
        )


def default_of(setting: Field[Any], block: object) -> object:
    """Returns a setting's value in a block of settings, or its own default without one; MISSING if it has none."""
    if block is not None:
        return getattr(block, setting.name)
    return setting.default if setting.default_factory is MISSING else setting.default_factory()


@cache  # tyro asks for the settings of a class several times
def type_hints(settings: type[object]) -> dict[str, Any]:
    """Returns the types of a dataclass's fields, with their annotations."""
    return get_type_hints(settings, include_extras=True)


@cache  # reading the source takes 20 ms, and several blocks have one class
def _option_docs(settings: type[object]) -> Mapping[str, str]:
    """Returns the docstrings of a dataclass's fields, each in one line."""
    import docstring_parser  # here, because a group of commands has no options

    bases = [base for base in reversed(settings.__mro__) if is_dataclass(base)]
    params = [param for base in bases for param in docstring_parser.parse_from_object(base).params]
    return {param.arg_name: " ".join(param.description.split()) for param in params if param.description}


def _parts(hint: Any) -> tuple[Any, ...]:
    """Returns a type without its annotations, and the annotations."""
    return (hint.__origin__, *hint.__metadata__) if get_origin(hint) is Annotated else (hint,)


def _choices(hint: Any) -> tuple[str, ...]:
    """Returns the values of a Literal, alone, in a tuple or in a union; none for another type."""
    if get_origin(hint) is Literal:
        return tuple(map(str, get_args(hint)))
    return next((choices for arg in get_args(hint) if (choices := _choices(arg))), ())


def _value_form(hint: Any) -> str:
    """Returns the form of an option's value; nothing for a flag."""
    if get_origin(hint) is Literal:
        return "{" + ",".join(_choices(hint)) + "}"
    origin: Any = get_origin(hint)
    args = [arg for arg in get_args(hint) if arg is not NoneType]
    if origin is tuple:
        return f"{_value_form(args[0])} ..." if args[-1] is Ellipsis else " ".join(map(_value_form, args))
    if origin is Mapping:
        return "[NAME=VALUE ...]"
    forms = [_value_form(arg) for arg in args]
    if "[NAME=VALUE ...]" in forms[1:]:  # a mapping, or the file that has it
        return "FILE"
    if forms:
        return max(forms, key=lambda form: form.endswith("..."))  # several texts, or a text
    return "" if hint is bool else str(hint.__name__).upper()


def _default_text(default: object) -> str:
    if isinstance(default, tuple):
        default = " ".join(map(str, default))
    is_silent = default is MISSING or default is None or default is False or default == "" or default == {}
    return "" if is_silent else f"(default: {default})"
