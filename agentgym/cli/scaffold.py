"""Writes a small working file, and its test, for a user to start from; the templates are in `scaffolds/`."""

from __future__ import annotations

import ast
import keyword
import re
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder
from importlib.resources import files
from pathlib import Path
from string import Template

from agentgym.envs.catalog.listing import listed_ids
from agentgym.errors import ConfigError

__all__ = ["KINDS", "Scaffold", "fill_scaffold", "write_files", "write_package", "write_scaffold"]

SHORT = "--steps 2 --tasks 4 --eval.episodes 0"
HALF_A_MINUTE = "--steps 25 --tasks 8 --eval.episodes 100"


@dataclass(frozen=True, slots=True)
class _Kind:
    """The product of a template: its noun, and the commands that try it, with {place}, {file}, {module} and {test}."""

    noun: str
    commands: tuple[str, ...]
    is_class: bool = False
    folder: str = "."
    """The folder of its templates."""


_OF_ROWS = ("agentgym train --data.train {file}:rows --reward.function {place} --steps 2 --tasks 2 --eval.episodes 0",)
KINDS = {
    "env": _Kind(
        "an environment",
        (
            "agentgym play {place}",
            "agentgym env check {place}",
            "agentgym eval --env {place} --policy oracle -n 20",
            "agentgym sft --env {place} --output runs/{module}-sft",
            f"agentgym train --env {{place}} --model runs/{{module}}-sft {HALF_A_MINUTE}",
        ),
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
    "renderer": _Kind(
        "a renderer",
        (
            f"agentgym train --env TextGame-v0 --family {{place}} --output runs/own-renderer {SHORT}",
            "agentgym verify --deep runs/own-renderer",
        ),
        is_class=True,
    ),
}
"""The kinds of file that can be written, by the name of the template."""


PACKAGE_COMMANDS = (
    "pip install -e {install}",
    "agentgym env list",
    *KINDS["env"].commands,
    "pytest {package}",
)


@dataclass(frozen=True, slots=True)
class Scaffold:
    """The files that were written."""

    files: tuple[Path, ...]
    code_path: str
    """The name that commands take: `path/to/file.py:name`, or the id of a package's environment."""
    commands: tuple[str, ...]
    """The commands to try next, as typed in a shell."""
    folder: Path | None = None
    """The folder of a package."""


def write_scaffold(kind: str, name: str, folder: Path | str = ".") -> Scaffold:
    """Writes `name.py` and `test_name.py` into `folder`; a name is `number_lock`, `number-lock` or `NumberLock`.

    Raises ConfigError for a name that cannot be a module's and an identifier, or is one already, and for a file that
    exists: nothing is ever overwritten.
    """
    names, path_of, templates = _names(kind, name), Path(folder), KINDS[kind].folder
    path, test = path_of / f"{names['module']}.py", path_of / f"test_{names['module']}.py"
    code_path, beside = f"{path}:{names['thing']}", f"{{Path(__file__).with_name('{path.name}')}}:{names['thing']}"
    values = {
        **names,
        "file": path.name,
        "place": f"{path.name}:{names['thing']}",
        "imports": "from pathlib import Path\n\n",
        "bases": "Policy, Script, ScriptedPolicy, ToolEnv",
        "card": "",
        "env": f'f"{beside}"',
    }
    texts = _fill_python({path: (templates, f"{kind}.py"), test: (templates, f"test_{kind}.py")}, values)
    write_files(texts, path_of)
    quoted = {"place": shlex.quote(code_path), "file": shlex.quote(str(path)), "test": shlex.quote(str(test))}
    quoted["module"] = names["module"]
    commands = (*KINDS[kind].commands, "pytest {test}")
    return Scaffold((path, test), code_path, tuple(command.format(**quoted) for command in commands))


def write_package(name: str, folder: Path | str = ".") -> Scaffold:
    """Writes a package that can be installed, with an environment, into a new folder in `folder`.

    Raises ConfigError as `write_scaffold` does, for an id that is taken, and for a folder that exists.
    """
    names = _names("env", name, what="its package")
    module, env_id = names["module"], f"{names['thing']}-v0"
    package = Path(folder) / module.replace("_", "-")
    if env_id in listed_ids():
        raise ConfigError(f"{env_id!r} is an environment already; take another name, such as 'my_{module}'")
    if package.exists():
        raise ConfigError(f"{str(package)!r} exists already; choose another name, or another folder by --output")
    templates = {
        package / "pyproject.toml": ("package", "pyproject.toml"),
        package / "README.md": ("package", "README.md"),
        package / module / "__init__.py": ("package", "__init__.py"),
        package / module / "env.py": (".", "env.py"),
        package / "tests" / f"test_{module}.py": (".", "test_env.py"),
        package / ".github" / "workflows" / "test.yml": ("package", "test.yml"),
    }
    values = {
        **names,
        "folder": package.name,
        "place": env_id,
        "imports": "",
        "env": f'"{env_id}"',
        "bases": "EnvCard, Policy, Script, ScriptedPolicy, ToolEnv",
        "card": fill_scaffold("package", "card", {}),
    }
    texts = _fill_python(templates, values)
    write_files(texts, package)
    path = str(package) if package.is_absolute() else f"./{package}"
    quoted = {"package": shlex.quote(path), "install": shlex.quote(f"{path}[test]"), "place": env_id, "module": module}
    return Scaffold(tuple(texts), env_id, tuple(each.format(**quoted) for each in PACKAGE_COMMANDS), package)


def _names(kind: str, name: str, *, what: str = "") -> dict[str, str]:
    """Returns the module, the class or function, and the title for a name; raises ConfigError for an unfit one."""
    words = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+", name)
    module = "_".join(words).lower()
    _check_name(name, module, kind, what or f"the file {module}.py")
    thing = "".join(word.capitalize() for word in words) if KINDS[kind].is_class else module
    return {"name": name, "module": module, "thing": thing, "title": " ".join(words).lower().capitalize()}


def write_files(texts: Mapping[Path, str], folder: Path) -> None:
    """Writes new files; raises ConfigError, and writes none, if one exists."""
    for path in texts:
        if path.exists():
            raise ConfigError(f"{str(path)!r} exists already; choose another name, or another folder by --output")
    try:
        for path, text in texts.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            with open(path, "x", encoding="utf-8") as file:
                file.write(text)
    except OSError as error:
        raise ConfigError(f"cannot write into {str(folder)!r}: {error.strerror}") from error


def fill_scaffold(folder: str, name: str, values: Mapping[str, str]) -> str:
    """Returns the text of a template with its values."""
    text = files("agentgym.cli").joinpath("scaffolds", folder, f"{name}.txt").read_text(encoding="utf-8")
    return Template(text).substitute(values)


def _fill_python(templates: Mapping[Path, tuple[str, str]], values: Mapping[str, str]) -> dict[Path, str]:
    """Returns the texts of files; raises ConfigError if a Python file imports the name that it defines."""
    texts = {path: fill_scaffold(*template, values) for path, template in templates.items()}
    if any(values["thing"] in _imported_names(text) for path, text in texts.items() if path.suffix == ".py"):
        raise ConfigError(
            f"{values['name']!r} is a name that the file itself needs; take another, such as 'my_{values['module']}'"
        )
    return texts


def _check_name(name: str, module: str, kind: str, what: str) -> None:
    noun = KINDS[kind].noun
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
        plain = re.sub(r"^[\d_]+", "", module) or f"my_{kind}"
        near = plain if _is_free(plain) else f"my_{plain}"
        raise ConfigError(f"{name!r} cannot name {noun}; use letters, digits and _, such as {near!r}")
    if keyword.iskeyword(module) or keyword.issoftkeyword(module):
        raise ConfigError(f"{name!r} cannot name {noun}: it is a word of Python's; take another, such as 'my_{module}'")
    if not _is_free(module):
        raise ConfigError(
            f"{name!r} cannot name {noun}: {what} would hide the module {module!r}; take another, such as 'my_{module}'"
        )


def _is_free(module: str) -> bool:
    """True if no keyword and no module has the name, except for files in the folder where the command is run."""
    here = {"", str(Path.cwd())}
    elsewhere = [path for path in sys.path if path not in here]
    is_used = keyword.iskeyword(module) or module in sys.stdlib_module_names or module in sys.modules
    return not is_used and PathFinder.find_spec(module, elsewhere) is None


def _imported_names(text: str) -> set[str]:
    """Returns the names that a file imports."""
    imports = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.ImportFrom | ast.Import))
    return {alias.asname or alias.name for node in imports for alias in node.names}
