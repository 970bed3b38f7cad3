"""Writes a small working file, and its test, for a user to start from; the templates are in `scaffolds/`."""

from __future__ import annotations

import ast
import keyword
import re
import shlex
import sys
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.resources import files
from pathlib import Path
from string import Template

from agentgym.errors import ConfigError

__all__ = ["KINDS", "Scaffold", "write_scaffold"]

SHORT = "--steps 2 --tasks 4 --eval.episodes 0"
HALF_A_MINUTE = "--steps 25 --tasks 8 --eval.episodes 100"


@dataclass(frozen=True, slots=True)
class _Kind:
    """The product of a template: its noun, and the commands that try it, with `{place}`, `{file}` and `{test}`."""

    noun: str
    commands: tuple[str, ...]
    is_class: bool = False
    folder: str = "."
    """The folder of its templates."""


_OF_ROWS = ("agentgym train --data.train {file}:rows --reward.function {place} --steps 2 --tasks 2 --eval.episodes 0",)
KINDS = {
    "env": _Kind(
        "an environment",
        ("agentgym play {place}", "agentgym env check {place}", f"agentgym train --env {{place}} {HALF_A_MINUTE}"),
        is_class=True,
    ),
    "tool": _Kind(
        "a tool",
        ("agentgym tools list {place}", "agentgym tools call {place} text='A rose is a rose' word=rose"),
    ),
    "reward": _Kind("a reward", (f"agentgym train --env TextGame-v0 --reward.function {{place}} {SHORT}",)),
    "reward_math": _Kind("a reward", _OF_ROWS, folder="rewards"),
    "reward_code": _Kind("a reward", _OF_ROWS, folder="rewards"),
    "reward_qa": _Kind("a reward", _OF_ROWS, folder="rewards"),
    "advantage": _Kind(
        "an algorithm",
        (f"agentgym train --env TextGame-v0 --algo {{place}} --advantage.settings scale=2.0 {SHORT}",),
    ),
    "loss": _Kind(
        "a loss",
        (f"agentgym train --env TextGame-v0 --learner.loss {{place}} --learner.loss-settings cap=3.0 {SHORT}",),
    ),
    "sampler": _Kind(
        "a task sampler",
        (f"agentgym train --env TextGame-v0 --practice.sampler {{place}} {SHORT}",),
        is_class=True,
    ),
    "optimizer": _Kind(
        "an optimizer",
        (f"agentgym train --env TextGame-v0 --optimizer.name {{place}} --optimizer.decay {{file}}:in_halves {SHORT}",),
    ),
    "engine": _Kind(
        "an engine",
        (f"agentgym train --env TextGame-v0 --engine {{file}}:make_engine {SHORT}",),
        is_class=True,
    ),
}
"""The kinds of file that can be written, by the name of the template."""


@dataclass(frozen=True, slots=True)
class Scaffold:
    """The files that were written."""

    path: Path
    test: Path
    place: str
    """The name that commands take: `path/to/file.py:name`."""
    commands: tuple[str, ...]
    """The commands to try next, as typed in a shell."""


def write_scaffold(kind: str, name: str, folder: Path | str = ".") -> Scaffold:
    """Writes `name.py` and `test_name.py` into `folder`; a name is `number_lock`, `number-lock` or `NumberLock`.

    Raises ConfigError for a name that cannot be a module's and an identifier, or is one already, and for a file that
    exists: nothing is ever overwritten.
    """
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)
    module, path_of = "_".join(words).lower(), Path(folder)
    _check_name(name, module, kind)
    thing = "".join(word.capitalize() for word in words) if KINDS[kind].is_class else module
    path, test = path_of / f"{module}.py", path_of / f"test_{module}.py"
    values = {"thing": thing, "file": path.name, "title": " ".join(words).lower().capitalize()}
    folder_of = KINDS[kind].folder
    texts = {
        path: _template(folder_of, kind).substitute(values),
        test: _template(folder_of, f"test_{kind}").substitute(values),
    }
    if any(thing in _imported_names(text) for text in texts.values()):
        raise ConfigError(f"{name!r} is a name that the file itself needs; take another, such as 'my_{module}'")
    for each in texts:
        if each.exists():
            raise ConfigError(f"{str(each)!r} exists already; choose another name, or another folder by --output")
    try:
        path_of.mkdir(parents=True, exist_ok=True)
        for each, text in texts.items():
            with open(each, "x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write into {str(path_of)!r}: {error.strerror}") from error
    place = f"{path}:{thing}"
    quoted = {"place": shlex.quote(place), "file": shlex.quote(str(path)), "test": shlex.quote(str(test))}
    commands = (*KINDS[kind].commands, "pytest {test}")
    return Scaffold(path, test, place, tuple(command.format(**quoted) for command in commands))


def _check_name(name: str, module: str, kind: str) -> None:
    noun = KINDS[kind].noun
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
        plain = re.sub(r"^[\d_]+", "", module) or f"my_{kind}"
        near = plain if _is_free(plain) else f"my_{plain}"
        raise ConfigError(f"{name!r} cannot name {noun}; use letters, digits and _, such as {near!r}")
    if keyword.iskeyword(module) or keyword.issoftkeyword(module):
        raise ConfigError(f"{name!r} cannot name {noun}: it is a word of Python's; take another, such as 'my_{module}'")
    if not _is_free(module):
        raise ConfigError(
            f"{name!r} cannot name {noun}: the file {module}.py would hide the module {module!r}; take "
            f"another, such as 'my_{module}'"
        )


def _is_free(module: str) -> bool:
    """True if no keyword and no module has the name, except for files in the folder where the command is run."""
    here = {"", str(Path.cwd())}
    elsewhere = [place for place in sys.path if place not in here]
    taken = keyword.iskeyword(module) or module in sys.stdlib_module_names or module in sys.modules
    return not taken and PathFinder.find_spec(module, elsewhere) is None


def _imported_names(text: str) -> set[str]:
    """Returns the names that a file imports."""
    imports = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom | ast.Import))
    return {alias.asname or alias.name for node in imports for alias in node.names}


def _template(folder: str, name: str) -> Template:
    return Template(files("agentgym.cli").joinpath("scaffolds", folder, f"{name}.py.txt").read_text(encoding="utf-8"))
