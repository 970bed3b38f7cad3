"""Reads a command's options into its dataclass; a mistake is one ConfigError that names the nearest right option."""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, TypeVar, Union, cast, get_args, get_origin

from agentgym.cli.help_text import HELP_OPTIONS, Help, default_of, option_table, type_hints
from agentgym.errors import NOT_JSON, ConfigError, MissingSetting, UnknownName, nearest
from agentgym.settings.other_names import OTHER_NAMES
from agentgym.types import JSON
from agentgym.yaml_text import parse_yaml

if TYPE_CHECKING:  # loaded where there is something to read: a command without options need not wait for it
    import tyro

__all__ = [
    "env_as_argument",
    "env_as_option",
    "mix_as_options",
    "parse_options",
    "path_after",
    "profile_as_options",
    "read_keywords",
    "read_mapping",
    "text_after",
    "warn_of_idle",
    "with_full_names",
]

logger = logging.getLogger(__name__)

T = TypeVar("T")
OPTION = re.compile(r"(?<![\w-])--?[A-Za-z][\w.-]*")
REQUIRED = re.compile(r"-|[A-Z][A-Z_-]*(\s|$)")
NO_NUMBER = re.compile(r"(?:invalid literal for int\(\) with base 10|could not convert string to float): (.*)")
MISSING_NAME = re.compile(r"missing [a-z]")
"""The beginning of a MissingSetting; options and arguments begin with other characters."""
INNER = re.compile(r"^(?:run\b\.?|\w+Options\b)(?:: )?")
"""The name of a dataclass that is a command itself: it is part of no option."""
FURTHER_HELP = re.compile(r"Argument helptext:|For full helptext|Unrecognized|Perhaps you meant|Similar")


def parse_options(
    options: type[T], args: Sequence[str], *, prog: str, default: T | None = None, main_options: Sequence[str] = ()
) -> T:
    """Reads the options of the command `prog` (`agentgym eval`) into the dataclass `options`.

    The docstrings of `options` are the help. `default` gives the values of options that are not named. With
    `main_options`, `--help` shows these settings, and `--help-all` all of them.

    Raises ConfigError or UnknownName, in one line, for what cannot be read, and Help for what asks for it.
    """
    if flags := {*HELP_OPTIONS} & {*args}:
        summary, is_full = options.__doc__ or "", "--help-all" in flags
        table = option_table(options)
        raise Help(prog=prog, summary=summary, options=table, main_settings=main_options, is_full=is_full)
    if sum(arg.partition("=")[0] in ("--env-kwargs", "--env_kwargs") for arg in args) > 1:
        raise ConfigError("--env-kwargs is given twice: write all keywords after one, --env-kwargs level=2 shaped=true")
    full_help = "--help-all" if main_options else "--help"
    args = _with_server_args(args)
    if not args and default is None and not any(map(_is_required, fields(cast(Any, options)))):
        return options()
    import tyro

    printed = io.StringIO()
    try:
        with contextlib.redirect_stderr(printed):
            values, unknown = tyro.cli(
                options,
                args=args,
                prog=prog,
                return_unknown_args=True,
                add_help=False,
                default=default,
                registry=_registry(),
            )
    except SystemExit:
        _refuse_unknown(options, args, prog, full_help)
        text = f"{_one_line(printed.getvalue())}; `{prog} {full_help}` shows all options"
        raise (MissingSetting if MISSING_NAME.match(text) else ConfigError)(text) from None
    except ConfigError:
        _refuse_unknown(options, args, prog, full_help)  # an unknown option may be why a setting is invalid
        raise
    if unknown:
        _refuse_unknown(options, args, prog, full_help)
        raise ConfigError(f"unexpected argument {unknown[0]!r}; `{prog} --help` shows what it takes")
    return cast(T, values)


def _with_server_args(args: Sequence[str]) -> list[str]:
    """Joins `--server.server-args` and a text of several words after it, which would be taken for an option."""
    joined: list[str] = []
    for arg in args:
        if joined and joined[-1].endswith("server-args") and arg.startswith("--") and " " in arg:
            joined[-1] += f"={arg}"
        else:
            joined.append(arg)
    return joined


@cache
def _registry() -> tyro.constructors.ConstructorRegistry:
    import tyro

    registry = tyro.constructors.ConstructorRegistry()
    registry.struct_rule(_settings)
    registry.primitive_rule(_keywords)
    return registry


def warn_of_idle(part: str, settings: object, option: str, value: str, users: Collection[str]) -> None:
    """Warns of settings of a part that the command does not use: it does if `option` has one of the values `users`.

    Raises nothing: a file may have settings of parts that are not used.
    """
    if settings != type(settings)() and value not in users:
        choices = f" or --{option} ".join(users)
        logger.warning("settings of %s are given, and the %s is %s: add --%s %s", part, option, value, option, choices)


def _is_required(setting: Field[object]) -> bool:
    return setting.default is MISSING and setting.default_factory is MISSING


def _settings(info: tyro.constructors.StructTypeInfo) -> tyro.constructors.StructConstructorSpec | None:
    """Describes a dataclass of settings to tyro, without its help; tyro's own rule takes twice the time."""
    import tyro

    if not is_dataclass(info.type):
        return None
    block = info.default if is_dataclass(info.default) else None
    specs = [
        tyro.constructors.StructFieldSpec(
            name=setting.name,
            type=type_hints(info.type)[setting.name],
            default=tyro.MISSING if (default := default_of(setting, block)) is MISSING else default,
            helptext="",
        )
        for setting in fields(info.type)
    ]
    return tyro.constructors.StructConstructorSpec(instantiate=info.type, fields=tuple(specs))


def _keywords(
    info: tyro.constructors.PrimitiveTypeInfo,
) -> tyro.constructors.PrimitiveConstructorSpec[Mapping[str, JSON] | None] | None:
    """Reads a mapping, or a mapping or None, from NAME=VALUE pairs.

    The names are keywords, unless the values are weights (float).
    """
    import tyro

    is_union = get_origin(info.type) in (Union, UnionType)
    kinds = [kind for kind in get_args(info.type) if kind is not NoneType] if is_union else [info.type]
    if kinds[0] is str and [get_origin(kind) for kind in kinds[1:]] == [Mapping]:  # a mapping, or the file that has it
        return tyro.constructors.PrimitiveConstructorSpec(
            nargs=1,
            metavar="FILE",
            instance_from_str=lambda words: cast(Any, words[0]),
            is_instance=lambda value: isinstance(value, (str, Mapping)),
            str_from_instance=lambda value: [value if isinstance(value, str) else json.dumps(value)],
        )
    if [get_origin(kind) for kind in kinds] != [Mapping]:
        return None
    kind = get_args(kinds[0])[1]
    values = get_args(kind) or (kind,)
    read_pairs = _read_weights if float in values and str not in values else read_keywords
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="[NAME=VALUE ...]",
        instance_from_str=lambda pairs: read_pairs(pairs),
        is_instance=lambda value: isinstance(value, Mapping) or (is_union and value is None),
        str_from_instance=lambda value: [f"{key}={json.dumps(item)}" for key, item in (value or {}).items()],
    )


def env_as_option(args: Sequence[str]) -> list[str]:
    """Reads `eval ID --seed 1`, written as for `play`, as `eval --env ID --seed 1`."""
    return ["--env", *args] if args and not args[0].startswith("-") else list(args)


def mix_as_options(args: Sequence[str]) -> list[str]:
    """Reads `--mix A=2 B=1` as `--env A --practice.mix A=2 B=1`: the first environment of a mix names the run."""
    words = with_full_names(args, {"--mix": "--practice.mix"})
    index = next((n for n, word in enumerate(words) if word.partition("=")[0] == "--practice.mix"), None)
    if index is None or any(word.partition("=")[0] == "--env" for word in words):
        return words
    _, equals, first = words[index].partition("=")
    first = first if equals else next(iter(words[index + 1 :]), "")
    name, _, weight = first.partition("=")
    entry = _value(weight)
    env = entry.get("env", name) if isinstance(entry, Mapping) else name
    return ["--env", str(env), *words] if name else words


def with_full_names(args: Sequence[str], names: Mapping[str, str]) -> list[str]:
    """Reads `--tools a.py:search` as `--data.tools a.py:search`, by the full names of options that have short ones."""
    parts = [arg.partition("=") for arg in args]
    return ["".join((names.get(name, name), *value)) for name, *value in parts]


def profile_as_options(args: Sequence[str]) -> list[str]:
    """Reads `--profile` as `--profile.steps 2` (the first step warms up), `--profile 5 6` as `--profile.steps 5 6`."""
    words: list[str] = []
    for arg, following in zip(args, [*args[1:], ""], strict=False):
        name, equals, value = arg.partition("=")
        if name != "--profile":
            words.append(arg)
        elif equals:
            words += ["--profile.steps", value]
        else:
            words += ["--profile.steps", *([] if following[:1].isdigit() else ["2"])]
    return words


def env_as_argument(args: Sequence[str]) -> list[str]:
    """Reads `play --env ID`, written as for `eval`, as `play ID`."""
    words = [word for arg in args for word in (["--env", arg[6:]] if arg.startswith("--env=") else [arg])]
    if "--env" not in words[:-1]:
        return words
    index = words.index("--env")
    return [words[index + 1], *words[:index], *words[index + 2 :]]


def read_mapping(path: Path) -> dict[str, Any]:
    """Returns the mapping that a YAML file holds; raises ConfigError for any other file."""
    if not path.is_file():
        raise ConfigError(f"no configuration file {str(path)!r}")
    try:
        settings = parse_yaml(path.read_text(encoding="utf-8-sig")) or {}
    except ValueError as error:
        raise ConfigError(f"{str(path)!r} is not YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"{str(path)!r} holds no settings: it must be a mapping of names to values")
    return settings


def path_after(option: str, args: Sequence[str]) -> Path | None:
    """Returns the path that an option is given at its last occurrence."""
    text = text_after(option, args)
    return None if text is None else Path(text)


def text_after(option: str, args: Sequence[str]) -> str | None:
    """Returns what an option is given at its last occurrence; None if it is not given."""
    indices = [index for index, arg in enumerate(args) if arg.partition("=")[0].replace("_", "-") == option]
    if not indices:
        return None
    _, equals, value = args[indices[-1]].partition("=")
    return value if equals else next(iter(args[indices[-1] + 1 :]), "")


def read_keywords(pairs: Sequence[str]) -> dict[str, JSON]:
    """Reads `("level=2", "shaped=true", "name=x")` as keywords; a value is JSON if it parses as JSON, else text."""
    keywords: dict[str, JSON] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name.isidentifier():
            raise ConfigError(f"NAME=VALUE was wanted, such as level=2, got {pair!r}")
        keywords[name] = _value(value)
    return keywords


def _read_weights(pairs: Sequence[str]) -> dict[str, JSON]:
    """Reads `("TextGame-v0=2", "lock.py:Lock=1")` as weights, or other numbers, by name."""
    weights: dict[str, JSON] = {}
    for pair in pairs:
        name, equals, value = pair.partition("=")
        if not equals or not name or name in weights:
            raise ConfigError(f"different names with numbers were wanted, such as TextGame-v0=2, got {pair!r}")
        weights[name] = _value(value)
    return weights


def _value(text: str) -> JSON:
    try:
        value: JSON = json.loads(text)
    except NOT_JSON:
        return {"True": True, "False": False, "None": None}.get(text, text)
    return value


def _refuse_unknown(options: type[object], args: Sequence[str], prog: str, full_help: str) -> None:
    """Raises UnknownName for the first option that `prog` does not have."""
    from agentgym.trainers.former_settings import former_setting  # here, and not above: only mistakes need it

    names = [*HELP_OPTIONS, *(name for option in option_table(options) for name in option.names)]
    for before, arg in zip(["", *args], args, strict=False):
        name = arg.partition("=")[0]
        if OPTION.fullmatch(name) and name.replace("_", "-") not in names:
            if before.endswith("server-args"):
                raise UnknownName(f"arguments of a server are given in quotation marks: {before} '{arg} ...'")
            former, block = former_setting(name.lstrip("-").replace("-", "_")), name.rpartition(".")[0]
            if former and former.why and any(option.startswith(block) for option in names):  # the command had it
                raise UnknownName(f"unknown option {name!r}: {former.why}")
            meant = f"--{former.name}".replace("_", "-") if former and former.name else name
            near = _near_option(meant, [option for option in names if option.startswith("--")])
            raise UnknownName(f"unknown option {name!r}{near or '.'} `{prog} {full_help}` shows all options")


def _near_option(name: str, names: Sequence[str]) -> str:
    """Suggests the option for `name`: a part's setting (`--reward`, `--eval-every`), a short form (`--lr`), a typo."""
    if inner := [option for option in names if option.startswith(f"{name}.")]:
        return f": settings of {name[2:]} have names of their own, such as {inner[0]!r}."
    part, dot, last = name[2:].rpartition(".")
    other = f"--{OTHER_NAMES.get(name[2:].replace('-', '_'))}".replace("_", "-")
    if other in names:
        return f": did you mean {other!r}?"
    if f"--{part}" in names:  # a name of a mapping
        return f": did you mean '--{part} {last.replace('-', '_')}=...'?"
    same = [option for option in names if option.startswith(f"--{part}{dot}")]
    ends = [option for option in same if _last(option).startswith(last) or _initials(option) == last]
    if ends:
        return f": did you mean {min(ends, key=lambda option: (option.count('.'), _last(option) != last))!r}?"
    if dashed := [option for option in names if option.replace(".", "-") == name]:
        return f": did you mean {dashed[0]!r}?"
    if not dot or not same:
        near = nearest(name[2:], [option[2:] for option in names if dot or "." not in option]).replace("'", "'--", 1)
        if not (near or dot) and "--env-kwargs" in names:
            return f": a keyword of the environment is written '--env-kwargs {last.replace('-', '_')}=...'."
        parts = [option for option in names if dot and "." in option and part.startswith(option[2:].partition(".")[0])]
        return near or (f": did you mean a setting such as {parts[0]!r}?" if parts else "")
    prefix = f"--{part}."
    return nearest(last, [option.removeprefix(prefix) for option in same]).replace("mean '", f"mean '{prefix}")


def _last(option: str) -> str:
    return option[2:].rpartition(".")[2]


def _initials(option: str) -> str:
    """Returns the initials of an option: `lr` for `--optimizer.learning-rate`."""
    return "".join(word[0] for word in _last(option).split("-") if word)


def _one_line(box: str) -> str:
    """Returns the error in one line, without the box that tyro draws around it."""
    lines = [text for line in box.splitlines() if (text := line.strip(" │╭╮╰╯─")).strip("-")]
    if not lines:
        return "the options cannot be read"
    title, body = lines[0], lines[1:]
    end = next((index for index, line in enumerate(body) if FURTHER_HELP.match(line)), len(body))
    if title.startswith("Required options"):
        missing = [line.split("  ")[0] for line in body[:end] if REQUIRED.match(line)]
        return f"missing {', '.join(dict.fromkeys(missing)) or 'options'}"
    text = INNER.sub("", " ".join(body[:end]).removeprefix("Error parsing ").rstrip(".")) or title
    return NO_NUMBER.sub(r"a number was wanted, got \1", text)
